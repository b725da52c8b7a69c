"""Which activation an elementwise expression is, found by what it computes.

An expression of one variable is evaluated in float64 on points from 1e-8 to 1e12 on both sides of
zero and held against each activation there is. So eight ops that spell gelu, `x * sigmoid(x)` and
`relu(x) ** 2` need no patterns, and a clamp at 7 or a constant with four digits is not overlooked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchweld.core.activations import ACTIVATIONS, format_activation
from torchweld.welds.refusal_reasons import op_name
from torchweld.welds.tracing.graph_values import EXPRESSION, Apply, Expression, Half, nodes

MOST_NUMBERS = 12  # of a formula, whose neighbourhood is looked at
Function = Callable[[Tensor], Tensor]

# Written out with constants of ten digits, gelu_tanh is off by 1e-11: closer than float32 can tell.
# In float64 that is another function.
_TOLERANCE = {torch.float64: 1e-14}
_USUAL_TOLERANCE = 3e-8
_WIDE: Any = {"dtype": torch.float64, "device": "cpu"}
# exp(80) squared is still a float32; beyond, written-out formulas overflow where fused ones do not.
_SAFE = 80.0


@dataclass(frozen=True, kw_only=True)
class Match:
    """The expression is `scale · activation(z)`."""

    activation: str
    parameters: tuple[float, ...]
    scale: float

    def __str__(self) -> str:
        return format_activation(self.activation, self.parameters)


def evaluate(value: Expression, leaves: Mapping[str, Tensor]) -> Tensor:
    """An expression with numbers for its leaves, given by their texts."""
    known: dict[int, Any] = {}

    def of(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return type(item)(of(part) for part in item)
        return known[id(item)] if isinstance(item, EXPRESSION) else item

    for node in nodes(value):
        if isinstance(node, Half):
            known[id(node)] = leaves[node.text]
        elif isinstance(node, Apply):
            kwargs = {key: of(item) for key, item in node.kwargs.items()}
            known[id(node)] = node.op(*of(node.args), **kwargs)
        else:
            raise AssertionError(f"cannot evaluate {node}")
    result: Tensor = known[id(value)]
    return result


def _points(count: int) -> Tensor:
    sizes = torch.logspace(-8, 12, count // 8, **_WIDE)
    return torch.cat([torch.linspace(-12, 12, count | 1, **_WIDE), sizes, -sizes])


def match_one(value: Expression, leaf: Half, dtype: torch.dtype) -> Match | None:
    """`value`, which depends on `leaf` alone, as an activation of it."""
    points = torch.cat([_points(2400), _kinks(value)])
    return _match(lambda z: evaluate(value, {leaf.text: z}), _hints(value), dtype, points)


def _kinks(value: Expression) -> Tensor:
    """Points around the numbers that a formula has, their sums and quotients: where it may bend."""
    numbers = {
        abs(float(argument))
        for node in nodes(value)
        if isinstance(node, Apply)
        for argument in (*node.args, *node.kwargs.values())
        if isinstance(argument, (int, float)) and math.isfinite(argument)
    }
    few = sorted(numbers)[:MOST_NUMBERS]
    found = {*few, *(a + b for a in few for b in few), *(a - b for a in few for b in few)}
    found |= {a / b for a in few for b in few if b} | {a * b for a in few for b in few}
    around = torch.tensor(sorted(found), **_WIDE)[:, None]
    near = torch.tensor([0.0, 1e-6, -1e-6, 1e-3, -1e-3, 0.1, -0.1], **_WIDE)
    points = torch.cat([around + near, around * (1 + near)]).reshape(-1)
    return torch.cat([points, -points])


def match_gate(value: Expression, gate: Half, up: Half, dtype: torch.dtype) -> Match | None:
    """`value`, which depends on both, as `scale · activation(gate) · up`."""
    z = _points(480)
    factors = torch.tensor([1.0, -1.0, 0.0, 0.3, -7.5, 60.0, -1e4, 1e7, 1e-6], **_WIDE)
    grid = evaluate(
        value, {gate.text: z[:, None].expand(-1, 9), up.text: factors.expand(len(z), -1)}
    )
    alone = grid[:, 0]
    allowed = _allowed(alone, z, 1.0, dtype)[:, None] * factors.abs()
    finite = grid.isfinite() & alone.isfinite()[:, None] | (z.abs() < _SAFE)[:, None]
    if not bool((((grid - alone[:, None] * factors).abs() <= allowed) | ~finite).all()):
        return None

    def at_one(z: Tensor) -> Tensor:
        return evaluate(value, {gate.text: z, up.text: torch.ones_like(z)})

    return _match(at_one, _hints(value), dtype, torch.cat([_points(2400), _kinks(value)]))


def _match(
    function: Function, hints: Mapping[str, tuple[float, ...]], dtype: torch.dtype, z: Tensor
) -> Match | None:
    y = function(z)
    if y.shape != z.shape or not y.is_floating_point():
        return None
    if bool((~y.isfinite() & (z.abs() < _SAFE)).any()):
        return None
    for name, parameters in _candidates(function, hints):
        expected = ACTIVATIONS[name].apply(z, *parameters)
        for scale in _scales(function, name, parameters):
            close = (y - scale * expected).abs() <= _allowed(expected, z, scale, dtype)
            if bool((close | ~y.isfinite()).all()):
                return Match(activation=name, parameters=parameters, scale=scale)
    return None


def _allowed(y: Tensor, z: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    tolerance = _TOLERANCE.get(dtype, _USUAL_TOLERANCE)
    # The last summand is what 2 * sigmoid(2z) - 1 loses in float64 where z is tiny.
    return abs(scale) * (tolerance * (y.abs() + z.abs().clamp(max=1.0)) + 1e-15)


def _scales(function: Function, name: str, parameters: tuple[float, ...]) -> Iterator[float]:
    """What the activation may have to be multiplied by: what it takes at 1, or nothing at all."""
    one = torch.ones(1, **_WIDE)
    scale = float(function(one)) / float(ACTIVATIONS[name].apply(one, *parameters))
    if math.isclose(scale, 1.0, rel_tol=1e-6):  # rounded constants inside make it almost 1
        yield 1.0
    if math.isfinite(scale) and scale != 0.0:
        rounded = float(f"{scale:.12g}")
        yield rounded if math.isclose(scale, rounded, rel_tol=2e-15) else scale


def _candidates(
    function: Function, hints: Mapping[str, tuple[float, ...]]
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Every activation, with the parameters that the function would have to have."""
    at = function(torch.tensor([1.0, -1.0, -100.0, 0.0], **_WIDE)).tolist()
    for name, activation in ACTIVATIONS.items():
        if not activation.defaults:
            yield name, ()
        elif name in hints:
            yield name, hints[name]
        elif name == "leaky_relu" and at[0] != 0.0:
            yield name, (-at[1] / at[0],)
        elif name == "elu" and at[0] != 0.0:
            yield name, (-at[2] / at[0],)
        elif name == "softplus" and at[3] > 0.0:
            yield name, (math.log(2.0) / at[3], activation.defaults[1])


def _hints(value: Expression) -> dict[str, tuple[float, ...]]:
    """Parameters as the ops themselves have them: a threshold at 20 cannot be seen in numbers."""
    found: dict[str, tuple[float, ...]] = {}
    for node in nodes(value):
        if isinstance(node, Apply) and op_name(node.op) == "aten.softplus":
            defaults = ACTIVATIONS["softplus"].defaults
            given = tuple(float(number) for number in node.args[1:])
            found["softplus"] = given + defaults[len(given) :]
    return found
