"""The numerical rule accepts what is right and refuses what is slightly wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import CHAIN_IDS, CHAINS, all_ok, random_tensors
from torch import Tensor

from torchweld.core.activations import ACTIVATIONS
from torchweld.core.blocks import LayerForm, parse_spec
from torchweld.core.errors import BlockError
from torchweld.numerics.numerical_rule import check_block, judge
from torchweld.numerics.sum_scales import scales_of
from torchweld.ops.backends import reference_backend

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (123, 256, 96)


def eager_of(forms: Sequence[LayerForm]) -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
    return lambda x, tensors: reference_backend.chain(x, tensors, forms)


def flatter(f: Callable[[Tensor, Sequence[Tensor]], Tensor]) -> Callable[..., Tensor]:
    """The same sums in another order: what an honest kernel's errors look like."""

    def candidate(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        turned = torch.arange(x.shape[-1] - 1, -1, -1)
        first = tensors[0][:, turned]
        return f(x[..., turned], [first, *tensors[1:]])

    return candidate


# ---- what is right passes ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_eager_itself_passes(forms: tuple[LayerForm, ...], dtype: torch.dtype) -> None:
    sizes = SIZES[:1] + (64,) * (len(forms) - 1) + SIZES[-1:]
    x = torch.randn(2, 9, SIZES[0]).to(dtype)
    tensors = random_tensors(sizes, forms, dtype)
    grads = [torch.randn(2, 9, SIZES[-1]).to(dtype)]
    found = check_block(eager_of(forms), x, tensors, forms, grads=grads)
    assert list(found) == ["output", "grad x", *(f"grad {i}" for i in range(len(tensors)))]
    all_ok(found)
    assert max(judgement.row_ratio for judgement in found.values()) <= 0.5  # 1 of 2 · eager


def test_another_order_of_summation_passes() -> None:
    forms = parse_spec("gelu/b;identity/b")
    tensors = random_tensors(SIZES, forms)
    found = check_block(
        flatter(eager_of(forms)),
        torch.randn(64, SIZES[0]),
        tensors,
        forms,
        grads=[torch.randn(64, SIZES[-1])],
    )
    all_ok(found)
    assert found["output"].row_ratio > 0.0  # it did differ from the reference


def test_a_bottleneck_passes_where_eager_is_exact_by_luck() -> None:
    """A hidden layer of one: its rounding error is all of the output's, in hundreds of rows."""
    forms = parse_spec("identity/b;identity")
    tensors = random_tensors((768, 1, 1), forms)
    all_ok(check_block(flatter(eager_of(forms)), torch.randn(700, 768), tensors, forms))


def test_fp32_hidden_values_pass_where_eager_rounds_them() -> None:
    forms = parse_spec("gelu/b;identity/b")
    tensors = random_tensors(SIZES, forms, torch.bfloat16)

    def wide(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        return reference_backend.chain(x.float(), [t.float() for t in tensors], forms).bfloat16()

    x = torch.randn(33, SIZES[0]).bfloat16()
    found = check_block(wide, x, tensors, forms)
    all_ok(found)
    assert found["output"].row_ratio < 0.5


# ---- what is slightly wrong does not ----


def wrong_gelu(x: Tensor, t: Sequence[Tensor]) -> Tensor:
    return F.linear(F.gelu(F.linear(x, t[0], t[1]), approximate="tanh"), t[2], t[3])


def no_output_bias(x: Tensor, t: Sequence[Tensor]) -> Tensor:
    return F.linear(F.gelu(F.linear(x, t[0], t[1])), t[2]) + 0.0 * t[3]


def bias_once_too_often(x: Tensor, t: Sequence[Tensor]) -> Tensor:
    return F.linear(F.gelu(F.linear(x, t[0], t[1] * (1 + 1e-4))), t[2], t[3])


def hidden_rounded_to_bf16(x: Tensor, t: Sequence[Tensor]) -> Tensor:
    return F.linear(F.gelu(F.linear(x, t[0], t[1])).bfloat16().float(), t[2], t[3])


def hidden_rounded_twice(x: Tensor, t: Sequence[Tensor]) -> Tensor:
    hidden = F.linear(x, t[0], t[1]).bfloat16().float()
    return F.linear(F.gelu(hidden).bfloat16().float(), t[2], t[3])


def products_rounded_to_fp16(x: Tensor, t: Sequence[Tensor]) -> Tensor:
    return F.linear(F.gelu(F.linear(x, t[0], t[1])), t[2].half().float(), t[3])


def one_feature_left_out(x: Tensor, t: Sequence[Tensor]) -> Tensor:
    return F.linear(F.gelu(F.linear(x[..., :-1], t[0][:, :-1], t[1])), t[2], t[3])


@pytest.mark.parametrize(
    "wrong",
    [
        wrong_gelu,
        no_output_bias,
        bias_once_too_often,
        hidden_rounded_to_bf16,
        hidden_rounded_twice,
        products_rounded_to_fp16,
        one_feature_left_out,
    ],
)
def test_a_small_mistake_is_refused(wrong: Callable[..., Tensor]) -> None:
    forms = parse_spec("gelu/b;identity/b")
    found = check_block(wrong, torch.randn(17, SIZES[0]), random_tensors(SIZES, forms), forms)
    assert not found["output"].within
    assert "times the" in (found["output"].reason or "")


def test_hidden_values_rounded_harder_than_eagers_are_refused_in_16_bit() -> None:
    """fp16 block, hidden values kept in bf16: eight times eager's own rounding."""
    forms = parse_spec("tanh;identity")
    tensors = random_tensors((64, 16, 32), forms, torch.float16)

    def coarse(x: Tensor, t: Sequence[Tensor]) -> Tensor:
        hidden = torch.tanh(F.linear(x, t[0]))
        return F.linear((hidden * 16).round() / 16, t[1])

    found = check_block(coarse, torch.randn(40, 64).half(), tensors, forms)
    assert not found["output"].within


@pytest.mark.parametrize("gate", ["first", "second", "interleaved"])
def test_a_swapped_gate_is_refused(gate: str) -> None:
    forms = parse_spec(f"silu/{gate};identity")
    swapped = parse_spec(f"silu/{'second' if gate != 'second' else 'first'};identity")
    found = check_block(
        eager_of(swapped), torch.randn(5, 31), random_tensors((31, 64, 16), forms), forms
    )
    assert not found["output"].within


@pytest.mark.parametrize("by", [1e-4, float("nan"), float("inf")])
def test_one_bad_element_is_refused(by: float) -> None:
    forms = parse_spec("gelu/b;identity/b")

    def candidate(x: Tensor, t: Sequence[Tensor]) -> Tensor:
        y = reference_backend.chain(x, t, forms)
        y[3, 7] += by
        return y

    found = check_block(candidate, torch.randn(100, SIZES[0]), random_tensors(SIZES, forms), forms)[
        "output"
    ]
    assert not found.within
    assert "row 3" in (found.reason or "")


def test_many_errors_below_the_row_bound_are_refused_by_their_rms() -> None:
    """Eager has one bad element a row; the candidate is nearly as bad everywhere."""
    reference_ = torch.randn(50, 64, dtype=torch.float64)
    eager = reference_.float()
    eager[:, 0] += 1e-3
    candidate = (reference_ + 1.9e-3).float()
    found = judge(candidate, eager, reference_, reference_.abs())
    assert found.row_ratio < 1.0 < found.rms_ratio
    assert not found.within
    assert "rms" in (found.reason or "")


@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_wrong_gradients_are_refused(forms: tuple[LayerForm, ...]) -> None:
    """A slope that is off by a thousandth, forward values untouched."""
    sizes = SIZES[:1] + (64,) * (len(forms) - 1) + SIZES[-1:]

    class SteepBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * 1.001

    def candidate(x: Tensor, t: Sequence[Tensor]) -> Tensor:
        y: Tensor = SteepBackward.apply(reference_backend.chain(x, t, forms))
        return y

    tensors = random_tensors(sizes, forms)
    x, grads = torch.randn(9, SIZES[0]), [torch.randn(9, SIZES[-1])]
    found = check_block(candidate, x, tensors, forms, grads=grads)
    assert found.pop("output").ok
    assert [name for name, judgement in found.items() if judgement.within] == []


def test_one_wrong_gradient_is_named() -> None:
    forms = parse_spec("silu/separate/b;identity/b")

    def candidate(x: Tensor, t: Sequence[Tensor]) -> Tensor:
        return reference_backend.chain(
            x, [*t[:3], t[3].detach() + 0.999 * (t[3] - t[3].detach()), *t[4:]], forms
        )

    tensors = random_tensors((31, 64, 16), forms)
    found = check_block(candidate, torch.randn(9, 31), tensors, forms, grads=[torch.randn(9, 16)])
    assert [name for name, judgement in found.items() if not judgement.within] == ["grad 3"]


def test_group_is_judged_member_by_member() -> None:
    forms = parse_spec("identity/b;relu;silu/first")
    x = torch.randn(2, 7, 31)
    tensors = [
        t
        for form, n in zip(forms, (8, 16, 24), strict=True)
        for t in random_tensors((31, n), [form])
    ]
    grads = [torch.randn(2, 7, n) for n in (8, 16, 24)]

    def candidate(x: Tensor, t: Sequence[Tensor]) -> list[Tensor]:
        ys = reference_backend.group(x, t, forms)
        return [ys[0], ys[1] + 1e-4, ys[2]]

    right = check_block(
        lambda x, t: reference_backend.group(x, t, forms),
        x,
        tensors,
        forms,
        group=True,
        grads=grads,
    )
    all_ok(right)
    assert list(right) == [f"output {i}" for i in range(3)] + ["grad x"] + [
        f"grad {i}" for i in range(4)
    ]
    found = check_block(candidate, x, tensors, forms, group=True)
    assert [name for name, judgement in found.items() if not judgement.within] == ["output 1"]


# ---- the guard, shapes and types ----


def test_values_too_small_to_judge_are_not_ok() -> None:
    x = torch.ones(4, 2)
    weight = torch.tensor([[1.0, -1.0 + 1e-7]])  # cancels to what rounding leaves
    forms = parse_spec("identity")
    found = check_block(eager_of(forms), x, [weight], forms)["output"]
    assert found.within
    assert not found.meaningful
    assert not found.ok
    assert "zeros" in (found.reason or "")


def test_zeros_are_refused_where_the_comparison_means_something() -> None:
    forms = parse_spec("gelu/b;identity/b")
    tensors = random_tensors(SIZES, forms, torch.bfloat16)
    x = torch.randn(9, SIZES[0]).bfloat16()
    found = check_block(lambda x, t: x.new_zeros(9, SIZES[-1]), x, tensors, forms)["output"]
    assert found.meaningful
    assert not found.within


def test_nothing_to_compare_is_not_ok() -> None:
    forms = parse_spec("identity")
    found = check_block(eager_of(forms), torch.randn(0, 3), [torch.randn(2, 3)], forms)["output"]
    assert found.within
    assert not found.ok


def test_the_largest_distances_from_the_reference_are_told() -> None:
    ref = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).double()
    eager, got = ref.float(), ref.float()
    eager[0, 1] += 0.25
    got[1, 2] -= 0.5
    found = judge(got, eager, ref, ref)
    assert (found.eager_error, found.error) == (0.25, 0.5)
    assert not found.within


@pytest.mark.parametrize("change", [Tensor.double, lambda y: y[..., :-1], lambda y: y[None]])
def test_another_shape_or_type_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    y = torch.randn(3, 4)
    found = judge(change(y), y, y.double(), y.double())
    assert not found.within
    assert "eager is torch.float32 [3, 4]" in (found.reason or "")


def test_gradients_for_every_output_are_demanded() -> None:
    forms = parse_spec("identity;identity")
    tensors = [torch.randn(2, 3), torch.randn(2, 3)]
    with pytest.raises(BlockError, match="1 gradients for 2 outputs"):
        check_block(
            lambda x, t: reference_backend.group(x, t, forms),
            torch.randn(4, 3),
            tensors,
            forms,
            group=True,
            grads=[torch.randn(4, 2)],
        )


# ---- NaN, Inf, the ends of the range ----

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("got", "old", "within"),
    [
        (NAN, NAN, True),
        (INF, INF, True),
        (-INF, -INF, True),
        (INF, -INF, False),
        (NAN, INF, False),
        (1.0, NAN, False),
        (NAN, 1.0, False),
        (INF, 1.0, False),
    ],
)
def test_nan_and_inf_stand_where_eagers_do(got: float, old: float, within: bool) -> None:
    """The reference has what eager has."""
    eager = torch.tensor([[1.0, old, 2.0]])
    found = judge(torch.tensor([[1.0, got, 2.0]]), eager, eager.double(), torch.ones(1, 3).double())
    assert found.within is within
    assert within or "column 1" in (found.reason or "") or "row 0" in (found.reason or "")


@pytest.mark.parametrize("old", [INF, NAN])
def test_a_finite_result_may_be_right_where_eager_alone_overflowed(old: float) -> None:
    eager, ref = torch.tensor([[old, 2.0]]).half(), torch.tensor([[1000.0, 2.0]]).double()
    assert judge(torch.tensor([[1000.0, 2.0]]).half(), eager, ref, ref).within
    assert not judge(torch.tensor([[1010.0, 2.0]]).half(), eager, ref, ref).within
    assert judge(eager, eager, ref, ref).within


def test_the_reference_may_overrule_eager_about_inf() -> None:
    eager, ref = torch.tensor([[NAN, 2.0]]), torch.tensor([[INF, 2.0]]).double()
    for value, within in ((INF, True), (NAN, True), (-INF, False), (3e38, False)):
        got = torch.tensor([[value, 2.0]])
        assert judge(got, eager, ref, torch.ones(1, 2).double()).within is within


def test_a_bad_neighbour_does_not_hide_behind_an_overflow() -> None:
    eager, ref = torch.tensor([[INF, 2.0]]).half(), torch.tensor([[1e6, 2.0]]).double()
    scale = torch.tensor([[2.0, 2.0]]).double()
    assert judge(torch.tensor([[INF, 2.0]]).half(), eager, ref, scale).within
    assert not judge(torch.tensor([[INF, 2.1]]).half(), eager, ref, scale).within


def test_rounding_to_the_largest_number_and_to_inf_are_neighbours() -> None:
    ref = torch.tensor([[65519.0]]).double()
    largest, infinite = torch.tensor([[65504.0]]).half(), torch.tensor([[INF]]).half()
    assert judge(infinite, largest, ref, ref).within
    assert judge(largest, infinite, ref, ref).within
    assert not judge(torch.tensor([[60000.0]]).half(), infinite, ref, ref).within


def test_spacing_does_not_shrink_below_the_smallest_normal_number() -> None:
    info = torch.finfo(torch.float16)
    step = info.tiny * info.eps
    ref = torch.tensor([[3.5 * step]]).double()
    assert judge(torch.tensor([[4 * step]]).half(), ref.half(), ref, ref).within


# ---- the scale ----


def test_the_scale_of_one_product_is_the_sum_of_absolute_products() -> None:
    x, w, b = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3)
    (scale,) = scales_of(x, [w, b], parse_spec("identity/b")).outputs
    torch.testing.assert_close(scale, (x.abs() @ w.abs().mT + b.abs()).double())


def test_scales_of_gradients_are_sums_of_absolute_products() -> None:
    x, w, g = torch.randn(5, 7), torch.randn(3, 7), torch.randn(5, 3)
    found = scales_of(x, [w], parse_spec("identity"), grads=[g]).grads
    lower_bounds = [g.abs() @ w.abs(), g.abs().mT @ x.abs()]
    for scale, bound in zip(found, lower_bounds, strict=True):
        assert (scale >= bound * (1 - 1e-6)).all()
        assert (scale <= bound * 2.5).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate", ["none", "separate", "first", "second", "interleaved"])
def test_every_scale_is_at_least_the_value(activation: str, gate: str) -> None:
    """What a sum is without cancellation cannot be smaller than what it is."""
    flag = "" if gate == "none" else f"/{gate}"
    forms = parse_spec(f"{activation}/b/t{flag};{activation}/b")
    tensors = random_tensors((9, 8, 7), forms, torch.float64)
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    g = torch.randn(2, 3, 7, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (x, *tensors)]
    y = reference_backend.chain(inputs[0], inputs[1:], forms)
    values = [y, *torch.autograd.grad(y, inputs, g)]
    scales = scales_of(x, tensors, forms, grads=[g])
    for value, scale in zip(values, [*scales.outputs, *scales.grads], strict=True):
        assert value.shape == scale.shape
        assert (scale >= value.abs() * (1 - 1e-9)).all()


@pytest.mark.parametrize("spec", ["gelu/b;identity/b", "silu/b/separate;identity", "gelu/first"])
def test_scales_are_computed_where_the_tensors_are(spec: str) -> None:
    """Tensors on meta and on the CPU do not mix, as those of a GPU do not."""
    forms = parse_spec(spec)
    x, *tensors = (t.to("meta") for t in (torch.randn(2, 7), *random_tensors((7, 6, 5), forms)))
    width = scales_of(x, tensors, forms).outputs[0].shape[-1]
    found = scales_of(x, tensors, forms, grads=[torch.empty(2, width, device="meta")])
    assert {t.device.type for t in (*found.outputs, *found.grads)} == {"meta"}


def test_the_rule_holds_under_another_default_device() -> None:
    """Random numbers are drawn on the CPU, whatever torch's default is."""
    forms = parse_spec("gelu/b;identity/b")
    x, tensors = torch.randn(3, 7), random_tensors((7, 6, 5), forms)
    grad = torch.ones(3, 5)
    with torch.device("meta"):
        all_ok(check_block(eager_of(forms), x, tensors, forms, grads=[grad]))
