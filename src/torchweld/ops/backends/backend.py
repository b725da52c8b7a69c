"""What a backend is, and what it is asked about: a `Form`, a chain or group without its tensors.

A backend says what it can do (`abilities`) and why it cannot serve (`unavailable`,
`unsupported_reasons`). It builds a `Runner`: a block bound to its tensors, x `[..., K]` in,
`[..., N]` out (one per member of a group). M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchweld.core.blocks import LayerForm, format_spec, split_tensors
from torchweld.core.errors import BlockError, UnsupportedError
from torchweld.core.typed_names import known
from torchweld.ops.backends.abilities import Abilities

FormKind = Literal["chain", "group"]


@dataclass(frozen=True, kw_only=True)
class Form:
    """What to compute. `sizes` has (K, N) of each layer; N is the width after a gate."""

    kind: FormKind
    forms: tuple[LayerForm, ...]
    sizes: tuple[tuple[int, int], ...]

    @property
    def K(self) -> int:  # noqa: N802
        return self.sizes[0][0]

    @property
    def drops_out(self) -> bool:
        return any(form.dropout > 0 for form in self.forms)

    @property
    def spec(self) -> str:
        """The text that the ops of `torch.ops.torchweld` take."""
        return format_spec(self.forms)

    def __str__(self) -> str:
        widths = [str(N) for _, N in self.sizes]
        joint = "→" if self.kind == "chain" else ", "
        return f"{self.kind} {self.K}→{joint.join(widths)} ({self.spec})"

    @staticmethod
    def of(kind: FormKind, forms: Sequence[LayerForm], tensors: Sequence[Tensor]) -> Form:
        """The block that `tensors` make, in the order of the ops; else a BlockError."""
        format_spec(forms)  # at least one
        sizes = [
            _sizes(i, form, own) for i, (form, own) in enumerate(split_tensors(forms, tensors))
        ]
        for i in range(1, len(sizes)):
            feeds, given = (
                ("x", sizes[0][0]) if kind == "group" else (f"layer {i - 1}", sizes[i - 1][1])
            )
            if sizes[i][0] != given:
                raise BlockError(
                    f"layer {i} takes {sizes[i][0]} features, but {feeds} has {given}; "
                    "they must be equal"
                )
        found = Form(kind=kind, forms=tuple(forms), sizes=tuple(sizes))
        if kind == "group" and found.drops_out:
            raise BlockError(f"{found} has dropout, which chains alone have; leave it out")
        return found


def _sizes(index: int, form: LayerForm, tensors: Sequence[Tensor]) -> tuple[int, int]:
    step = 2 if form.bias else 1
    shapes = {tuple(weight.shape) for weight in tensors[::step]}
    if len(shapes) != 1:
        raise BlockError(
            f"layer {index}'s gate and up weights have shapes {sorted(shapes)}; they must be equal"
        )
    shape = shapes.pop()
    if len(shape) != 2 or 0 in shape:
        raise BlockError(
            f"layer {index}'s weight has shape {list(shape)}; expected two dimensions of at least "
            "1, [out, in], or [in, out] in a transposed layer"
        )
    K, N = shape if form.transposed else shape[::-1]
    for bias in tensors[1::2] if form.bias else ():
        if tuple(bias.shape) != (N,):
            raise BlockError(f"layer {index}'s bias has shape {list(bias.shape)}; expected [{N}]")
    if form.gate in ("none", "separate"):
        return K, N
    if N % 2:
        raise BlockError(
            f"layer {index} is gated with one weight of {N} outputs; gate and up need an even "
            "number"
        )
    return K, N // 2


class Runner(Protocol):
    """A block bound to its tensors.

    Each call reads these tensors as they are then, also after changes of their contents or `.data`.
    If another parameter object replaces one of them, that is another tensor and needs another
    build.
    """

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copy of the weights that it keeps; 0 without a copy."""

    def __call__(self, x: Tensor) -> Tensor | list[Tensor]: ...


@runtime_checkable
class CountsKernels(Protocol):
    """A backend that says what it launches on a GPU, so that a bench can hold it to that."""

    def expected_kernels(self, block: Form) -> dict[str, int] | None:
        """How many kernels of each kind a call without gradients launches; None if not known."""


class Backend(Protocol):
    """One way to run blocks: a row of `BACKENDS`."""

    @property
    def name(self) -> str: ...

    @property
    def abilities(self) -> Abilities: ...

    def unavailable(self) -> list[str]:
        """Why it cannot be used on this machine at all; empty if it can."""

    def unsupported_reasons(
        self,
        block: Form,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        mode: str | None = None,
    ) -> list[str]:
        """Why it cannot run `block` on x of these shapes, here or at all; empty if it can."""

    def build(self, block: Form, tensors: Sequence[Tensor], mode: str | None = None) -> Runner:
        """`block` bound to `tensors`; if it cannot be, an UnsupportedError with every reason."""


def mode_of(backend: Backend, mode: str | None) -> str:
    """The mode asked for, or the default."""
    names = [mode.name for mode in backend.abilities.modes]
    return known(mode or names[0], names, f"mode of backend {backend.name}")


def plain_reasons(
    backend: Backend, block: Form, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """Why it cannot be used here at all, and the reasons that follow from its abilities."""
    can = backend.abilities
    reasons = backend.unavailable()
    if not can.runs_on([device.type]):
        reasons.append(f"it runs on {', '.join(can.devices or ())}; the tensors are on {device}")
    if str(dtype).removeprefix("torch.") not in can.dtypes:
        reasons.append(f"{dtype} is not one of {', '.join(can.dtypes)}; cast with .to()")
    if block.drops_out and not can.drops_out:
        reasons.append("it does not apply dropout inside a block")
    if not can.deterministic and torch.are_deterministic_algorithms_enabled():
        reasons.append(
            "its results differ in their last bits from run to run, and "
            "torch.use_deterministic_algorithms(True) forbids that"
        )
    return reasons


def device_of(tensor: Tensor) -> torch.device:
    """The device that a weight is for. A weight on meta gets its numbers later: on the CPU."""
    return torch.device("cpu") if tensor.is_meta else tensor.device


def check_build(backend: Backend, block: Form, tensors: Sequence[Tensor], mode: str | None) -> str:
    """The start of every `build`: checks `tensors`, and returns the mode."""
    mode = mode_of(backend, mode)
    given = Form.of(block.kind, block.forms, tensors)
    if given != block:
        raise BlockError(f"the tensors make {given}, but the block to build is {block}")
    kinds = {(t.dtype, t.device) for t in tensors}
    if len(kinds) > 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise BlockError(
            f"the tensors are {listed}; all must have one dtype and device: move or cast with .to()"
        )
    reasons = backend.unsupported_reasons(block, (), *kinds.pop(), mode)
    if reasons:
        raise UnsupportedError(*refusal_lines(backend.name, mode, block, reasons))
    return mode


def refusal_lines(name: str, mode: str | None, block: Form, reasons: Sequence[str]) -> list[str]:
    what = f"{name} in mode {mode}" if mode else name
    return [f"backend {what} cannot run {block}:", *(f"  - {r}" for r in reasons)]


def wants_gradients(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether autograd will record a call. A loop: compilers cannot follow a generator."""
    wanted = x.requires_grad
    for tensor in tensors:
        wanted = wanted or tensor.requires_grad
    return wanted and torch.is_grad_enabled()


def values_alone(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether a call needs only values: no gradient or tangent, no autocast, no tracer.

    Only then may a runner overwrite its own intermediate results, or use a copy of the weights.
    """
    if wants_gradients(x, tensors):
        return False
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    return x.is_meta or not torch.is_autocast_enabled(x.device.type)


def check_features(x: Tensor, block: Form) -> None:
    """Refuses a wrong last dimension, which folding x into rows would hide."""
    if x.dim() == 0 or x.shape[-1] != block.K:
        raise BlockError(
            f"x has shape {list(x.shape)}; expected {block.K} features in its last dimension"
        )
