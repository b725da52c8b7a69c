"""What can be fused: layers, chains of them, and groups that share an input.

A layer computes `act(x · Wᵀ + b)`, or, gated, `act(gate) · up`. `Layer` has its tensors,
`LayerForm` is a layer without them. A tuple of forms and the op's `spec` text are equivalent;
`csrc/torch_glue/block_spec.h` has the grammar. M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

from torchweld.core.activations import format_activation, parse_activation
from torchweld.core.argument_checks import shown
from torchweld.core.errors import BlockError

Gate = Literal["none", "separate", "first", "second", "interleaved"]
GATES: tuple[Gate, ...] = get_args(Gate)
_DROP = "drop:"  # the flag of a layer with dropout, before the probability


@dataclass(frozen=True, kw_only=True)
class LayerForm:
    """One layer without its tensors."""

    activation: str = "identity"
    parameters: tuple[float, ...] = ()
    bias: bool = False
    transposed: bool = False  # weights are [in, out]
    gate: Gate = "none"
    dropout: float = 0.0  # in training, the probability with which an output is dropped

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise BlockError(f"dropout={shown(self.dropout)}; allowed is 0 ≤ dropout < 1")

    @property
    def weights(self) -> int:
        return 2 if self.gate == "separate" else 1

    @property
    def tensors(self) -> int:
        return self.weights * (2 if self.bias else 1)

    def __str__(self) -> str:
        flags = ["b"] * self.bias + ["t"] * self.transposed
        flags += [self.gate] * (self.gate != "none")
        flags += [f"{_DROP}{float(self.dropout)!r}"] * (self.dropout > 0)
        return "/".join([format_activation(self.activation, self.parameters), *flags])


@dataclass(frozen=True)
class Layer:
    """One layer with its tensors, as `tw.mlp` takes it.

    `gated` says how one weight holds gate and up ("first": the gate's outputs come first); for two
    weights give the gate's as `gate`. `transposed` weights are `[in, out]`, as Conv1D keeps them.
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str = "identity"
    gated: Literal["first", "second", "interleaved"] | None = None
    gate: Tensor | None = None
    gate_bias: Tensor | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        tensors = (
            ("weight", self.weight, False),
            ("bias", self.bias, True),
            ("gate", self.gate, True),
            ("gate_bias", self.gate_bias, True),
        )
        for name, tensor, may_lack in tensors:
            if not isinstance(tensor, Tensor) and not (may_lack and tensor is None):
                raise BlockError(
                    f"a Layer's {name} is a {type(tensor).__name__}; expected a tensor"
                )
        parse_activation(self.activation)
        if not isinstance(self.transposed, bool):
            raise BlockError(f"transposed={shown(self.transposed)}; expected True or False")
        if self.gated is not None and (
            not isinstance(self.gated, str) or self.gated not in GATES[2:]
        ):
            raise BlockError(
                f"gated={shown(self.gated)}; allowed: 'first', 'second', 'interleaved', None"
            )
        if self.gate is not None and self.gated is not None:
            raise BlockError(
                f"gated={self.gated!r} says that one weight holds gate and up, but a separate gate "
                "weight is given too; leave one of them out"
            )
        if (self.gate_bias is not None) != (self.gate is not None and self.bias is not None):
            raise BlockError(
                "a gated layer with two weights has a bias for both or for neither; give `bias` "
                "and `gate_bias`, or none (use zeros for one that is missing)"
            )

    @property
    def form(self) -> LayerForm:
        name, parameters = parse_activation(self.activation)
        gate: Gate = "separate" if self.gate is not None else self.gated or "none"
        return LayerForm(
            activation=name,
            parameters=parameters,
            bias=self.bias is not None,
            transposed=self.transposed,
            gate=gate,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors as the op takes them: each weight, then its bias, the gate before up."""
        pairs = [(self.gate, self.gate_bias), (self.weight, self.bias)]
        return [t for pair in pairs for t in pair if t is not None]


def format_spec(forms: Sequence[LayerForm]) -> str:
    if not forms:
        raise BlockError("a chain or group needs at least one layer; none was given")
    return ";".join(str(form) for form in forms)


def parse_spec(text: str) -> tuple[LayerForm, ...]:
    return tuple(_parse_layer(part) for part in text.split(";"))


def _parse_layer(text: str) -> LayerForm:
    activation, *flags = text.split("/")
    name, parameters = parse_activation(activation)
    gate: Gate = "none"
    dropout = 0.0
    for flag in flags:
        if flag in GATES[1:]:
            gate = flag
        elif flag.startswith(_DROP):
            dropout = _parse_dropout(flag)
        elif flag not in ("b", "t"):
            raise BlockError(
                f"unknown flag {flag!r} in a spec; there are: b t {' '.join(GATES[1:])} {_DROP}p"
            )
    return LayerForm(
        activation=name,
        parameters=parameters,
        bias="b" in flags,
        transposed="t" in flags,
        gate=gate,
        dropout=dropout,
    )


def _parse_dropout(flag: str) -> float:
    try:
        probability = float(flag.removeprefix(_DROP))
    except ValueError:
        probability = -1.0
    if not 0.0 < probability < 1.0:
        raise BlockError(
            f"flag {flag!r} in a spec: a probability above 0 and below 1 follows {_DROP}"
        )
    return probability


def with_dropout(
    forms: Sequence[LayerForm], probabilities: Sequence[float]
) -> tuple[LayerForm, ...]:
    """The same layers with dropout on their outputs, one probability per layer; () is none."""
    if not probabilities:
        return tuple(forms)
    pairs = zip(forms, probabilities, strict=True)
    return tuple(replace(form, dropout=float(probability)) for form, probability in pairs)


def split_tensors(
    forms: Sequence[LayerForm], tensors: Sequence[Tensor]
) -> list[tuple[LayerForm, list[Tensor]]]:
    """Each form with its own tensors."""
    wanted = sum(form.tensors for form in forms)
    if wanted != len(tensors):
        raise BlockError(f"the spec asks for {wanted} tensors, {len(tensors)} were given")
    parts, first = [], 0
    for form in forms:
        parts.append((form, list(tensors[first : first + form.tensors])))
        first += form.tensors
    return parts
