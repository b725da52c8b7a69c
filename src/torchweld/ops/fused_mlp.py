"""`FusedMLP`: an MLP whose forward is one op, with ordinary `nn.Linear` children.

In inference (eval, gradients off) it keeps a packed copy of the weights, checked at every call; see
`packing.py`. In training, dropout is part of the op, and `recompute` says what is kept for the
backward. A child that is no longer a plain Linear, or that has hooks, runs its own forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.compiler import is_dynamo_compiling

from torchweld.core.activations import ACTIVATIONS, format_activation, parse_activation
from torchweld.core.argument_checks import check_flags, check_optional_flags, misfit, shown
from torchweld.core.blocks import Gate, LayerForm, format_spec, with_dropout
from torchweld.core.errors import BlockError
from torchweld.ops import compiled_forward
from torchweld.ops.backends.backend import wants_gradients
from torchweld.ops.packing import compiling_for_here, new_pack

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_SETTINGS = ("activation", "output_activation", "gated", "dropout", "packing", "recompute")


class FusedMLP(nn.Module):
    """`sizes[0] → … → sizes[-1]`, `activation` between the layers, as one op.

    Two layers are children `up` and `down`; gated (exactly three sizes), `gate`, `up` and `down`
    compute `down(activation(gate(x)) · up(x))`; any other number is `layers.0`, `layers.1`, …
    In training, `dropout` acts on the input of every layer but the first. Activations may have
    parameters, as in `"leaky_relu:0.2"`. With `packing=False`, inference keeps no packed copy of
    the weights. For the backward, `recompute=True` keeps the input alone and computes hidden values
    again; False keeps one hidden-sized tensor per layer too (gated: two), which is faster; None
    leaves that to torchweld.

    `activation`, `output_activation`, `dropout`, `packing` and `recompute` may be set later and
    count from the next call on. `gated` may not: the children depend on it.
    """

    __jit_unused_properties__ = ("packed_bytes",)
    # Tools that watch calls of modules must leave the children alone: a changed child runs its own
    # forward, and then they watch something else than this op.
    runs_whole = True

    __jit_ignored_attributes__ = ("_kept",)

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str = "gelu",
        *,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        output_activation: str = "identity",
        packing: bool = True,
        recompute: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_flags("FusedMLP", gated=gated, bias=bias, packing=packing)
        sizes = _checked_sizes(sizes, gated)
        _check_place(device, dtype)

        def linear(k: int, n: int) -> nn.Linear:
            return nn.Linear(k, n, bias=bias, device=device, dtype=dtype)

        shapes = list(pairwise(sizes))
        linears = [linear(k, n) for k, n in (shapes[:1] if gated else []) + shapes]
        self._adopt(linears, activation, gated, dropout, output_activation, packing, recompute)

    @classmethod
    def from_linears(
        cls,
        linears: Sequence[nn.Linear],
        activation: str = "gelu",
        *,
        gated: bool = False,
        dropout: float = 0.0,
        output_activation: str = "identity",
        packing: bool = True,
        recompute: bool | None = None,
    ) -> FusedMLP:
        """An MLP over existing Linears, which stay the same objects; gated: `[gate, up, down]`."""
        check_flags("FusedMLP.from_linears", gated=gated, packing=packing)
        if not isinstance(linears, (Sequence, nn.ModuleList)):
            raise misfit("FusedMLP.from_linears", "linears", linears, "a list of nn.Linear")
        linears = list(linears)
        for i, linear in enumerate(linears):
            if not isinstance(linear, nn.Linear):
                raise BlockError(
                    f"linears[{i}] is a {type(linear).__name__}; expected nn.Linear. Weights kept "
                    "otherwise can be given to torchweld.mlp"
                )
        if gated and len(linears) != 3:
            raise BlockError(f"gated takes 3 Linears (gate, up, down); {len(linears)} were given")
        path = linears[1:] if gated else linears
        _checked_sizes(
            [path[0].in_features, *(x.out_features for x in path)] if path else [], gated
        )
        for i, (before, after) in enumerate(pairwise(path)):
            if before.out_features != after.in_features:
                raise BlockError(
                    f"Linear {i} has {before.out_features} outputs but the next one takes "
                    f"{after.in_features}; neighbours must fit"
                )
        if gated and linears[0].weight.shape != linears[1].weight.shape:
            raise BlockError(
                f"gate has weight {list(linears[0].weight.shape)}, up "
                f"{list(linears[1].weight.shape)}; they must be equal"
            )
        if gated and (linears[0].bias is None) != (linears[1].bias is None):
            raise BlockError("gate and up must both have a bias, or neither")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._adopt(linears, activation, gated, dropout, output_activation, packing, recompute)
        return module

    def _adopt(
        self,
        linears: list[nn.Linear],
        activation: str,
        gated: bool,
        dropout: float,
        output_activation: str,
        packing: bool,
        recompute: bool | None,
    ) -> None:
        self.activation = activation
        self.output_activation = output_activation
        self.gated = gated
        self.dropout = dropout
        self.packing = packing
        self.recompute = recompute
        if gated:
            self.gate, self.up, self.down = linears
        elif len(linears) == 2:
            self.up, self.down = linears
        else:
            self.layers = nn.ModuleList(linears)
        self._holder = "layers" if "layers" in self._modules else None
        self._names = tuple(self._linears())
        self._respecify()
        self._new_pack()

    def _respecify(self) -> None:
        """Writes down what the op computes, for the compiled forward and a scripted one."""
        forms = self._forms()
        self._spec = format_spec(forms)
        self._training_spec = self._spec_in_training(forms)

    def _spec_in_training(self, forms: Sequence[LayerForm]) -> str:
        return format_spec(with_dropout(forms, [self.dropout] * (len(forms) - 1) + [0.0]))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SETTINGS:
            super().__setattr__(name, value)
            return
        made = "_spec" in self.__dict__
        if name in ("activation", "output_activation"):
            value = format_activation(*parse_activation(value))
        elif name == "dropout":
            value = _checked_dropout(value)
        elif name == "recompute":
            check_optional_flags("FusedMLP", recompute=value)
        elif name == "gated" and made and value is not self.gated:
            raise BlockError(
                f"gated={value!r} cannot be set later; the children of this FusedMLP are those of "
                f"gated={self.gated}: make a new one; FusedMLP.from_linears keeps Linears"
            )
        else:
            check_flags("FusedMLP", **{name: value})
        super().__setattr__(name, value)
        if made:
            self._respecify()
            if name == "packing":
                self._new_pack()

    def _new_pack(self) -> None:
        self._pack = new_pack() if self.packing else None
        # A graph holds this number instead of the pack, which a compiler cannot look into.
        self._kept: Tensor | None = None if self._pack is None else self._pack.number

    # ---- the children, as they are now ----

    def _linears(self) -> dict[str, Any]:
        return self._modules if self._holder is None else self.layers._modules

    def _forms(self) -> list[LayerForm]:
        """The layers, with biases where the children have one now."""
        children = [child for child in self._linears().values() if child is not None]
        biases = [getattr(child, "bias", None) is not None for child in children]
        if self.gated:
            biases = biases[1:]
        forms = []
        for i, has_bias in enumerate(biases):
            last = i + 1 == len(biases)
            name, parameters = parse_activation(self.output_activation if last else self.activation)
            gate: Gate = "separate" if self.gated and i == 0 else "none"
            forms.append(
                LayerForm(activation=name, parameters=parameters, bias=has_bias, gate=gate)
            )
        return forms

    def _stranger(self) -> str | None:
        """Why a child must run its own forward instead of being read; None if none must."""
        for name, child in self._linears().items():
            if not isinstance(child, nn.Linear) or type(child).forward is not nn.Linear.forward:
                return f"{name} is a {type(child).__name__}"
            if "forward" in child.__dict__:
                return f"{name} has a forward of its own"
            for hooks in _HOOKS:
                if len(getattr(child, hooks)) > 0:
                    return f"{name} has {hooks.strip('_').replace('_', ' ')}"
        return None

    # ---- forward ----

    def forward(self, x: Tensor) -> Tensor:
        if is_scripting():
            return self._scripted(x)
        if not is_dynamo_compiling():
            # Reads the children in C: in Python, that is most of the cost of a small call.
            y = compiled_forward(self, x)
            if y is not None:
                return y
        return self._general(x)

    def _general(self, x: Tensor) -> Tensor:
        """Any state of the children that the compiled forward does not handle."""
        stranger = self._stranger()
        if stranger is not None:
            if not torch.compiler.is_compiling():
                _say_once(self, f"FusedMLP runs its children one by one, because {stranger}")
            return self._children_one_by_one(x)
        forms = self._forms()
        tensors = [
            tensor
            for child in self._linears().values()
            for tensor in (child.weight, child.bias)
            if tensor is not None
        ]
        dropping = self.training and self.dropout > 0.0
        # `chain` does the same without a wish or dropout, and shows in graphs what it is. It also
        # refuses what is not a tensor.
        wish = self.recompute is not None and isinstance(x, Tensor) and wants_gradients(x, tensors)
        if not dropping and not wish:
            return self._chain(x, tensors, format_spec(forms))
        spec = self._spec_in_training(forms) if dropping else format_spec(forms)
        op = torch.ops.torchweld.chain_training
        return op(x, tensors, spec, self.recompute)  # type: ignore[no-any-return]

    def _chain(self, x: Tensor, tensors: list[Tensor], spec: str) -> Tensor:
        ops = torch.ops.torchweld
        # Copies are of the CPU alone; elsewhere their number would only be in the way.
        packs = isinstance(x, Tensor) and x.device.type == "cpu" and not self.training
        if self._kept is None or not packs or not compiling_for_here() or self._computes():
            return ops.chain(x, tensors, spec)  # type: ignore[no-any-return]
        return ops.chain_kept(x, tensors, spec, self._kept)  # type: ignore[no-any-return]

    def _computes(self) -> bool:
        """Whether a weight is computed at each call; then a copy would be made each time too."""
        for child in self._linears().values():
            if "weight" not in child._parameters or "bias" not in child._parameters:
                return True
        return False

    def _children_one_by_one(self, x: Tensor) -> Tensor:
        children = [child for child in self._linears().values() if child is not None]
        forms = self._forms()
        gate = children.pop(0) if self.gated else None
        for i, (child, form) in enumerate(zip(children, forms, strict=True)):
            act = ACTIVATIONS[form.activation].apply
            if i > 0:
                x = F.dropout(x, self.dropout, self.training)
            if i == 0 and gate is not None:
                x = act(gate(x), *form.parameters) * child(x)
            else:
                x = act(child(x), *form.parameters)
        return x

    def _scripted(self, x: Tensor) -> Tensor:
        """What `torch.jit.script` compiles; it evaluates conditions on attributes at that time."""
        tensors: list[Tensor] = []
        if hasattr(self, "layers"):
            for layer in self.layers:
                tensors.append(layer.weight)  # type: ignore[arg-type]
                if layer.bias is not None:
                    tensors.append(layer.bias)  # type: ignore[arg-type]
        else:
            if hasattr(self, "gate"):
                tensors.append(self.gate.weight)
                if self.gate.bias is not None:
                    tensors.append(self.gate.bias)
            tensors.append(self.up.weight)
            if self.up.bias is not None:
                tensors.append(self.up.bias)
            tensors.append(self.down.weight)
            if self.down.bias is not None:
                tensors.append(self.down.bias)
        ops = torch.ops.torchweld
        if self.training and self.dropout > 0.0:
            return ops.chain_training(x, tensors, self._training_spec, self.recompute)  # type: ignore[no-any-return]
        if self.recompute is not None and torch.is_grad_enabled():
            return ops.chain_training(x, tensors, self._spec, self.recompute)  # type: ignore[no-any-return]
        return ops.chain(x, tensors, self._spec)  # type: ignore[no-any-return]

    # ---- state ----

    @property
    def packed_bytes(self) -> int:
        """The memory of the packed copy that inference keeps, in bytes."""
        return 0 if self._pack is None else int(self._pack.nbytes)

    def train(self, mode: bool = True) -> FusedMLP:
        if mode and self._pack is not None:
            self._pack.clear()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pack": None, "_kept": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__({"recompute": None, **state})  # type: ignore[no-untyped-call]
        self._respecify()  # pickles of before have no spec for training
        self._new_pack()

    def extra_repr(self) -> str:
        parts = [f"activation={self.activation!r}"]
        if self.output_activation != "identity":
            parts.append(f"output_activation={self.output_activation!r}")
        if self.gated:
            parts.append("gated=True")
        if self.dropout:
            parts.append(f"dropout={self.dropout}")
        if self.recompute is not None:
            parts.append(f"recompute={self.recompute}")
        return ", ".join(parts)


def _check_place(device: Any, dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise misfit("FusedMLP", "dtype", dtype, "a floating-point torch.dtype")
    if device is None:
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise misfit("FusedMLP", "device", device, "a torch.device, or its name") from error


def _checked_dropout(dropout: float) -> float:
    real = isinstance(dropout, Real) and not isinstance(dropout, bool)
    if not real or not 0.0 <= dropout < 1.0:
        raise BlockError(f"dropout={shown(dropout)}; allowed is 0 ≤ dropout < 1")
    return float(dropout)


def _checked_sizes(sizes: Sequence[int], gated: bool) -> list[int]:
    if not isinstance(sizes, Sequence):
        raise misfit("FusedMLP", "sizes", sizes, "whole numbers in a list, as in (768, 3072, 768)")
    sizes = list(sizes)
    whole = [isinstance(s, int) and not isinstance(s, bool) and s >= 1 for s in sizes]
    if len(sizes) < 2 or not all(whole):
        raise BlockError(
            f"sizes={sizes}; expected two or more whole numbers of at least 1, such as "
            "(768, 3072, 768)"
        )
    if gated and len(sizes) != 3:
        raise BlockError(
            f"sizes={sizes} with gated=True; a gated MLP has exactly three sizes: in, hidden, out"
        )
    return sizes


def _say_once(module: nn.Module, message: str) -> None:
    said = module.__dict__.setdefault("_said", set())
    if message not in said:
        said.add(message)
        warnings.warn(message, stacklevel=5)
