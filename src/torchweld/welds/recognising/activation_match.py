"""Finds the activation that an elementwise expression computes, by its values.

In: an expression of one variable, or of a gate and an up. Out: a `Match`, or None. The expression
is evaluated in float64 on points from 1e-8 to 1e12 on both sides of zero, and compared with every
activation. So eight ops that spell out gelu, `x * sigmoid(x)` and `relu(x) ** 2` need no patterns,
and a clamp at 7 or a constant with four digits is not overlooked.
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

MOST_NUMBERS = 12  # of a formula around which points are tried
Function = Callable[[Tensor], Tensor]

# gelu_tanh written out with constants of ten digits is off by 1e-11. float32 cannot show that; in
# float64 it is a different function.
_TOLERANCE = {torch.float64: 1e-14}
_USUAL_TOLERANCE = 3e-8
_WIDE: Any = {"dtype": torch.float64, "device": "cpu"}
# exp(80) still fits into float32. Beyond, written-out formulas overflow where fused ones do not.
_SAFE = 80.0


@dataclass(frozen=True, kw_only=True)
class Match:
    """Says that an expression is `scale · activation(z)`."""

    activation: str
    parameters: tuple[float, ...]
    scale: float

    def __str__(self) -> str:
        return format_activation(self.activation, self.parameters)


def evaluate(value: Expression, leaves: Mapping[str, Tensor]) -> Tensor:
    """Evaluates an expression; `leaves` maps the text of each leaf to its values."""
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
    """Matches `value`, which depends on `leaf` alone, with an activation of it."""
    points = torch.cat([_points(2400), _kinks(value)])
    return _match(lambda z: evaluate(value, {leaf.text: z}), _hints(value), dtype, points)


def _kinks(value: Expression) -> Tensor:
    """Points where a formula may bend: near its numbers, their sums, products and quotients."""
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
    """Matches `value`, which depends on both, with `scale · activation(gate) · up`."""
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
    # The last term is what 2 * sigmoid(2z) - 1 loses in float64 if z is tiny.
    return abs(scale) * (tolerance * (y.abs() + z.abs().clamp(max=1.0)) + 1e-15)


def _scales(function: Function, name: str, parameters: tuple[float, ...]) -> Iterator[float]:
    """Factors to try: 1 if the factor at z = 1 is close to 1, then that factor itself."""
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
    """Every activation, with the parameters it would need to equal the function."""
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
    """Parameters given to the ops themselves: values do not show a threshold at 20."""
    found: dict[str, tuple[float, ...]] = {}
    for node in nodes(value):
        if isinstance(node, Apply) and op_name(node.op) == "aten.softplus":
            defaults = ACTIVATIONS["softplus"].defaults
            given = tuple(float(number) for number in node.args[1:])
            found["softplus"] = given + defaults[len(given) :]
    return found
