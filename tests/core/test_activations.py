"""Activations: one list in two languages, and how close the fp32 ones are to exact.

A sum of one product with 1 is exact, so a layer of one feature is its activation. Bounds are in
ulp, units in the last place of the exact result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
import torch
from tests.support.helpers import (
    ACTIVATION_TEXTS,
    ISAS,
    NOT_PACKED,
    chain,
    kernel_runs,
    packed_chain,
    using_isa,
    using_threads,
)
from torch import Tensor

from torchweld.core.activations import ACTIVATIONS, format_activation, parse_activation
from torchweld.core.errors import BlockError

needs_kernels = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")
ONE = torch.ones(1, 1)


def through_kernel(z: Tensor, activation: str) -> Tensor:
    with using_threads(1), kernel_runs(*NOT_PACKED):
        return chain(ONE.to(z.dtype), [z.unsqueeze(1)], activation)[0]


# ---- one list ----


@needs_kernels
def test_both_languages_know_the_same_activations() -> None:
    with pytest.raises(ValueError, match="there are: ") as caught:
        through_kernel(ONE[0], "nonsense")
    known = str(caught.value).split("there are: ")[1].split("\n")[0].split()
    assert known == list(ACTIVATIONS)


@needs_kernels
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_defaults_are_the_same_in_both_languages_and_eager(name: str) -> None:
    z = torch.linspace(-30, 30, 997)
    bare = through_kernel(z, name)
    defaults = ACTIVATIONS[name].defaults
    if defaults:
        assert torch.equal(bare, through_kernel(z, f"{name}:{','.join(map(str, defaults))}"))
    torch.testing.assert_close(bare, ACTIVATIONS[name].apply(z))
    with pytest.raises(ValueError, match=r"takes \d number"):
        through_kernel(z, f"{name}:{','.join(['1'] * (len(defaults) + 1))}")


@needs_kernels
def test_fewer_parameters_than_there_are_leave_the_rest_at_eagers() -> None:
    z = torch.linspace(-30, 30, 997)
    assert torch.equal(through_kernel(z, "softplus:2"), through_kernel(z, "softplus:2,20"))
    assert parse_activation("softplus:2") == ("softplus", (2.0, 20.0))


@pytest.mark.parametrize("text", ACTIVATION_TEXTS)
def test_formatting_undoes_parsing(text: str) -> None:
    assert format_activation(*parse_activation(text)) == text


@pytest.mark.parametrize("name", [name for name, act in ACTIVATIONS.items() if act.apply_])
def test_in_place_variants_compute_the_same(name: str) -> None:
    activation = ACTIVATIONS[name]
    assert activation.apply_ is not None
    z = torch.linspace(-10, 10, 101)
    scratch = z.clone()
    result = activation.apply_(scratch, *activation.defaults)
    assert result.data_ptr() == scratch.data_ptr()
    assert torch.equal(scratch, activation.apply(z, *activation.defaults))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swish", "unknown activation 'swish'; there are: identity relu"),
        ("", "unknown activation ''"),
        ("relu:1", "'relu:1': relu takes 0 number"),
        ("elu:1,2", "'elu:1,2': elu takes 1 number.*as in 'elu'"),
        ("elu:x", "'elu:x': elu takes 1 number"),
        ("softplus:1,,2", "softplus takes 2 number"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(text: str, message: str) -> None:
    with pytest.raises(BlockError, match=message):
        parse_activation(text)


# ---- accuracy in fp32 ----


def every_exponent() -> Tensor:
    """2^20 numbers: both signs, every exponent, 2048 significands each, the lower bits random."""
    bits = np.arange(2**20, dtype=np.uint32) << 12
    bits |= np.random.default_rng(0).integers(0, 2**12, bits.size, dtype=np.uint32)
    numbers = torch.from_numpy(bits.view(np.float32))
    return numbers[numbers.isfinite()]


def ulp_of(exact: Tensor) -> Tensor:
    _, exponent = torch.frexp(exact.abs().clamp(min=2.0**-126))
    return torch.ldexp(torch.ones_like(exact), exponent - 24)


# Formulas that keep their digits where torch's fp64 ones cancel.
STABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda z: 0.5 * z * torch.special.erfc(-z * math.sqrt(0.5)),
    "gelu_tanh": lambda z: z * torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z**3)),
}


@dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """|error| ≤ ulps · ulp(y) + eps/2 · (of_x · |x| + of_change · |x y'(x)|) + |x| · 2^-126.

    of_x is for formulas that cancel, 1 + erf(x); of_change for a rounded argument, as 1.702 x. The
    last term is where 1 / exp(-x) overflows before the result underflows, in eager as here.
    """

    ulps: float
    of_x: float = 0.0
    of_change: float = 0.0


BOUNDS = {
    "identity": ErrorBound(ulps=0),
    "relu": ErrorBound(ulps=0),
    "relu2": ErrorBound(ulps=0.5),
    "leaky_relu": ErrorBound(ulps=1),
    "silu": ErrorBound(ulps=2.5),
    "gelu": ErrorBound(ulps=1.5, of_x=1),
    "gelu_tanh": ErrorBound(ulps=3, of_change=2),
    "quick_gelu": ErrorBound(ulps=3, of_change=2),
    "tanh": ErrorBound(ulps=2),
    "sigmoid": ErrorBound(ulps=2),
    "elu": ErrorBound(ulps=2),
    "mish": ErrorBound(ulps=4),
    "hardswish": ErrorBound(ulps=2),
    "softplus": ErrorBound(ulps=2.5),
}


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATION_TEXTS)
def test_activations_are_accurate_at_every_exponent(activation: str, isa: str) -> None:
    name, parameters = parse_activation(activation)
    bound = BOUNDS[name]
    x = every_exponent()
    x = x[x.abs() < 1e37]  # eager's hardswish, too, overflows beyond
    with using_isa(isa):
        y = through_kernel(x, activation).double()
    z = x.double().requires_grad_()
    exact = STABLE[name](z) if name in STABLE else ACTIVATIONS[name].apply(z, *parameters)
    (slope,) = torch.autograd.grad(exact.sum(), z)
    z, exact = z.detach(), exact.detach()
    seen = exact.abs() <= torch.finfo(torch.float32).max  # relu2 overflows
    assert seen.sum() > 0.7 * len(x)
    change = (z * slope).abs().nan_to_num(0.0)
    allowed = bound.ulps * ulp_of(exact) + z.abs().clamp(min=1.0) * 2.0**-126
    allowed += 2.0**-24 * (bound.of_x * z.abs() + bound.of_change * change)
    ratio = ((y - exact).abs() / allowed)[seen]
    worst = int(ratio.argmax())
    assert not ratio.isnan().any()
    assert ratio[worst] <= 1.0, f"{ratio[worst]:.3g} of the bound at {x[seen][worst]:.9g}"
    assert torch.equal(y[~seen], ACTIVATIONS[name].apply(x, *parameters).double()[~seen])


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
def test_exp_is_within_2_ulp(isa: str) -> None:
    """softplus is exp to the last bit from -17 down: log1p(u) = u there."""
    x = torch.linspace(-87, -17.5, 2**18)
    with using_isa(isa):
        y = through_kernel(x, "softplus").double()
    exact = x.double().exp()
    assert ((y - exact).abs() <= 2.0 * ulp_of(exact)).all()


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("activation", "exact", "ulps"),
    [
        ("tanh", mpmath.tanh, 2.0),
        ("sigmoid", lambda x: 1 / (1 + mpmath.exp(-x)), 2.0),
        ("silu", lambda x: x / (1 + mpmath.exp(-x)), 2.5),
        ("elu", lambda x: mpmath.expm1(x) if x < 0 else x, 2.0),
        ("softplus", lambda x: mpmath.log1p(mpmath.exp(x)), 2.5),
        ("mish", lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))), 4.0),
    ],
)
def test_activations_agree_with_forty_digits(
    activation: str, exact: Callable[[mpmath.mpf], mpmath.mpf], ulps: float, isa: str
) -> None:
    """Independent of torch's fp64 functions."""
    x = torch.cat(
        [torch.linspace(-12, 12, 301), torch.logspace(-8, 1, 60), -torch.logspace(-8, 1, 60)]
    )
    with using_isa(isa):
        y = through_kernel(x, activation)
    with mpmath.workdps(40):
        for xi, yi in zip(x.tolist(), y.tolist(), strict=True):
            value = exact(mpmath.mpf(xi))
            unit = ulp_of(torch.tensor(float(value), dtype=torch.float64)).item()
            assert abs(mpmath.mpf(yi) - value) <= ulps * unit, (xi, yi, value)


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATION_TEXTS)
def test_a_lane_does_not_know_its_neighbours(activation: str, isa: str) -> None:
    """Bits do not depend on where in a register a value stands, nor on remainders."""
    x = torch.cat([torch.linspace(-9, 9, 67), torch.tensor([math.inf, -math.inf, math.nan, 1e30])])
    with using_isa(isa), using_threads(1):
        for op, weights in ((chain, NOT_PACKED), (packed_chain, {"packed"})):
            whole = op(ONE, [x.unsqueeze(1)], activation)[0]
            for width in (1, 3, 8, 17):
                parts = []
                for part in x.split(width):
                    with kernel_runs(*weights):
                        parts.append(op(ONE, [part.unsqueeze(1)], activation)[0])
                torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0, equal_nan=True)
