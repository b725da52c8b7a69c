"""Groups of welded modules: calls with the same input made as one, and never a wrong result."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.helpers import ISAS, all_within, at_once, fixed, kernel_runs, last_run
from tests.support.swap_blocks import NATURAL, PACKED, K
from torch import Tensor, nn

from torchweld.core.blocks import parse_spec
from torchweld.core.errors import TorchweldError
from torchweld.numerics.numerical_rule import check_block
from torchweld.welds.finding.find import find
from torchweld.welds.swapping.swap import check_calls, disabled, stats, undo, weld
from torchweld.welds.weld_decisions import Choice, Decision

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

ROWS = 5
X = fixed(ROWS, K)
OTHER = fixed(ROWS, K, seed=1)
SIZES = (48, 16, 17)  # as with grouped queries: k and v are smaller


class Attention(nn.Module):
    """Calls q, k and v one after the other."""

    def __init__(self, sizes: tuple[int, ...] = SIZES, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, size, bias=bias) for size in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)


Made = tuple[Any, Any]


def grouped(
    single: Choice | None = PACKED,
    *,
    model: nn.Module | None = None,
    x: Tensor = X,
    warm: bool = True,
) -> Made:
    """An attention whose q, k and v are welded as a group, and a plain copy of it."""
    plain = (Attention() if model is None else model).eval()
    welded = copy.deepcopy(plain)
    rows = x.numel() // K
    blocks = find(plain, x)
    assert len({block.group for block in blocks}) == 1
    table = ((1, max(rows, 1), PACKED),)
    decisions = [
        Decision(block=b, by_rows=((1, max(rows, 1), single),), in_group=table) for b in blocks
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weld(welded, decisions)
    if warm:  # a member that has served a call of a shape by itself gathers the next
        with torch.no_grad():
            welded(x)
    return welded, plain


def gathered(model: nn.Module) -> int:
    return sum(one.gathered for one in stats(model).values())


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def same(model: Any, plain: Any, x: Tensor = X, *names: str) -> None:
    for name in names or "qkv":
        with torch.no_grad():
            assert close(getattr(model, name)(x), getattr(plain, name)(x)), name


# ---- as one ----


@pytest.mark.parametrize("bias", [True, False])
def test_members_are_computed_by_one_call(bias: bool) -> None:
    model, plain = grouped(NATURAL, model=Attention(bias=bias))
    with torch.no_grad():
        for x in (X, OTHER):
            with kernel_runs("packed", calls=1):
                found = model(x)
            for one, expected in zip(found, plain(x), strict=True):
                assert close(one, expected)
    assert [one.gathered for one in stats(model).values()] == [2, 2, 2]
    assert all(one.fused for one in stats(model).values())
    assert "6 calls gathered in groups" in str(stats(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_are_within_the_rule(dtype: torch.dtype) -> None:
    model, plain = grouped(model=Attention().to(dtype), x=X.to(dtype))
    tensors = [t.detach() for name in "qkv" for t in getattr(plain, name).parameters()]

    def candidate(x: Tensor, _: object) -> list[Tensor]:
        with torch.no_grad(), kernel_runs(calls=1):
            return list(model(x))

    forms = parse_spec("identity/b;identity/b;identity/b")
    all_within(check_block(candidate, X.to(dtype), tensors, forms, group=True))


def test_the_first_call_of_a_shape_is_made_one_by_one() -> None:
    model, plain = grouped(warm=False)
    with torch.no_grad():
        with kernel_runs("packed", calls=3):
            model(X)
        with kernel_runs("packed", calls=1):
            model(X)
        with kernel_runs("packed", calls=3):
            model(X[:2])
        with kernel_runs("packed", calls=1):
            model(X[:2])
    same(model, plain, X[:2])


def test_any_member_may_be_called_first() -> None:
    model, plain = grouped()
    with torch.no_grad():
        for order in ("kvq", "vqk", "qvk"):
            x = torch.randn(ROWS, K)
            with kernel_runs("packed", calls=1):
                found = {name: getattr(model, name)(x) for name in order}
            for name, y in found.items():
                assert close(y, getattr(plain, name)(x))


def test_members_whose_own_code_is_the_best_without_a_group() -> None:
    model, plain = grouped(None, warm=False)
    with torch.no_grad():
        with kernel_runs(calls=0):
            model(X)
        with kernel_runs("packed", calls=1):
            model(X)
        with kernel_runs(calls=0):  # another number of rows than the group is for
            model(torch.randn(ROWS + 1, K))
    counted = [one.originals for one in stats(model).values()]
    assert counted == [{"called apart from its group": 1, "rows": 1}] * 3
    assert all(one.fused for one in stats(model).values())
    same(model, plain)


def test_shapes_with_more_dimensions_are_gathered() -> None:
    x = fixed(2, 2, K)
    model, plain = grouped(x=x)
    with torch.no_grad(), kernel_runs("packed", calls=1):
        found = model(x)
    assert [tuple(y.shape) for y in found] == [(2, 2, size) for size in SIZES]
    same(model, plain, x)


def test_modules_with_an_activation_can_be_members() -> None:
    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(K, 16), nn.SiLU())
            self.b = nn.Linear(K, 20)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    model, plain = grouped(model=Gates())
    with torch.no_grad(), kernel_runs("packed", calls=1):
        found = model(X)
    for one, expected in zip(found, plain(X), strict=True):
        assert close(one, expected)


# ---- x is another one ----


def in_place(x: Tensor) -> None:
    x[1, 2] += 3.0


def through_data(x: Tensor) -> None:
    x.data[ROWS - 1, K - 1] -= 2.0


def through_numpy(x: Tensor) -> None:
    x.numpy()[0, 0] = 7.0


def through_a_view(x: Tensor) -> None:
    x.view(-1)[5:6].mul_(-1.0)


@pytest.mark.parametrize("edit", [in_place, through_data, through_numpy, through_a_view])
def test_an_edit_of_x_between_two_members_is_noticed(
    edit: Callable[[Tensor], None],
) -> None:
    model, plain = grouped()
    x = X.clone()
    with torch.no_grad():
        q = model.q(x)
        before = plain.q(x)
        edit(x)
        assert close(q, before)
        with kernel_runs(calls=1):
            k, v = model.k(x), model.v(x)
        assert close(k, plain.k(x))
        assert close(v, plain.v(x))


def test_another_x_of_the_same_shape_is_noticed() -> None:
    model, plain = grouped()
    with torch.no_grad():
        found = model.q(X), model.k(OTHER), model.v(X)
        expected = plain.q(X), plain.k(OTHER), plain.v(X)
    assert all(map(close, found, expected))


def test_an_equal_copy_of_x_is_the_same_input() -> None:
    model, plain = grouped()
    with torch.no_grad(), kernel_runs("packed", calls=1):
        found = model.q(X), model.k(X.clone()), model.v(X)
    assert all(close(a, b) for a, b in zip(found, plain(X), strict=True))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: x[:3],
        lambda x: x.reshape(1, ROWS, K),
        lambda x: torch.cat((x, x))[::2],
        lambda x: x[:0],
    ],
    ids=["strides", "fewer rows", "another rank", "every second row", "no rows"],
)
def test_the_same_values_in_another_layout(other: Callable[[Tensor], Tensor]) -> None:
    model, plain = grouped()
    with torch.no_grad():
        model.q(X)
        found, expected = model.k(other(X)), plain.k(other(X))
        assert found.shape == expected.shape
        assert found.stride() == expected.stride()
        assert close(found, expected)
        assert close(model.v(X), plain.v(X))


def test_nan_and_negative_zero_are_compared_by_their_bytes() -> None:
    model, plain = grouped()
    x = X.clone()
    x[0, 0] = torch.nan
    with torch.no_grad():
        with kernel_runs("packed", calls=1):
            found = model(x)
        for one, expected in zip(found, plain(x), strict=True):
            assert torch.equal(one.isnan(), expected.isnan())
        x[0, 0] = 0.0
        model.q(x)
        x[0, 0] = -0.0
        with kernel_runs(calls=1):
            assert close(model.k(x), plain.k(x))


# ---- outputs ----


def test_outputs_belong_to_whoever_gets_them() -> None:
    model, plain = grouped()
    with torch.no_grad():
        found = model(X)
        for y in found:
            y.fill_(9.0)
        for y, expected in zip(model(X), plain(X), strict=True):
            assert close(y, expected)
        q = model.q(X)
        q.zero_()
        k, again = model.k(X), model.k(X)  # it was given away once
        k.zero_()
        assert close(again, plain.k(X))
        assert close(model.v(X), plain.v(X))
    assert len({y.untyped_storage().data_ptr() for y in found}) == 3


def test_inference_mode_belongs_to_each_call() -> None:
    model, plain = grouped()
    with torch.inference_mode():
        q = model.q(X)
    with torch.no_grad():
        k = model.k(X)
    with torch.inference_mode():
        v = model.v(X)
    assert [y.is_inference() for y in (q, k, v)] == [True, False, True]
    assert close(k, plain.k(X).detach())


def test_kept_outputs_are_no_more_than_one_step() -> None:
    model, _ = grouped()
    with torch.no_grad():
        kept = weakref.ref(model.q(X))
        assert kept() is None  # nothing holds what was given away
        model.q(OTHER)  # drops what was kept of X
        with kernel_runs(calls=1):
            model.k(X)


# ---- members that are not what they were ----


def edit_in_place(k: nn.Linear) -> None:
    k.weight.mul_(2.0)


def edit_data(k: nn.Linear) -> None:
    k.weight.data.mul_(2.0)


def new_data(k: nn.Linear) -> None:
    k.weight.data = k.weight.data * 2.0


def new_parameter(k: nn.Linear) -> None:
    k.weight = nn.Parameter(k.weight.detach() * 2.0)


def edit_bias(k: nn.Linear) -> None:
    k.bias.data.add_(1.0)


def load(k: nn.Linear) -> None:
    k.load_state_dict({"weight": k.weight * 3.0, "bias": k.bias + 1.0})


def no_bias(k: nn.Linear) -> None:
    k.bias = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "change", [edit_in_place, edit_data, new_data, new_parameter, edit_bias, load, no_bias]
)
@pytest.mark.filterwarnings("ignore:torchweld")
def test_a_change_of_weights_between_two_members(
    change: Callable[[nn.Linear], None],
) -> None:
    model, plain = grouped()
    with torch.no_grad():
        model.q(X)
        change(model.k)
        change(plain.k)
        assert close(model.k(X), plain.k(X))
        assert close(model.v(X), plain.v(X))
        same(model, plain)
        for _ in range(3):
            assert all(close(a, b) for a, b in zip(model(X), plain(X), strict=True))


@pytest.mark.filterwarnings("ignore:torchweld")
def test_a_member_that_was_replaced() -> None:
    model, plain = grouped()
    old = weakref.ref(model.k.weight)
    with torch.no_grad():
        model.q(X)
        model.k = plain.k = nn.Linear(K, SIZES[1]).eval()
        assert torch.equal(model.k(X), plain.k(X))
        same(model, plain)
        same(model, plain)
    gc.collect()
    assert old() is None, "the weights of a module that is gone are kept"


@pytest.mark.filterwarnings("ignore:torchweld")
def test_a_forward_of_its_own_runs() -> None:
    model, _ = grouped()
    with torch.no_grad():
        model.q(X)
        model.k.forward = lambda x: x[..., :1]
        assert torch.equal(model.k(X), X[..., :1])


def test_hooks_of_members_are_called() -> None:
    model, plain = grouped()
    seen: list[Tensor] = []
    with torch.no_grad():
        model.q(X)
        model.k.register_forward_hook(lambda m, args, y: seen.append(y))
        model.k.register_forward_pre_hook(lambda m, args: (args[0] + 1.0,))
        assert close(model.k(X), plain.k(X + 1.0))
        assert close(model.v(X), plain.v(X))
    assert len(seen) == 1


def test_a_member_in_training_mode_or_with_gradients_runs_its_own_code() -> None:
    model, plain = grouped()
    with torch.no_grad():
        model.q(X)
        model.k.train()
        with kernel_runs(calls=0), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(model.k(X), plain.k(X))
        model.k.eval()
        model.q(X)
    with kernel_runs(calls=0):
        y = model.k(X)
    y.sum().backward()
    assert model.k.weight.grad is not None


def test_autocast_runs_the_original() -> None:
    model, plain = grouped()
    with torch.no_grad():
        model.q(X)
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert model.k(X).dtype == torch.bfloat16
        assert close(model.v(X), plain.v(X))


# ---- called apart ----


@pytest.mark.parametrize("single", [PACKED, NATURAL, None], ids=["packed", "natural", "original"])
def test_a_group_that_is_not_called_together_gives_up(single: Choice | None) -> None:
    model, plain = grouped(single)
    with torch.no_grad():
        for i in range(6):
            x = torch.randn(ROWS, K)
            assert close(model.k(x), plain.k(x)), i
        with kernel_runs(calls=3 if single else 0):
            same(model, plain)
        before = gathered(model)
        same(model, plain)
    assert gathered(model) == before
    assert all(one.apart for one in stats(model).values())
    assert "run one by one, since they are not called together: q, k, v" in str(stats(model))


def test_an_error_between_two_members_ends_nothing() -> None:
    model, plain = grouped()
    with torch.no_grad():
        for _ in range(5):
            with pytest.raises(RuntimeError):
                model.k(model.q(X))  # of another size
            with kernel_runs("packed", calls=1):
                found = model(OTHER)
            assert all(close(a, b) for a, b in zip(found, plain(OTHER), strict=True))


def test_a_lone_member_runs_by_itself() -> None:
    model, plain = grouped()
    alone = copy.deepcopy(model.k)
    with torch.no_grad():
        for _ in range(6):
            with kernel_runs("packed", calls=1):
                assert close(alone(X), plain.k(X))


# ---- undoing, switching off, copies ----


def test_undo_of_one_and_of_all() -> None:
    model, plain = grouped()
    with torch.no_grad():
        model.q(X)
        undo(model, ["k"])
        with kernel_runs(calls=0):
            assert torch.equal(model.k(X), plain.k(X))
        for _ in range(5):
            same(model, plain)
        undo(model)
        with kernel_runs(calls=0):
            same(model, plain)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(type(getattr(model, name)) is nn.Linear for name in "qkv")


def test_disabled_runs_the_original() -> None:
    model, plain = grouped()
    with torch.no_grad():
        model.q(X)
        with disabled(model), kernel_runs(calls=0):
            same(model, plain)
        with disabled(model.k), kernel_runs(calls=0):
            assert torch.equal(model.k(X), plain.k(X))
        model(X)
        with kernel_runs("packed", calls=1):
            same(model, plain)


def test_checked_calls_are_made_one_by_one() -> None:
    model, _ = grouped()
    check_calls(model, first=2)
    with torch.no_grad():
        for _ in range(2):
            with kernel_runs("packed", calls=3):
                model(X)
        model(X)
        with kernel_runs("packed", calls=1):
            model(X)
    assert [one.checked for one in stats(model).values()] == [2, 2, 2]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_gather_among_themselves(copied: Callable[[Any], Any]) -> None:
    model, plain = grouped()
    with torch.no_grad():
        model.q(X)
        other = copied(model)
        other.k.weight.add_(1.0)
        assert close(other.k(X), X @ other.k.weight.T + other.k.bias)
        for _ in range(3):  # what it depends on is read again first
            other(X)
        with kernel_runs("packed", calls=1):
            k = other(OTHER)[1]
        assert close(k, OTHER @ other.k.weight.T + other.k.bias)
        assert close(model.k(X), plain.k(X))
    assert gathered(other) >= 3


def test_moved_to_another_type_and_back() -> None:
    model, plain = grouped()
    with torch.no_grad():
        model.q(X)
        model.double(), plain.double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(model, plain, X.double())
        model.float(), plain.float()
        model(X)
        with kernel_runs("packed", calls=1):
            same(model, plain)


# ---- threads ----


def test_threads_never_get_each_others_outputs() -> None:
    model, plain = grouped()

    def body(seed: int) -> Callable[[], None]:
        xs = [fixed(ROWS, K, seed=10 * seed + i) for i in range(4)]
        with torch.no_grad():
            expected = [plain(x) for x in xs]

        def run() -> None:
            with torch.no_grad():
                for i in range(200):
                    at = i % len(xs)
                    for y, wanted in zip(model(xs[at]), expected[at], strict=True):
                        assert close(y, wanted)

        return run

    at_once([body(seed) for seed in range(4)])
    assert gathered(model) > 0


def test_what_one_thread_has_led_another_does_not_take() -> None:
    model, plain = grouped()
    with torch.no_grad():
        model.q(X)
    calls: list[int] = []

    def other() -> None:
        before = last_run()["calls"]
        with torch.no_grad():
            assert close(model.k(X), plain.k(X))
        calls.append(last_run()["calls"] - before)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert calls == [1]
    with torch.no_grad(), kernel_runs(calls=0):
        assert close(model.k(X), plain.k(X))


# ---- graphs ----


def test_compiled_and_exported_models_run_one_by_one() -> None:
    model, plain = grouped(NATURAL)
    with torch.no_grad():
        model.q(X)
        exported = torch.export.export(model, (X,)).module()
        traced = torch.jit.trace(model, (X,))
        for graph in (exported, traced):
            for x in (X, OTHER):
                assert all(close(a, b) for a, b in zip(graph(x), plain(x), strict=True))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for x in (X, OTHER):
            assert all(close(a, b) for a, b in zip(compiled(x), plain(x), strict=True))
        assert close(model.k(X), plain.k(X))


def test_transforms_see_every_member() -> None:
    model, plain = grouped()
    with torch.no_grad():
        model.q(X)
        batched = torch.func.vmap(model.k)(X)
        assert close(batched, plain.k(X))
        value, tangent, *_ = torch.func.jvp(model.k, (X,), (OTHER,))
        assert close(value, plain.k(X))
        assert close(tangent, OTHER @ plain.k.weight.T)


# ---- what cannot be a group ----


def test_decisions_that_make_no_group_are_refused() -> None:
    plain = Attention().eval()
    blocks = find(plain, X)
    table = ((1, 8, PACKED),)
    decisions = [Decision(block=b, by_rows=table, in_group=table) for b in blocks]
    nameless = [replace(d, block=replace(d.block, group="")) for d in decisions]
    with pytest.raises(TorchweldError, match="names no group"):
        weld(plain, nameless)
    with pytest.raises(TorchweldError, match="inference alone"):
        weld(plain, [replace(d, training=True) for d in decisions])
    odd = ((1, 8, Choice(backend="torch")),)
    with pytest.raises(TorchweldError, match="not by torch"):
        weld(plain, [replace(d, in_group=odd) for d in decisions])
    with pytest.raises(TorchweldError, match="a group reads packed copies"):
        weld(plain, [replace(d, in_group=((1, 8, NATURAL),)) for d in decisions])
    with pytest.raises(TorchweldError, match="ranges must not overlap"):
        weld(plain, [replace(d, in_group=(*table, *table)) for d in decisions])
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(5, 4)})
    block = replace(blocks[0], group="g", out_features=4, calls=(), valid=())
    with pytest.raises(TorchweldError, match="does not take the input of a"):
        weld(
            model,
            [
                Decision(
                    block=replace(block, path=path, in_features=size), by_rows=table, in_group=table
                )
                for path, size in (("a", 3), ("b", 5))
            ],
        )
