"""Tests that a clone computes the same on the same weights, and never leads to the live model."""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import torchweld as tw
from torchweld.core.errors import CannotCloneError
from torchweld.models import MODELS
from torchweld.welds.cloning.model_clone import Clone, structural_clone
from torchweld.welds.swapping.swap import welded_paths
from torchweld.welds.swapping.welded_class import welded_class
from torchweld.welds.weld_marks import plain_class


def live_modules_behind(clone: Clone) -> list[str]:
    """Paths from the clone to live modules, through all references and weak references."""
    live = {id(module): module for module in clone.live_of.values()}
    live |= {id(module.__dict__): module for module in clone.live_of.values()}
    skipped = (type, types.ModuleType, types.CodeType, types.FrameType, Tensor, torch.fx.Graph)
    stack: list[tuple[Any, str]] = [(clone.model, "")]
    seen: set[int] = set()
    found = []
    while stack:
        value, path = stack.pop()
        if id(value) in live:
            found.append(path)
        if id(value) in seen or isinstance(value, skipped) or id(value) in live:
            continue
        seen.add(id(value))
        inner = list(gc.get_referents(value))
        if isinstance(value, weakref.ref):
            inner.append(value())
        if isinstance(value, types.FunctionType):
            inner = [x for x in inner if x is not value.__globals__]
        stack += [(x, f"{path}/{type(value).__name__}") for x in inner if x is not None]
    return found


def check(model: nn.Module, *args: Any, **kwargs: Any) -> Clone:
    """Checks that the clone gives the same on the same parameters, with its own modules."""
    before = [dict(module.__dict__) for module in model.modules()]
    clone = structural_clone(model)
    assert type(clone.model) is type(model)
    named, own = dict(model.named_modules()), dict(clone.model.named_modules())
    assert list(named) == list(own)
    for name, module in named.items():
        assert clone.clone_of[module] is own[name]
        assert clone.live_of[own[name]] is module
        assert own[name] is not module
        assert type(own[name]) is type(module)
        assert own[name].__dict__ is not module.__dict__
        assert list(own[name].__dict__) == list(module.__dict__)
    ours, theirs = list(clone.model.parameters()), list(model.parameters())
    assert all(a is b for a, b in zip(ours, theirs, strict=True))
    assert all(a is b for a, b in zip(clone.model.buffers(), model.buffers(), strict=True))
    assert not live_modules_behind(clone)
    with torch.no_grad():
        expected, got = model(*args, **kwargs), clone.model(*args, **kwargs)
    compare(got, expected)
    for module, was in zip(model.modules(), before, strict=True):
        assert list(module.__dict__) == list(was)
    return clone


def compare(got: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            compare(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        for a, b in zip(got, expected, strict=True):
            compare(a, b)
    elif hasattr(expected, "__dict__"):
        compare(vars(got), vars(expected))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


X = torch.linspace(-1, 1, 24).view(3, 8)


@pytest.mark.parametrize("name", MODELS)
def test_a_built_in_model_computes_the_same(name: str) -> None:
    model, inputs = MODELS[name].build()
    check(model, *inputs.args, **inputs.kwargs)


TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "num_key_value_heads": 4,
}
KINDS = ["bert", "roberta", "llama", "mistral", "qwen2", "phi3", "gemma", "gpt_neox", "electra"]


@pytest.mark.parametrize("kind", [*KINDS, "gpt2", "distilbert", "t5"])
def test_a_model_of_transformers_computes_the_same(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    given: dict[str, Any] = dict(TINY)
    if kind == "gpt2":
        given = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}
    elif kind == "distilbert":
        given = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99}
    elif kind == "t5":
        given = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        given |= {"vocab_size": 99, "decoder_start_token_id": 0}
    if kind == "phi3":
        given["pad_token_id"] = 0
    if kind == "gemma":
        given["head_dim"] = 8
    config = transformers.AutoConfig.for_model(kind, **given)
    model = transformers.AutoModel.from_config(config).eval()
    inputs = {"input_ids": torch.arange(7)[None]}
    if kind == "t5":
        inputs["decoder_input_ids"] = torch.arange(5)[None]
    clone = structural_clone(model)
    assert not live_modules_behind(clone)
    with torch.no_grad():
        expected, got = model(**inputs), clone.model(**inputs)
    compare(got[0], expected[0])


# ---- places where modules are held ----


def test_a_module_at_two_places_stays_one_module() -> None:
    shared = nn.Linear(8, 8)
    clone: Any = check(nn.Sequential(shared, nn.ReLU(), shared), X).model
    assert clone[0] is clone[2]


def test_a_change_to_one_is_none_to_the_other() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    clone: Any = structural_clone(model).model
    clone.train(False)
    clone[0].extra = 3
    clone.add_module("more", nn.Tanh())
    clone[0].register_forward_hook(lambda *_: None)
    clone[0].register_buffer("b", X)
    assert model.training
    assert model[0].training
    assert model[1].training
    assert len(model) == 2
    assert not model[0]._forward_hooks
    assert not model[0]._buffers
    assert not hasattr(model[0], "extra")


class Holding(nn.Module):
    """Calls what `get` finds in the attribute `held`."""

    held: Any
    get: Callable[[Any], Any]

    def __init__(self, held: Callable[[nn.Module], Any], get: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        object.__setattr__(self, "held", held(self))
        object.__setattr__(self, "get", get)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.get(self.held)(x)
        return y

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class Plain:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.me = self


class Slotted:
    __slots__ = ("module", "unset")

    def __init__(self, module: nn.Module) -> None:
        self.module = module


@dataclass(frozen=True)
class Frozen:
    module: nn.Module


class Listed(list):  # type: ignore[type-arg]
    note = ""


def _closure(module: Any) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        return 3 * module.inner(x)

    return call


def _weak_set(module: nn.Module) -> Any:
    return weakref.WeakSet([module])


HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda m: m, lambda h: h.doubled),
    "a list": (lambda m: [m.inner, m], lambda h: h[0]),
    "a nested list": (lambda m: [[{"a": (m.inner,)}]], lambda h: h[0][0]["a"][0]),
    "a tuple": (lambda m: (m.inner, 1), lambda h: h[0]),
    "a dict": (lambda m: {"m": m.inner}, lambda h: h["m"]),
    "keys": (lambda m: {m.inner: 1}, lambda h: next(iter(h))),
    "a set": (lambda m: {m.inner}, lambda h: next(iter(h))),
    "a frozenset": (lambda m: frozenset([m.inner]), lambda h: next(iter(h))),
    "a deque": (lambda m: deque([m.inner], maxlen=4), lambda h: h[0]),
    "an OrderedDict": (lambda m: OrderedDict(a=m.inner), lambda h: h["a"]),
    "a defaultdict": (lambda m: defaultdict(m.doubled.__func__, a=m), lambda h: h["a"].doubled),
    "a class of lists": (lambda m: Listed([m.inner]), lambda h: h[0]),
    "a view of a dict": (lambda m: m._modules.values(), lambda h: next(iter(h))),
    "a proxy of a dict": (lambda m: types.MappingProxyType({1: m.inner}), lambda h: h[1]),
    "a method": (lambda m: m.doubled, lambda h: h),
    "a method of a child": (lambda m: m.inner.__call__, lambda h: h),
    "a partial": (lambda m: functools.partial(m.doubled), lambda h: h),
    "a partial with a module": (lambda m: functools.partial(_apply, m.inner), lambda h: h),
    "a closure": (_closure, lambda h: h),
    "a wrapped closure": (lambda m: functools.wraps(m.doubled)(_closure(m)), lambda h: h),
    "a default": (lambda m: lambda x, m=m: m.inner(x), lambda h: h),
    "a keyword default": (lambda m: lambda x, *, m=m: m.inner(x), lambda h: h),
    "an object": (Plain, lambda h: h.me.module.doubled),
    "an object with slots": (Slotted, lambda h: h.module.doubled),
    "a frozen dataclass": (Frozen, lambda h: h.module.doubled),
    "a namespace": (lambda m: types.SimpleNamespace(m=m), lambda h: h.m.doubled),
    "a weak reference": (weakref.ref, lambda h: h().doubled),
    "a weak method": (lambda m: weakref.WeakMethod(m.doubled), lambda h: h()),
    "a weak proxy": (weakref.proxy, lambda h: h.doubled),
    "a weak set": (_weak_set, lambda h: next(iter(h)).doubled),
    "its own dict": (lambda m: m.__dict__, lambda h: h["_modules"]["inner"]),
    "an unregistered module": (lambda m: [nn.Sequential(nn.Linear(8, 8), m.inner)], lambda h: h[0]),
}


def _apply(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return y


@pytest.mark.parametrize("name", HELD)
def test_what_leads_to_a_module_leads_to_the_clone(name: str) -> None:
    made, get = HELD[name]
    model = Holding(made, get)
    clone: Any = check(model, X).model
    assert clone.held is not model.held
    called: list[nn.Module] = []
    clone.inner.register_forward_hook(lambda m, *_: called.append(m))
    clone(X)
    assert called == [clone.inner]


def test_a_parent_stored_past_setattr_is_the_clone() -> None:
    class Child(nn.Linear):
        parent: Any

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.parent.scale

    model: Any = nn.Sequential(Child(8, 8))
    model.scale = 2.0
    object.__setattr__(model[0], "parent", model)
    clone: Any = check(model, X).model
    assert clone[0].parent is clone


def test_hooks_are_those_of_the_clone() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.handle = self.inner.register_forward_hook(self.note)
            self.seen = 0

        def note(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
            self.seen += 1
            return result + 1

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    model = Noting()
    clone: Any = check(model, X).model
    assert (model.seen, clone.seen) == (1, 1)
    clone.handle.remove()
    assert model.inner._forward_hooks
    assert not clone.inner._forward_hooks


def test_mutable_things_without_modules_stay_shared() -> None:
    model: Any = Block()
    model.config = types.SimpleNamespace(scale=[1])
    model.table = [1, 2]
    clone = check(model, X).model
    assert clone.config is model.config
    assert clone.table is model.table


# ---- kinds of classes ----


class Odd(nn.Module):
    """Raises if one of its methods is called to make a clone."""

    __slots__ = ("beside",)

    def __new__(cls, size: int) -> Odd:
        return super().__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)
        object.__setattr__(self, "beside", [self.inner])
        self.__dict__["closed"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        assert "closed" not in self.__dict__
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("made_up"):
            return 2.0
        return super().__getattr__(name)

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError

    __copy__ = __reduce_ex__ = __getstate__ = __deepcopy__  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.beside[0](x) * self.made_up_scale


def test_a_class_with_ways_of_its_own() -> None:
    clone: Any = check(Odd(8), X).model
    assert clone.beside[0] is clone.inner


def test_parametrised_modules() -> None:
    class Twice(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    model = Block()
    parametrize.register_parametrization(model.up, "weight", Twice())
    parametrizations.weight_norm(model.down)
    clone: Any = check(model, X).model
    assert parametrize.is_parametrized(clone.up)


def test_pruned_and_weight_normed_modules() -> None:
    from torch.nn.utils import prune

    model = Block()
    prune.random_unstructured(model.up, "weight", amount=0.5)
    check(model, X)


def test_a_lazy_module_stays_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    clone = structural_clone(model)
    assert clone.model.get_parameter("0.weight") is model[0].weight
    assert not live_modules_behind(clone)


def test_recurrent_and_attention_modules() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    check(nn.TransformerEncoder(layer, 2).eval(), X[None])
    check(nn.LSTM(8, 8, batch_first=True), X[None])


def test_a_graph_module() -> None:
    check(torch.fx.symbolic_trace(Block()), X)


def test_torchscript_has_modes_of_its_own() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    model = nn.Sequential(scripted, nn.ReLU())
    clone: Any = structural_clone(model, own_bytes=1 << 20).model
    before = copy.deepcopy(model.state_dict())
    clone.eval()
    assert scripted.training
    assert not clone[0].training
    compare(clone(X), model.eval()(X))
    clone.train()(X)
    compare(dict(model.state_dict()), dict(before))
    ours, theirs = clone[0].parameters(), scripted.parameters()
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_runs_uncompiled() -> None:
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph

    compiled: Any = torch.compile(Block(), backend=backend)
    model = nn.Sequential(compiled, Block())
    model[1].compile(backend=backend)
    clone = structural_clone(model)
    assert not live_modules_behind(clone)
    expected = nn.Sequential(compiled._orig_mod, model[1])
    with torch.no_grad():
        got = clone.model(X)
        assert not compilations
        assert torch.allclose(got, expected(X))
    assert type(clone.model.get_submodule("0")) is type(compiled)


def test_a_welded_model_is_cloned_as_it_was() -> None:
    model = nn.Sequential(Block(), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        expected = model(X)
    tw.apply(model, tw.plan(model, X, force=True))
    assert welded_paths(model)
    clone = structural_clone(model)
    assert not welded_paths(clone.model)
    assert type(clone.model.get_submodule("0")) is Block
    assert not any("_torchweld" in key for m in clone.model.modules() for key in m.__dict__)
    with torch.no_grad():
        assert torch.equal(clone.model(X), expected)
    assert welded_paths(model)


def test_the_plain_class_of_a_welded_one() -> None:
    welded = welded_class(Block)
    derived = type("Derived", (welded,), {})
    assert [plain_class(kind) for kind in (Block, welded, derived)] == [Block, Block, derived]


def test_a_fused_mlp() -> None:
    check(tw.FusedMLP([8, 16, 8], "relu").eval(), X)


# ---- models that cannot be cloned ----


class Deleted:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __del__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("held", "named"),
    [
        (lambda m: functools.lru_cache(m.doubled), "_lru_cache_wrapper"),
        (lambda m: iter([m.inner]), "list_iterator"),
        (lambda m: (y for y in [m]), "generator"),
        (Deleted, "__del__"),
        (lambda m: {"deep": [Deleted(m)]}, "held.deep.0"),
    ],
)
def test_what_cannot_be_made_anew_is_refused_by_name(
    held: Callable[[Any], Any], named: str
) -> None:
    model = nn.Sequential(Holding(held, lambda h: h))
    with pytest.raises(CannotCloneError, match=r"0\.held") as raised:
        structural_clone(model)
    assert named in str(raised.value)


def test_a_wrapper_of_several_ranks_is_refused() -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = nn.Sequential(DistributedDataParallel.__new__(DistributedDataParallel))
    nn.Module.__init__(model[0])
    with pytest.raises(CannotCloneError, match=r"0 is a DistributedDataParallel.*model\.module"):
        structural_clone(model)


def test_locks_and_what_leads_nowhere_are_shared() -> None:
    import threading

    model: Any = Block()
    model.lock, model.event = threading.RLock(), threading.Event()
    clone = check(model, X).model
    assert clone.lock is model.lock
    assert clone.event is model.event


# ---- state that a clone copies ----


class Stateful(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(4))
        self.view = self.count[1:]
        self.alias = self.count
        self.plain = torch.zeros(1)
        self.calls: list[int] = []
        self.nested = {"a": [1]}

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.plain += 1
        self.calls.append(1)
        self.nested["a"].append(2)
        y: Tensor = self.norm(self.inner(x))
        return y


def test_state_of_its_own_leaves_the_live_state_alone() -> None:
    model = Stateful()
    before = copy.deepcopy(model.state_dict())
    clone: Any = structural_clone(model, own_bytes=1 << 20).model
    clone(X)
    compare(dict(model.state_dict()), dict(before))
    assert (model.calls, model.nested, float(model.plain)) == ([], {"a": [1]}, 0.0)
    assert clone.alias is clone.count
    assert clone.view.tolist() == [1.0] * 3
    assert clone.inner.weight is model.inner.weight


def test_buffers_without_room_are_shared_and_named() -> None:
    model = Stateful()
    clone = structural_clone(model, own_bytes=40)
    assert "norm.running_mean" not in dict(clone.shared) or "count" not in dict(clone.shared)
    assert dict(clone.shared)
    for name, tensor in clone.shared:
        assert dict(model.named_buffers()).get(name, tensor) is tensor


def test_parameters_of_their_own_lie_in_the_same_memory() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8))
    model[0].bias.requires_grad_(False)
    model[0].tied = [model[0].weight]
    clone: Any = structural_clone(model, own_parameters=True).model
    for ours, theirs in zip(clone.parameters(), model.parameters(), strict=True):
        assert ours is not theirs
        assert type(ours) is nn.Parameter
        assert ours.data_ptr() == theirs.data_ptr()
        assert ours.requires_grad == theirs.requires_grad
    assert clone[0].tied[0] is clone[0].weight
    assert clone[1]._flat_weights[0] is clone[1].weight_ih_l0
    clone(X)[0].sum().backward()
    assert clone[0].weight.grad is not None
    assert all(p.grad is None for p in model.parameters())
    version = clone[0].weight._version
    with torch.no_grad():
        model[0].weight.add_(1)
    assert clone[0].weight._version > version
