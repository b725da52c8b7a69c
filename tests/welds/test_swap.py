"""Tests of welding: which kernel runs in which calls, the numbers, and undoing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.helpers import ISAS, NOT_PACKED, all_within, kernel_runs
from tests.support.swap_blocks import (
    CASES,
    GATED,
    LINEAR,
    MLP,
    NATURAL,
    PACKED,
    Gated,
    K,
    Mlp,
    N,
    X,
    decide,
    model_of,
)
from torch import Tensor, nn

import torchweld as tw
from torchweld import ops
from torchweld.core.blocks import parse_spec
from torchweld.core.errors import TorchweldError
from torchweld.core.records import RecordError, from_plain, to_plain
from torchweld.machine import kernel_build
from torchweld.numerics.numerical_rule import check_block
from torchweld.welds.found_blocks import Call
from torchweld.welds.swapping.decision_fitting import why_not
from torchweld.welds.swapping.swap import decisions_of, is_welded, stats, undo, weld, welded_paths
from torchweld.welds.weld_decisions import Choice, Decision

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

TORCH, MKLDNN, REFERENCE = (
    Choice(backend="torch"),
    Choice(backend="torch", packed=True),
    Choice(backend="reference"),
)


# ---- which kernel runs ----


def within_the_rule(kind: str, module: nn.Module, x: Tensor) -> None:
    block = CASES[kind][1]
    tensors = [
        dict([*module.named_parameters(), *module.named_buffers()])[n] for n in block.tensors
    ]

    def candidate(x: Tensor, _: Any) -> Tensor:
        y: Tensor = module(x)
        return y / block.scale

    all_within(check_block(candidate, x, tensors, parse_spec(block.form)))


@pytest.mark.parametrize("shape", [(K,), (1, K), (5, K), (2, 3, K), (40, K)], ids=str)
@pytest.mark.parametrize("choice", [PACKED, NATURAL], ids=["packed", "natural"])
@pytest.mark.parametrize("kind", CASES)
def test_the_kernel_runs_and_is_within_the_rule(
    kind: str, choice: Choice, shape: tuple[int, ...]
) -> None:
    make, block = CASES[kind]
    module, x = make().eval(), torch.randn(shape)
    weld(module, [decide(block, choice)])
    weights = ["packed"] if choice.packed else NOT_PACKED
    with torch.no_grad():
        for _ in range(3):  # first checked in full, then by the fast path
            with kernel_runs(*weights):
                y = module(x)
            assert y.shape == (*shape[:-1], N)
        within_the_rule(kind, module, x)
        strided = torch.randn(*shape[:-1], 2 * K)[..., ::2]
        with kernel_runs(*weights):
            y = module(strided)
        assert torch.equal(y, module(strided.contiguous()))
    assert stats(module)[""].originals == {}


@pytest.mark.parametrize("choice", [TORCH, MKLDNN, REFERENCE], ids=["torch", "mkldnn", "reference"])
@pytest.mark.parametrize("kind", CASES)
def test_other_backends(kind: str, choice: Choice) -> None:
    model, plain = model_of(kind, choice)
    with torch.no_grad(), kernel_runs(calls=0):
        for x in (X, torch.randn(2, 3, K)):
            torch.testing.assert_close(model(x), plain(x))
        within_the_rule(kind, model[1], X)
        assert (stats(model)["1"].copied_bytes > 0) == choice.packed
        with torch.no_grad():  # a new tensor, not a change in place
            name = CASES[kind][1].tensors[-1]
            for m in (model, plain):
                holder = m[1].get_submodule(name.rpartition(".")[0])
                old = getattr(holder, name.rpartition(".")[2])
                setattr(holder, name.rpartition(".")[2], nn.Parameter(old + 1.0))
        torch.testing.assert_close(model(X), plain(X))
    assert stats(model)["1"].originals == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    name: Any = str(dtype).removeprefix("torch.")
    block = replace(MLP, dtype=name)
    module = Mlp().eval().to(dtype)
    weld(module, [decide(block)])
    with torch.no_grad(), kernel_runs("packed"):
        y = module(X.to(dtype))
    assert y.dtype == dtype
    if dtype == torch.float64:
        undo(module)
        torch.testing.assert_close(y, module(X.to(dtype)))


def test_a_table_by_rows() -> None:
    module = Mlp().eval()
    by_rows = ((1, 2, NATURAL), (3, 6, PACKED), (7, 8, None), (9, 12, TORCH))
    weld(module, [Decision(block=MLP, by_rows=by_rows)])
    expected = {1: "natural", 2: "natural", 3: "packed", 6: "packed"}
    with torch.no_grad():
        for _ in range(2):
            for rows in (1, 2, 3, 6, 7, 8, 9, 12, 13, 100):
                weights = expected.get(rows)
                with kernel_runs(*([weights] if weights else []), calls=1 if weights else 0):
                    module(torch.randn(rows, K))
    assert stats(module)[""].originals == {"rows": 8}


def test_no_rows_at_all() -> None:
    model, plain = model_of("mlp")
    with torch.no_grad(), kernel_runs(calls=0):
        assert torch.equal(model(X[:0]), plain(X[:0]))
    assert stats(model)["1"].originals == {"rows": 1}


def test_errors_are_the_originals() -> None:
    model, plain = model_of("mlp")
    with torch.no_grad():
        model(X)
        # As many elements as a covered call has.
        for wrong in (torch.randn(K, 5), torch.randn(5 * K), torch.tensor(1.0)):
            with pytest.raises(RuntimeError) as expected:
                plain[1](wrong)
            with pytest.raises(RuntimeError) as found:
                model[1](wrong)
            assert str(found.value) == str(expected.value)
    with pytest.raises(TypeError, match="forward"):
        model[1]()
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        model[1](X, y=1)


class Ignoring(nn.Linear):
    def forward(  # type: ignore[override]
        self,
        mask: Tensor,
        input: Tensor,  # noqa: A002
        other: int = 3,
    ) -> Tensor:
        return super().forward(input)


def test_arguments_that_do_not_enter_the_result() -> None:
    module = Ignoring(K, N).eval()
    weld(module, [decide(replace(LINEAR, kind="Ignoring", ignores=("mask",)))])
    with torch.no_grad():
        expected = nn.Linear.forward(module, X)
        for _ in range(2):
            for args in ((X > 0, X), (None, X, 3)):
                with kernel_runs("packed"):
                    torch.testing.assert_close(module(*args), expected)
            with kernel_runs(calls=0):
                assert torch.equal(module(None, X, 4), expected)


def test_x_by_name_and_arguments_at_their_default() -> None:
    module = Gated().eval()
    weld(module, [decide(GATED)])
    with torch.no_grad():
        expected = module(X)
        for _ in range(2):
            for args, kwargs in (
                ((), {"hidden": X}),
                ((X, None), {}),
                ((X,), {"residual": None}),
                ((), {"residual": None, "hidden": X}),
            ):
                with kernel_runs("packed"):
                    assert torch.equal(module(*args, **kwargs), expected)
        with kernel_runs(calls=0):
            torch.testing.assert_close(module(X, expected), 2 * expected)
        assert stats(module)[""].originals == {"other arguments": 1}


# ---- calls that are not covered ----


def runs_the_original(model: nn.Module, plain: nn.Module, x: Tensor, reason: str) -> None:
    with kernel_runs(calls=0):
        assert torch.equal(model(x), plain(x))
    assert stats(model)["1"].originals == {reason: 1}
    assert stats(model)["1"].changes == ()


def test_gradients_are_the_originals() -> None:
    model, plain = model_of("mlp")
    with pytest.warns(tw.OriginalCodeWarning, match="gradients are on"):
        runs_the_original(model, plain, X, "gradients")
    model.requires_grad_(False)
    with kernel_runs("packed"):
        assert not model(X).requires_grad
    with kernel_runs(calls=0):
        assert model(X.clone().requires_grad_()).requires_grad


def test_training_mode() -> None:
    model, plain = model_of("mlp")
    with torch.no_grad():
        with kernel_runs("packed"):
            model(X)
        runs_the_original(model.train(), plain.train(), X, "training mode")
        model.eval()
        with kernel_runs("packed"):
            model(X)


def test_another_dtype() -> None:
    model, plain = model_of("mlp")
    with torch.no_grad():
        model(X)
        runs_the_original(model.double(), plain.double(), X.double(), "another dtype")
        model.float()
        with kernel_runs("packed"):
            model(X)


def test_another_device() -> None:
    model, _ = model_of("mlp")
    with torch.no_grad():
        model(X)
        model.to("meta")
        with kernel_runs(calls=0):
            assert model(X.to("meta")).is_meta
    assert stats(model)["1"].originals == {"another device": 1}


def test_autocast() -> None:
    model, plain = model_of("mlp")
    with torch.no_grad():
        model(X)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = plain[0](X)
            runs_the_original(model, plain, X, "autocast")
            assert model[1](x).dtype == torch.bfloat16


def test_a_tensor_subclass() -> None:
    class Own(Tensor):
        pass

    model, plain = model_of("mlp")
    with torch.no_grad():
        model(X)
        y = model(X.as_subclass(Own))
        assert type(y) is Own
        assert torch.equal(y.as_subclass(Tensor), plain(X))
    assert stats(model)["1"].originals == {"a tensor subclass": 1}


def test_a_torch_function_mode_sees_what_it_would_see() -> None:
    class Log(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    model, plain = model_of("mlp")
    names = []
    with torch.no_grad():
        model(X)
        for m in (plain, model):
            with Log() as log, kernel_runs(calls=0):
                m(X)
            names.append(log.names)
    assert names[0] == names[1]
    assert stats(model)["1"].originals == {"a torch function mode": 1}


def test_a_parameter_as_x() -> None:
    model, plain = model_of("mlp")
    with torch.no_grad(), kernel_runs("packed"):
        torch.testing.assert_close(model[1](nn.Parameter(X)), plain[1](X))


@pytest.mark.parametrize(("inner", "known"), [(False, False), (True, False), (True, True)])
def test_dropout_is_the_originals(inner: bool, known: bool) -> None:
    """In training mode if what is dropped is not known, and always with only the dropout inside in
    training mode (Monte Carlo dropout)."""
    module = Mlp(dropout=0.5).eval()
    block = replace(MLP, dropout=(0.5, 0.0) if known else ())
    weld(module, [decide(block, training=True)])
    with torch.no_grad():
        with kernel_runs("packed"):
            expected = module(X)
        (module.dropout if inner else module).train()
        with kernel_runs(calls=0):
            assert not torch.allclose(module(X), expected)
        assert stats(module)[""].originals == {"training mode": 1}
        module.eval()
        with kernel_runs("packed"):
            assert torch.equal(module(X), expected)
    with kernel_runs("natural"):  # with gradients, in eval mode
        module(X).sum().backward()


class DropsInline(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return nn.functional.dropout(super().forward(input), 0.5, self.training)


def test_a_block_that_was_never_seen_in_training_is_not_trained() -> None:
    """It is not known whether such a block has a dropout."""
    module = DropsInline(K, N)
    call = Call(shape=(5, K), dtype="float32", contiguous=True, grad=True, training=False, count=1)
    block = replace(LINEAR, kind="DropsInline", calls=(call,))
    weld(module, [decide(block, training=True)])
    with kernel_runs(calls=0):
        assert (module(X) == 0).any()
    with kernel_runs("natural"):
        module.eval()(X)


# ---- training that is covered ----


@pytest.mark.parametrize("kind", CASES)
def test_covered_training_steps_as_the_original_does(kind: str) -> None:
    model, plain = model_of(kind, training=True)
    models = (model.train(), plain.train())
    # eps: a gradient that is rounding alone would be as large a step as any other.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in models]
    for step in range(4):
        x = torch.randn(5 + step, K)
        for m, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with kernel_runs(*(["natural"] if m is model else []), calls=int(m is model)):
                loss = m(x).square().mean()
            loss.backward()
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert stats(model)["1"].originals == {}
    assert stats(model)["1"].copied_bytes == 0
    model.eval()
    with torch.no_grad(), kernel_runs("packed"):
        torch.testing.assert_close(model(X), plain.eval()(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choice", [TORCH, MKLDNN, REFERENCE], ids=["torch", "mkldnn", "reference"])
def test_other_backends_have_gradients(choice: Choice) -> None:
    model, plain = model_of("gated", choice, training=True)
    for m in (model, plain):
        m(X).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert stats(model)["1"].originals == {}


# ---- undoing ----


def everything(model: nn.Module) -> dict[str, Any]:
    """The ids of all attributes and their contents, in order."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"{path} class"] = type(module)
        for key, value in module.__dict__.items():
            inner = {k: id(v) for k, v in value.items()} if isinstance(value, dict) else None
            found[f"{path}.{key}"] = (id(value), list(inner.items()) if inner else None)
    return found


@pytest.mark.parametrize("kind", CASES)
def test_undo_restores_everything(kind: str) -> None:
    make, block = CASES[kind]
    model = nn.Sequential(nn.LayerNorm(K), make()).eval()
    before = everything(model)
    with torch.no_grad():
        expected = model(X)
        assert weld(model, [decide(block, path="1")]) is model
        with kernel_runs("packed"):
            model(X)
        assert is_welded(model[1])
        assert isinstance(model[1], before["1 class"])
        assert undo(model) is model
        assert list(everything(model).items()) == list(before.items())
        with kernel_runs(calls=0):
            assert torch.equal(model(X), expected)
    assert not is_welded(model[1])
    assert welded_paths(model) == []
    undo(model)  # undoing twice is fine
    assert list(everything(model).items()) == list(before.items())


def test_what_was_added_since_stays() -> None:
    model, _ = model_of("mlp")
    mlp: Any = model[1]
    mlp.note = "mine"
    undo(model)
    assert list(mlp.__dict__)[-1] == "note"


def test_parameters_names_and_repr_stay() -> None:
    model, plain = model_of("sequential")
    inner = model[1]
    assert isinstance(inner, nn.Sequential)
    assert repr(model) == repr(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert type(model[1]).__name__ == "Sequential"
    assert [type(m) for m in model[1].children()] == [type(m) for m in plain[1].children()]
    assert len(inner) == 3


def test_paths_and_decisions_are_told() -> None:
    model = nn.ModuleDict({"a": nn.Linear(K, N), "b": nn.Sequential(Mlp(), nn.Linear(N, N))})
    decisions = [
        decide(LINEAR, path="a"),
        decide(MLP, path="b.0"),
        decide(replace(LINEAR, in_features=N), path="b.1"),
    ]
    weld(model, decisions)
    assert welded_paths(model) == ["a", "b.0", "b.1"]
    assert decisions_of(model) == decisions
    assert not is_welded(model)
    assert not is_welded(model.get_submodule("b.0.up"))


def test_undo_at_some_paths() -> None:
    model = nn.ModuleDict({"a": nn.Linear(K, N), "b": Mlp()})
    weld(model, [decide(LINEAR, path="a"), decide(MLP, path="b")])
    with pytest.raises(TorchweldError, match=r"nothing was undone: b\.up is not welded; welded"):
        undo(model, ["a", "b.up"])
    undo(model, ["a"])
    assert welded_paths(model) == ["b"]


def test_welding_again_is_welding_once() -> None:
    model, _ = model_of("mlp")
    before, kind = everything(model), type(model[1])
    with torch.no_grad():
        expected = model(X)
        weld(model, decisions_of(model))
        assert type(model[1]) is kind
        with kernel_runs("packed"):
            assert torch.equal(model(X), expected)
        weld(model, [decide(MLP, NATURAL, path="1")])
        with kernel_runs("natural"):
            model(X)
        assert stats(model)["1"].copied_bytes == 0
    undo(model)
    before.pop("1._torchweld")
    after = everything(model)
    assert after.keys() == before.keys()
    assert type(model[1]) is Mlp


def test_a_block_inside_a_block() -> None:
    """The outer weld serves its rows; for other rows the original runs the inner weld."""
    module = Mlp().eval()
    x = torch.randn(20, K)
    with torch.no_grad():
        expected = module(x)
        weld(module, [decide(MLP, rows=(1, 8))])
        with kernel_runs("packed"):
            module(X)
        inner = replace(LINEAR, out_features=module.up.out_features)
        weld(module, [decide(inner, path="up")])
        for _ in range(2):
            with kernel_runs("packed"):
                module(X)
            with kernel_runs("packed"):
                torch.testing.assert_close(module(x), expected)
    assert stats(module)[""].changes == ()
    undo(module)
    assert type(module) is Mlp
    assert type(module.up) is nn.Linear


def test_a_module_used_twice() -> None:
    shared = Mlp()
    model = nn.ModuleDict({"a": shared, "b": shared}).eval()
    weld(model, [decide(MLP, path="b")])
    with torch.no_grad(), kernel_runs("packed", calls=2):
        assert torch.equal(model["a"](X), model["b"](X))
    with pytest.raises(TorchweldError, match="b: is the same module as a; decide about it once"):
        weld(model, [decide(MLP, path="a"), decide(MLP, path="b")])
    undo(model)
    assert type(shared) is Mlp


# ---- decisions that do not fit ----


class Copied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Copied:
        return self


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A welded model, such as a loaded one, runs the original. Welding is refused."""
    model, plain = model_of("mlp")
    monkeypatch.setattr(ops, "compiled", None)
    monkeypatch.setattr(ops, "problem", "it was not built")
    monkeypatch.setattr(kernel_build, "build_problem", lambda: "it was not built")
    with torch.no_grad():
        with pytest.warns(UserWarning, match="kernels are missing: it was not built"):
            y = model(X)
        assert torch.equal(y, plain(X))
    with pytest.raises(TorchweldError, match="1: backend cpu: it was not built"):
        weld(model, decisions_of(model))


def test_everything_that_is_wrong_is_told_and_nothing_is_changed() -> None:
    model = nn.ModuleDict(
        {
            "good": nn.Linear(K, N),
            "other": nn.ReLU(),
            "sizes": nn.Linear(K, N + 1),
            "halves": nn.Linear(K, N).half(),
            "own": nn.Linear(K, N),
            "copied": Copied(K, N),
            "mlp": Mlp(),
        }
    )
    model["own"].forward = lambda x: x
    before = everything(model)
    decisions = [
        decide(LINEAR, path="good"),
        decide(LINEAR, path="nowhere"),
        decide(LINEAR, path="other"),
        decide(LINEAR, path="sizes"),
        decide(LINEAR, path="halves"),
        decide(LINEAR, path="own"),
        decide(replace(LINEAR, kind="Copied"), path="copied"),
        decide(replace(MLP, tensors=("a.weight", *MLP.tensors[1:])), path="mlp"),
        decide(replace(MLP, form="gelu;identity/b"), path="mlp"),
        decide(replace(MLP, covers=("up", "gone")), path="mlp"),
        decide(replace(MLP, argument="hidden"), path="mlp"),
        decide(MLP, rows=(0, 5), path="mlp"),
        decide(MLP, Choice(backend="reference", packed=True), path="mlp"),
        Decision(block=replace(MLP, path="mlp"), by_rows=()),
        Decision(block=replace(MLP, path="mlp"), by_rows=((1, 5, None), (5, 6, None))),
    ]
    with pytest.raises(TorchweldError, match="nothing was welded") as raised:
        weld(model, decisions)
    lines = str(raised.value).splitlines()[1:]
    for line, expected in zip(
        lines,
        [
            "nowhere: there is no module at this path",
            "other: it is a ReLU, and the decision is about a Linear",
            "other: weight is none of its parameters",
            "other: bias is none of its parameters",
            "sizes: its weights make 31 → 17, not 31 → 16",
            "halves: its weights are float16, not float32",
            "own: it has a forward of its own",
            "copied: Copied has a __deepcopy__ of its own",
            "mlp: a.weight is none of its parameters",
            "mlp: the spec asks for 3 tensors, 4 were given",
            "mlp: there is no module gone inside it",
            "mlp: forward has no parameter 'hidden'; it takes x",
            "mlp: its table has rows 0 to 5",
            "mlp: backend reference keeps no packed copy",
            "mlp: its table is empty",
            "mlp: its table has two choices for 5 rows",
        ],
        strict=True,
    ):
        assert line.strip().startswith(expected)
    refused = why_not(model, decisions)
    assert [f"  {one.path}: {one.reason}" for one in refused] == lines
    assert everything(model) == before


def test_only_what_would_not_be_welded_is_refused() -> None:
    model = nn.Sequential(nn.Linear(31, 16), nn.ReLU())
    first = decide(LINEAR, path="0")
    assert why_not(model, [first]) == ()
    refused = why_not(model, [first, decide(LINEAR, path="1"), first])
    assert [(one.path, one.kind) for one in refused][-1] == ("0", "Linear")
    assert refused[-1].reason == "is the same module as 0; decide about it once"
    assert {one.path for one in refused} == {"0", "1"}
    assert welded_paths(model) == []


class Final(type):
    """A metaclass whose classes cannot have subclasses."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError(f"{bases[-1].__name__} is final")
        return super().__new__(cls, name, bases, body)


def test_a_class_that_refuses_is_refused() -> None:
    class Sealed(nn.Linear, metaclass=Final):
        pass

    model = nn.ModuleDict({"a": nn.Linear(K, N), "b": Sealed(K, N)})
    before = everything(model)
    with pytest.raises(TorchweldError, match="b: Sealed is final"):
        weld(model, [decide(LINEAR, path="a"), decide(replace(LINEAR, kind="Sealed"), path="b")])
    assert everything(model) == before


def test_classes_with_slots_and_lists_of_their_subclasses() -> None:
    subclasses: list[type] = []

    class Listed(nn.Linear):
        __slots__ = ("extra",)
        extra: int

        def __init_subclass__(cls) -> None:
            subclasses.append(cls)

    module = Listed(K, N).eval()
    module.extra = 1
    weld(module, [decide(replace(LINEAR, kind="Listed"))])
    with torch.no_grad(), kernel_runs("packed"):
        module(X)
    undo(module)
    assert type(module) is Listed
    assert module.extra == 1
    assert subclasses == []


def test_a_module_that_makes_another_of_its_class() -> None:
    model, _ = model_of("mlp")
    made = type(model[1])()
    assert not is_welded(made)
    with torch.no_grad(), kernel_runs(calls=0):
        made(X)
    undo(made)
    assert type(made) is Mlp


def test_a_failure_half_way_leaves_nothing_behind() -> None:
    model = nn.ModuleDict({"a": nn.Linear(K, N), "b": Mlp()})
    weld(model, [decide(LINEAR, NATURAL, path="a")])
    before = everything(model)

    class Broken(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            raise KeyboardInterrupt

    b = model["b"]
    b.__dict__ = Broken(b.__dict__)
    with pytest.raises(KeyboardInterrupt):
        weld(model, [decide(LINEAR, path="a"), decide(MLP, path="b")])
    b.__dict__ = dict(b.__dict__)
    assert everything(model) == before


def test_not_a_model() -> None:
    acts: list[Callable[[Any], object]] = [lambda m: weld(m, []), undo, stats, welded_paths]
    for act in acts:
        with pytest.raises(TorchweldError, match="model is a list"):
            act([nn.Linear(2, 2)])


# ---- records ----


def test_decisions_are_saved_and_loaded() -> None:
    decision = Decision(
        block=replace(MLP, path="layers.3.mlp"),
        by_rows=((1, 4, NATURAL), (5, 64, PACKED), (65, 128, None), (129, 512, TORCH)),
        training=True,
    )
    text = json.dumps(to_plain(decision))
    assert from_plain(Decision, json.loads(text)) == decision
    with pytest.raises(RecordError, match=r"'gpu'.*there are: cpu, .*torch, reference, compile"):
        from_plain(Decision, json.loads(text.replace('"cpu"', '"gpu"')))
