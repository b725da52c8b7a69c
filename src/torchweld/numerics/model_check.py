"""`tw.verify`: whether one model gives what another gives, judged against the model in float64.

In: a reference model, a candidate, what they are called with. Out: a `Check`, one `TensorCheck` for
each floating output and, in training, each gradient. A whole model rounds many times in a row, so
its outputs are judged as tensors, not row by row:

    max|candidate − exact| ≤ 2 · max|reference − exact| + slack, the same for the root mean square
    with 1.5; slack = 4 · eps · max|exact| · √(products that follow each other)

`exact` is the reference model run in float64, module by module: a module's parameters are widened
while it runs, so that no second model is in memory. If it cannot run in float64, `exact` is the
reference itself, and `Check.against` says so. One run shows only one sample of the reference's
rounding errors; where everything cancels (the gradient of a key's bias) that says little. So the
reference runs a few times more with every weight off by one unit in its last place, and the largest
of the errors counts as its own.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from torchweld.core.argument_checks import check_flags, check_model
from torchweld.core.errors import TorchweldError
from torchweld.core.html_shown import ShownInNotebooks
from torchweld.core.model_inputs import Workload, as_workloads, first_line
from torchweld.core.model_state import put_back
from torchweld.core.muted_warnings import untold
from torchweld.core.number_text import counted
from torchweld.core.passing_exceptions import is_interrupt
from torchweld.numerics.dropped_values import drew_alike
from torchweld.numerics.numerical_rule import RMS_FACTOR, ROW_FACTOR, SLACK_EPS

# Runs with weights off in their last place; in training each run keeps a whole model's gradients.
JITTERED_RUNS, JITTERED_TRAINING_RUNS = 4, 2

# The mean over fewer elements depends on luck; their largest error is still judged.
FEWEST_FOR_RMS = 32

_PIECE = 1 << 20  # elements
EXACT = "float64, module by module"
EAGER = "the reference itself"


@dataclass(frozen=True, kw_only=True)
class TensorCheck:
    """One tensor of both models. Errors are the largest over the largest exact value."""

    name: str  # "output 0", "grad layers.0.up.weight"
    ok: bool
    error: float  # of the candidate
    reference_error: float
    allowed: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Check(ShownInNotebooks):
    """What `verify` found; true if every tensor is as good as the reference's."""

    compared: tuple[TensorCheck, ...]
    against: str
    why_not_exact: str = ""

    @staticmethod
    def of(compared: Sequence[TensorCheck], why_not_exact: str) -> Check:
        against = EAGER if why_not_exact else EXACT
        return Check(compared=tuple(compared), against=against, why_not_exact=why_not_exact)

    @property
    def ok(self) -> bool:
        return bool(self.compared) and all(one.ok for one in self.compared)

    @property
    def error_ratio(self) -> float:
        """The largest error over the reference's own; 0 where that is not known."""
        known = [one for one in self.compared if one.reference_error > 0]
        return max((one.error / one.reference_error for one in known), default=0.0)

    @property
    def reason(self) -> str:
        """What is wrong, in one line; empty if nothing is."""
        if not self.compared:
            return "there is nothing to compare: no floating-point outputs"
        return "; ".join(f"{one.name} {one.reason}" for one in self.compared if not one.ok)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        verdict = "the same numbers" if self.ok else f"not the same: {self.reason}"
        return (
            f"{verdict}; {counted(len(self.compared), 'tensor')}, error {self.error_ratio:.2f} of "
            f"the reference's, judged against {self.against}"
        )


def verify(
    reference: nn.Module, candidate: nn.Module, inputs: Any, *, training: bool = False
) -> Check:
    """Whether `candidate` gives what `reference` gives on `inputs`.

    Both run in eval mode without gradients, or with `training` forward and backward, the loss being
    the sum over the floating outputs; modes and gradients are put back. Both get the same random
    numbers. To compare one model welded and not, see `tw.check_calls` and `tw.disabled`.
    """
    check_model("verify", reference, "reference", scripted=True)
    check_model("verify", candidate, "candidate", scripted=True)
    check_flags("verify", training=training)
    if reference is candidate:
        raise TorchweldError(
            "reference and candidate are the same object, which agrees with itself; give a copy "
            "made before the change (copy.deepcopy)"
        )
    compared: list[TensorCheck] = []
    why = ""
    workloads = as_workloads(inputs)
    for workload in workloads:
        with untold(), put_back(reference, training), put_back(candidate, training):
            expected = results(reference, workload, training)
            truth = truth_of(reference, workload, training)
            got = results(candidate, workload, training)
        why = why or truth.why_not_exact
        found = compare_results(got, expected, truth, depth_of(reference))
        prefix = f"{workload.name}: " if len(workloads) > 1 else ""
        compared += [replace(one, name=f"{prefix}{one.name}") for one in found]
    return Check.of(compared, why)


# ---- running ----

Results = dict[str, Tensor]


def results(model: nn.Module, workload: Workload, training: bool) -> Results:
    """The floating outputs by name, in training with the gradient of every parameter.

    Gradients that are there are dropped first: a backward would add to them.
    """
    for parameter in model.parameters() if training else ():
        parameter.grad = None
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
        torch.manual_seed(0)
        outputs = floating(workload.try_on(model))
        found = {f"output {i}": tensor.detach().clone() for i, tensor in enumerate(outputs)}
        if training:
            backward(outputs)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[f"grad {name}"] = parameter.grad
                    parameter.grad = None
    return found


def step_of(model: nn.Module, workload: Workload, training: bool) -> Callable[[], Any]:
    """One step: forward, in training with the backward."""

    def infer() -> Any:
        with torch.no_grad():
            return workload.run(model)

    def train() -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        output = workload.run(model)
        backward(floating(output))
        return output

    return train if training else infer


def backward(outputs: Sequence[Tensor]) -> None:
    """Runs the backward from a weighted sum of the outputs: no two elements count alike."""
    wanted = [tensor for tensor in outputs if tensor.requires_grad]
    if not wanted:
        raise TorchweldError("no output of the model requires a gradient, so there is no backward")
    torch.autograd.backward(wanted, [_weights_like(tensor) for tensor in wanted])


def _weights_like(tensor: Tensor) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(3)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(tensor.device, tensor.dtype)


def floating(value: Any) -> list[Tensor]:
    """The floating tensors of whatever a model returns, each once."""
    found: dict[int, Tensor] = {}
    for leaf in tree_leaves(_opened(value)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            found.setdefault(id(leaf), leaf)
    return list(found.values())


def _opened(value: Any) -> Any:
    """Mappings and sequences of any class as plain ones, which is what pytree looks into."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "items") and callable(value.items):
        return [_opened(item) for _, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_opened(item) for item in value]
    return value


# ---- what is true ----


@dataclass(frozen=True, kw_only=True)
class ModelTruth:
    """What `results` would be without rounding (None, and why), and with other rounding."""

    exact: Results | None = None
    jittered: tuple[Results, ...] = ()
    why_not_exact: str = ""


def truth_of(model: nn.Module, workload: Workload, training: bool) -> ModelTruth:
    """Runs the model in float64, if it can and draws the same random numbers, and with jitter."""
    why, exact = _why_not_exact(model), None
    jittered: list[Results] = []
    try:
        for run in range(JITTERED_TRAINING_RUNS if training else JITTERED_RUNS):
            jitter = functools.partial(_jittered, run=run)
            jittered.append(_changed_results(model, workload, training, jitter))
    except Exception as error:  # a model that does not accept other tensors
        if is_interrupt(error):
            raise
    _give_memory_back()
    if not why:
        try:
            exact = _changed_results(model, workload, training, _wide)
            narrow = next((n for n, t in exact.items() if t.dtype != torch.float64), None)
            if narrow is not None:
                why, exact = f"{narrow} stays {exact[narrow].dtype} in float64", None
            elif training and _drops_out(model) and not drew_alike(exact, jittered):
                why, exact = "dropout draws other random numbers in float64", None
        except Exception as error:  # the user's model, in a dtype that it was not made for
            if is_interrupt(error):
                raise
            why = f"it does not run in float64: {first_line(error)}"
    _give_memory_back()
    return ModelTruth(exact=exact, jittered=tuple(jittered), why_not_exact=why)


def _give_memory_back() -> None:
    """Frees what malloc keeps of changed weights: a quarter of GPT-2's size. glibc only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _why_not_exact(model: nn.Module) -> str:
    if any(p.dtype == torch.float64 for p in model.parameters()):
        return "the model is in float64 already"
    return ""


def _changed_results(
    model: nn.Module, workload: Workload, training: bool, change: Callable[[Tensor], Tensor]
) -> Results:
    """`results` of the model with every floating parameter, buffer and input changed."""
    with _changed(model, change, keep=training) as kept:
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
            torch.manual_seed(0)
            outputs = floating(_changed_call(workload, model, change))
            found = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
            if training:
                backward(outputs)
        for name, tensor in kept().items():
            if tensor.grad is not None:
                found[f"grad {name}"] = tensor.grad
    return found


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _jittered(tensor: Tensor, run: int) -> Tensor:
    """Off by about one unit in the last place, up or down."""
    if not tensor.is_floating_point():
        return tensor
    eps = torch.finfo(tensor.dtype).eps
    generator = torch.Generator("cpu").manual_seed(1000 * run + tensor.numel())
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    # All at once, a large weight would be in memory five times.
    for piece in torch.split(found.view(-1), _PIECE):
        drawn = torch.rand(piece.shape, generator=generator, device="cpu")
        signs = (drawn < 0.5).to(piece) * 2 - 1
        piece *= 1 + signs * eps
    return found


def _drops_out(model: nn.Module) -> bool:
    """Whether a module in it is a dropout, or has a number of that name."""
    values = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
    ]
    return any(isinstance(value, float) and value > 0 for value in values)


def _changed_call(workload: Workload, model: nn.Module, change: Callable[[Tensor], Tensor]) -> Any:
    if workload.inputs is None:
        return workload.run(model)
    given = workload.inputs
    args, kwargs = tree_map_only(Tensor, change, (given.args, given.kwargs))
    return model(*args, **kwargs)


@contextmanager
def _changed(
    model: nn.Module, change: Callable[[Tensor], Tensor], keep: bool
) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Inside, each module has changed parameters and buffers while its forward runs.

    With `keep` they stay for the backward; the yielded function gives them by name.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    kept: dict[int, Tensor] = {}
    handles = []
    stack: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []

    def other(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        if not keep:
            return change(tensor.detach())
        if id(tensor) not in kept:
            kept[id(tensor)] = change(tensor.detach()).requires_grad_(tensor.requires_grad)
        return kept[id(tensor)]

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        stack.append((module, module._parameters, module._buffers))
        # Plain dictionaries of plain tensors: nothing of the module's own is written to.
        module._parameters = {n: other(p) for n, p in module._parameters.items()}  # type: ignore[misc]
        module._buffers = {n: other(b) for n, b in module._buffers.items()}
        return None

    def after(module: nn.Module, args: Any, result: Any) -> None:
        _restore(stack.pop())

    for module in model.modules():
        if _own_floats(module):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield lambda: {names[key]: tensor for key, tensor in kept.items() if key in names}
    finally:
        for handle in handles:
            handle.remove()
        while stack:
            _restore(stack.pop())


def _restore(saved: tuple[nn.Module, dict[str, Any], dict[str, Any]]) -> None:
    module, parameters, buffers = saved
    module._parameters = parameters
    module._buffers = buffers


def _own_floats(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_floating_point() for tensor in own)


# ---- judging ----


def depth_of(model: nn.Module) -> int:
    """Roughly how many roundings follow each other."""
    return max(1, sum(p.dim() >= 2 for p in model.parameters()))


def compare_results(
    got: Results, expected: Results, truth: ModelTruth, depth: int
) -> list[TensorCheck]:
    """Each tensor of the candidate beside the reference's."""
    missing = sorted(expected.keys() ^ got.keys())
    found = [
        TensorCheck(
            name=name,
            ok=False,
            error=math.inf,
            reference_error=0.0,
            allowed=0.0,
            reason="exists in only one of the two",
        )
        for name in missing
    ]
    for name in expected:
        if name in got:
            exact = (truth.exact or {}).get(name)
            jittered = [one[name] for one in truth.jittered if name in one]
            found.append(_compared(name, got[name], expected[name], exact, jittered, depth))
    return found


def _compared(
    name: str,
    got: Tensor,
    expected: Tensor,
    exact: Tensor | None,
    jittered: Sequence[Tensor],
    depth: int,
) -> TensorCheck:
    def wrong(reason: str) -> TensorCheck:
        return TensorCheck(
            name=name, ok=False, error=math.inf, reference_error=0.0, allowed=0.0, reason=reason
        )

    if got.shape != expected.shape or got.dtype != expected.dtype:
        return wrong(
            f"is {got.dtype} {list(got.shape)} and not {expected.dtype} {list(expected.shape)}"
        )
    if not torch.equal(got.isfinite(), expected.isfinite()):
        return wrong("has NaN or Inf at other places")
    truth = expected.double() if exact is None else exact
    if truth.shape != got.shape:
        return wrong(f"is {list(truth.shape)} in float64 and {list(got.shape)} here")
    others = [expected, *(other for other in jittered if other.shape == got.shape)]
    finite = truth.isfinite() & expected.isfinite()
    for other in others:
        finite &= other.isfinite()
    if not bool(finite.any()):
        return TensorCheck(name=name, ok=True, error=0.0, reference_error=0.0, allowed=0.0)
    size = float(truth[finite].abs().max())
    ours = (got.double() - truth)[finite]
    theirs = [(other.double() - truth)[finite] for other in others]
    slack = SLACK_EPS * torch.finfo(got.dtype).eps * size * math.sqrt(depth)
    error, (reference_error, *more) = _largest(ours), list(map(_largest, theirs))
    allowed = ROW_FACTOR * max([reference_error, *more]) + slack
    rms, allowed_rms = _rms(ours), RMS_FACTOR * max(map(_rms, theirs)) + slack
    reason = ""
    if error > allowed:
        reason = f"is off by {error:.3g}, {error / max(allowed, 1e-300):.3g} times what is allowed"
    elif ours.numel() >= FEWEST_FOR_RMS and rms > allowed_rms:
        reason = f"has {rms / allowed_rms:.2f} times the root mean square error that is allowed"
    unit = size or 1.0
    return TensorCheck(
        name=name,
        ok=not reason,
        error=error / unit,
        reference_error=reference_error / unit,
        allowed=allowed / unit,
        reason=reason,
    )


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
