"""Tests that `find` recognises chains by what they compute, however they are written."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import module_zoo as zoo
from tests.support.module_zoo import H, K, N
from torch import Tensor, nn

from torchweld.core.blocks import parse_spec
from torchweld.core.model_inputs import Inputs
from torchweld.models import MODELS
from torchweld.models.bert import BertConfig
from torchweld.models.dlrm import DlrmConfig
from torchweld.models.gpt import GptConfig
from torchweld.models.llama import LlamaConfig
from torchweld.models.mixer import MixerConfig
from torchweld.models.policy import PolicyConfig
from torchweld.models.vit import VitConfig
from torchweld.ops.backends import reference_backend
from torchweld.welds.finding.find import find
from torchweld.welds.found_blocks import Block, Blocks

X = torch.randn(3, 5, K, generator=torch.Generator().manual_seed(1))


def check_blocks(model: nn.Module, blocks: Blocks, inputs: Any = X) -> None:
    """Checks in a run of the whole model that every block is what its module computes."""
    called: set[str] = set()

    def check(block: Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
            x = kwargs[block.argument] if block.argument in kwargs else args[0]
            own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            tensors = [own[name] for name in block.tensors]
            assert {str(t.dtype) for t in tensors} == {f"torch.{block.dtype}"}
            expected = reference_backend.chain(x, tensors, parse_spec(block.form)) * block.scale
            torch.testing.assert_close(y, expected)
            assert (x.shape[-1], y.shape[-1]) == (block.in_features, block.out_features)
            assert hidden_widths(x, tensors, block.form) == block.hidden
            assert y.abs().max() > 0
            called.add(block.path)

        return hook

    model.eval()
    modules = dict(model.named_modules())
    handles = [
        modules[block.path].register_forward_hook(check(block), with_kwargs=True)
        for block in blocks
    ]
    with torch.no_grad():
        inputs.call(model) if isinstance(inputs, Inputs) else model(inputs)
    for handle in handles:
        handle.remove()
    assert called == {block.path for block in blocks}


def hidden_widths(x: Tensor, tensors: list[Tensor], spec: str) -> tuple[int, ...]:
    """How wide the output of each layer but the last is."""
    forms, widths = parse_spec(spec), []
    for i in range(1, len(forms)):
        inside = sum(form.tensors for form in forms[:i])
        widths.append(reference_backend.chain(x, tensors[:inside], forms[:i]).shape[-1])
    return tuple(widths)


def only(model: nn.Module, inputs: Any = X) -> Block:
    """The only block, which is the whole model."""
    blocks = find(model, inputs)
    assert [block.path for block in blocks] == [""], blocks.refused
    check_blocks(model, blocks, inputs)
    return blocks[0]


def found(model: nn.Module, inputs: Any = X) -> dict[str, str]:
    blocks = find(model, inputs)
    check_blocks(model, blocks, inputs)
    return {block.path: block.form for block in blocks}


def halves(t: Tensor) -> tuple[Tensor, ...]:
    return t.chunk(2, dim=-1)


# ---- chains written in different ways ----


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (lambda: zoo.Functional(F.gelu), "gelu/b;identity/b"),
        (lambda: zoo.Functional(F.relu, bias=False), "relu;identity"),
        (lambda: nn.Sequential(nn.Linear(K, H), nn.ReLU(inplace=True), nn.Linear(H, N)), None),
        (lambda: zoo.Gated(), "silu/separate;identity"),
        (lambda: zoo.Gated(F.gelu, bias=True), "gelu/b/separate;identity/b"),
        (lambda: zoo.Gated(lambda z: z), "identity/separate;identity"),
        (lambda: zoo.FeedForward(), "gelu/b/second;identity/b"),
        (lambda: zoo.MisleadingNames(), "gelu/first;identity"),
        (lambda: zoo.TransposedMlp(), "gelu_tanh/b/t;identity/b/t"),
        (lambda: zoo.LookAlikes(), "gelu/b;identity"),
        (lambda: zoo.BareParameters(), "mish;identity/b/t"),
        (lambda: zoo.QuickGelu(), "quick_gelu/b;identity/b"),
        (lambda: zoo.FunctionalDropout(), "gelu_tanh/b;identity/b"),
        (lambda: zoo.GatedWithDropout(), "gelu_tanh/separate;identity"),
        (lambda: zoo.Loop(K, 8, 7, 9, N), "relu/b;relu/b;relu/b;relu/b"),
        (lambda: zoo.Reshaping(), "tanh/b;identity/b"),
        (lambda: zoo.TimeFirst(), "tanh/b;identity/b"),
        (lambda: zoo.InPlace(), "relu/b;identity/b"),
        (lambda: zoo.ExtraArguments(), "relu/b;identity/b"),
        (lambda: zoo.WideActivation(), "silu/b;identity/b"),
        (lambda: nn.Linear(K, N), "identity/b"),
        (lambda: nn.Linear(K, N, bias=False), "identity"),
        (lambda: zoo.Conv1D(K, N), "identity/b/t"),
        (lambda: nn.Sequential(nn.Linear(K, 2 * H), nn.GLU(), nn.Linear(H, N)),
         "sigmoid/b/second;identity/b"),
    ],
)  # fmt: skip
def test_a_module_that_is_a_chain_is_one_block(
    make: Callable[[], nn.Module], form: str | None
) -> None:
    model = make()
    block = only(model)
    assert block.form == (form or "relu/b;identity/b")
    assert block.scale == 1.0
    assert block.kind == type(model).__name__
    assert set(block.covers) == {name for name, _ in model.named_modules() if name}


@pytest.mark.parametrize(
    ("parts", "gate"),
    [
        (halves, "first"),
        (lambda t: halves(t)[::-1], "second"),
        (lambda t: t.split(H, dim=-1), "first"),
        (lambda t: t.split([H, H], dim=2), "first"),
        (lambda t: (t[..., :H], t[:, :, H:]), "first"),
        (lambda t: (t[..., H:], t[..., :H]), "second"),
        (lambda t: (t[..., ::2], t[..., 1::2]), "interleaved"),
        (lambda t: t.unflatten(-1, (2, H)).unbind(-2), "first"),
        (lambda t: t.view(*t.shape[:-1], H, 2).unbind(-1), "interleaved"),
        (lambda t: t.view(*t.shape[:-1], 2, H).permute(2, 0, 1, 3), "first"),
        (lambda t: (t.narrow(-1, H, H), t.narrow(-1, 0, H)), "second"),
    ],
)
def test_a_packed_gate_in_any_order(
    parts: Callable[[Tensor], tuple[Tensor, ...]], gate: str
) -> None:
    block = only(zoo.Packed(parts, F.silu))
    assert block.form == f"silu/b/{gate};identity"


def test_a_gate_in_the_odd_columns_has_no_form() -> None:
    model = zoo.Packed(lambda t: (t[..., 1::2], t[..., ::2]), F.silu)
    blocks = find(model, X)
    assert "odd columns" in blocks.refused[0].reason
    assert [block.path for block in blocks] == ["gate_up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("act", "form"),
    [
        (zoo.new_gelu, "gelu_tanh"),
        (lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
         "gelu_tanh"),
        (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
        (lambda x: x * torch.sigmoid(x), "silu"),
        (lambda x: x / (1 + torch.exp(-x)), "silu"),
        (lambda x: torch.square(F.relu(x)), "relu2"),
        (lambda x: F.relu(x).pow(2), "relu2"),
        (lambda x: x.clamp(min=0), "relu"),
        (lambda x: torch.where(x > 0, x, 0.2 * x), "leaky_relu:0.2"),
        (F.leaky_relu, "leaky_relu"),
        (lambda x: F.elu(x, 0.7), "elu:0.7"),
        (F.elu, "elu"),
        (lambda x: F.celu(x), "elu"),
        (lambda x: x * torch.tanh(F.softplus(x)), "mish"),
        (F.softplus, "softplus"),
        (lambda x: F.softplus(x, 2.0, 15.0), "softplus:2.0,15.0"),
        (F.hardswish, "hardswish"),
        (lambda x: x * F.relu6(x + 3) / 6, "hardswish"),
        (lambda x: 2 * torch.sigmoid(2 * x) - 1, "tanh"),
        (torch.sigmoid, "sigmoid"),
        (lambda x: torch.special.expit(x), "sigmoid"),
        (lambda x: x.neg().neg(), "identity"),
        (lambda x: x.clone().relu_(), "relu"),
    ],
)  # fmt: skip
def test_an_activation_is_known_by_its_values(act: Callable[[Tensor], Tensor], form: str) -> None:
    assert only(zoo.Functional(act)).form == f"{form}/b;identity/b"


@pytest.mark.parametrize(
    "act",
    [
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978 * (x + 0.044715 * x**3))),  # four digits
        lambda x: x * torch.sigmoid(1.7 * x),
        lambda x: F.silu(1.5 * x),
        lambda x: F.gelu(x).clamp(max=1e4),
        F.relu6,
        F.selu,
        lambda x: F.relu(x) + 1e-5,
        lambda x: F.relu(-x),
        torch.sin,
        lambda x: x * x,
    ],
)
def test_what_is_almost_an_activation_is_refused(act: Callable[[Tensor], Tensor]) -> None:
    blocks = find(zoo.Functional(act), X)
    assert [block.form for block in blocks] == ["identity/b", "identity/b"]
    (refusal,) = blocks.refused
    assert refusal.path == ""
    assert refusal.op.startswith("aten.")


def test_a_constant_of_four_digits_is_no_multiplier_either() -> None:
    def almost(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978 * (x + 0.044715 * x**3)))

    assert [b.form for b in find(zoo.Functional(almost, bias=False), X)] == ["identity"] * 2


def test_in_float64_a_rounded_constant_makes_another_function() -> None:
    model = zoo.Functional(lambda x: x * torch.sigmoid(x * (1 + 1e-12)))
    assert only(model).form == "silu/b;identity/b"
    assert [b.form for b in find(model.double(), X.double())] == ["identity/b", "identity/b"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", [zoo.WideActivation, zoo.Gated, zoo.TransposedMlp])
def test_other_types(dtype: torch.dtype, make: Callable[[], nn.Module]) -> None:
    blocks = find(make().to(dtype), X.to(dtype))
    if dtype == torch.float64 and make is zoo.WideActivation:
        assert "a cast from float64 to float32" in blocks.refused[0].reason
    else:
        assert [block.path for block in blocks] == [""]
        assert blocks[0].dtype == blocks[0].calls[0].dtype == str(dtype).removeprefix("torch.")


# ---- multipliers, arguments, dropout ----


def test_a_multiplier_of_the_output() -> None:
    block = only(zoo.Multipliers(1.0, 0.25))
    assert (block.form, block.scale) == ("silu/separate;identity", 0.25)


def test_a_multiplier_inside_an_activation_is_refused() -> None:
    blocks = find(zoo.Multipliers(1.5, 0.25), X)
    assert [block.path for block in blocks] == ["gate_proj", "up_proj", "down_proj"]
    assert blocks.refused[0].op in ("aten.mul", "aten.silu")


@pytest.mark.parametrize(
    ("act", "bias", "scale"),
    [
        (lambda h: 3.0 * F.relu(h), False, 3.0),
        (lambda h: F.relu(3.0 * h), False, 3.0),
        (lambda h: F.relu(h / 4).square(), False, 1 / 16),
        (lambda h: F.selu(h), False, 1.0507009873554805),
        (lambda h: -F.gelu(h), False, -1.0),
        (lambda h: F.relu(h) * 3.0, True, None),
    ],
)
def test_multipliers_move_to_the_end_where_they_can(
    act: Callable[[Tensor], Tensor], bias: bool, scale: float | None
) -> None:
    model = zoo.Functional(act, bias=bias)
    if scale is None:
        blocks = find(model, X)
        assert "multiplier of 3 before a bias" in blocks.refused[0].reason
        assert blocks.refused[0].op == "aten.mul"
    else:
        assert only(model).scale == pytest.approx(scale, rel=1e-12)


def test_a_multiplier_of_the_input_counts_for_gate_and_up() -> None:
    class Scaled(zoo.Gated):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 3.0)

    assert only(Scaled(F.relu)).scale == 9.0
    assert "multiplier of 3 inside silu" in find(Scaled(F.silu), X).refused[0].reason


def test_other_arguments_that_do_not_enter_the_result() -> None:
    model = zoo.ExtraArguments()
    given = Inputs(hidden_states=X, mask=torch.ones(3, 5))
    block = only(model, given)
    assert (block.argument, block.ignores) == ("hidden_states", ("mask",))
    assert only(model, Inputs(X, None, 1.0)).ignores == ()
    blocks = find(model, Inputs(X, scale=2.0))
    assert "2.0 as its scale" in blocks.refused[0].reason
    assert [block.path for block in blocks] == ["a", "b"]


def test_dropout_is_nothing_in_inference() -> None:
    for make in (zoo.TransposedMlp, zoo.FunctionalDropout, zoo.MisleadingNames):
        assert only(make()).dropout == ()


@pytest.mark.parametrize(
    ("make", "dropout"),
    [
        (lambda: zoo.TransposedMlp(), (0.0, 0.1)),
        (lambda: zoo.FunctionalDropout(), (0.0, 0.2)),
        (lambda: zoo.FunctionalDropout(0.0), ()),
        (lambda: zoo.GatedWithDropout(), (0.1, 0.0)),
        (lambda: nn.Sequential(nn.Linear(K, H), nn.Dropout(0.5), nn.ReLU(), nn.Linear(H, N)), None),
        (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(K, N), nn.ReLU(), nn.Linear(N, N)), None),
        (lambda: nn.Sequential(nn.Linear(K, H), nn.AlphaDropout(0.5), nn.Linear(H, N)), None),
        (
            lambda: nn.Sequential(
                nn.Linear(K, H), nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(H, N)
            ),
            None,
        ),
    ],
)
def test_dropout_in_training(
    make: Callable[[], nn.Module], dropout: tuple[float, ...] | None
) -> None:
    blocks = find(make(), X, training=True)
    if dropout is None:
        refusal = blocks.refused[0]
        assert "dropout" in f"{refusal.reason} {refusal.where}"
        assert [block.layers for block in blocks] == [1, 1]
    else:
        assert [block.dropout for block in blocks] == [dropout]
        (call,) = blocks[0].calls
        assert (call.training, call.grad) == (True, True)


# ---- blocks within models ----


def test_an_mlp_in_two_modules_is_found_in_its_parts() -> None:
    blocks = find(zoo.TwoModules(), X)
    assert [(b.path, b.form) for b in blocks] == [
        ("intermediate", "gelu/b"),
        ("output.dense", "identity/b"),
    ]
    (refusal,) = blocks.refused
    assert (refusal.path, refusal.kind, refusal.op) == ("output", "Output", "aten.layer_norm")
    assert refusal.reason == "a layer norm after the last Linear (LayerNorm)"
    assert refusal.where.startswith("module_zoo.py:")


def test_an_mlp_inline_in_a_layer_is_found_in_its_parts() -> None:
    assert found(zoo.Inline()) == {"fc1": "identity/b", "fc2": "identity/b"}


def test_the_inside_of_lora_is_found_where_it_stands() -> None:
    model = nn.Sequential(zoo.Lora(), nn.ReLU())
    blocks = find(model, X)
    assert [b.path for b in blocks] == ["0.base_layer", "0.lora_A", "0.lora_B"]
    assert [r.path for r in blocks.refused] == ["0"]
    groups = {b.path: b.group for b in blocks}
    assert groups["0.base_layer"] == groups["0.lora_A"] == "0#0"
    assert groups["0.lora_B"] == ""


def test_modules_of_one_class_are_not_taken_for_each_other() -> None:
    norms = [nn.LayerNorm(n) for n in (N, 4, 5)]
    model = nn.Sequential(
        *(zoo.Functional(F.relu), norms[0], zoo.Weight(N, 4), norms[1], zoo.Weight(4, 5), norms[2]),
        *(nn.Linear(5, K), nn.Softmax(-1), zoo.Functional(F.gelu)),
    )
    blocks = find(model, X)
    check_blocks(model, blocks)
    assert [(b.path, b.form, b.out_features) for b in blocks] == [
        ("0", "relu/b;identity/b", N),
        ("2", "identity", 4),
        ("4", "identity", 5),
        ("6", "identity/b", K),
        ("8", "gelu/b;identity/b", N),
    ]


def test_zero_weights_are_confirmed_with_others() -> None:
    model = zoo.Functional(F.gelu)
    nn.init.zeros_(model.b.weight)
    blocks = find(model, X)
    assert [block.form for block in blocks] == ["gelu/b;identity/b"]
    assert not model.b.weight.any()


SMALL: dict[str, Any] = {
    "gpt": GptConfig(vocab=50, context=16, width=24, layers=2, heads=2, tokens=6),
    "llama": LlamaConfig(vocab=50, context=16, width=24, hidden=40, layers=2, heads=3, kv_heads=1,
                         tokens=6),
    "bert": BertConfig(vocab=50, context=16, width=24, hidden=40, layers=2, heads=2, tokens=6),
    "vit": VitConfig(size=16, patch=8, width=24, layers=2, heads=2, classes=7),
    "dlrm": DlrmConfig(features=5, bottom=(9,), top=(11, 8), tables=3, rows=20, width=6, batch=4),
    "policy": PolicyConfig(observation=6, hidden=(9, 8), actions=3),
    "mixer": MixerConfig(size=16, patch=8, width=12, token_hidden=7, channel_hidden=20, layers=2,
                         classes=5),
}  # fmt: skip
EXPECTED: dict[str, dict[str, str]] = {
    "gpt": {"layers.*.attention.qkv": "identity/b", "layers.*.attention.out": "identity/b",
            "layers.*.mlp": "gelu_tanh/b;identity/b", "head": "identity"},
    "llama": {"layers.*.attention.q_proj": "identity", "layers.*.attention.k_proj": "identity",
              "layers.*.attention.v_proj": "identity", "layers.*.attention.o_proj": "identity",
              "layers.*.mlp": "silu/separate;identity", "head": "identity"},
    "bert": {"layers.*.attention.query": "identity/b", "layers.*.attention.key": "identity/b",
             "layers.*.attention.value": "identity/b",
             "layers.*.attention_output.dense": "identity/b", "layers.*.intermediate": "gelu/b",
             "layers.*.output.dense": "identity/b"},
    "vit": {"embedding": "identity/b", "layers.*.attention.qkv": "identity/b",
            "layers.*.attention.out": "identity/b", "layers.*.mlp": "gelu/b;identity/b",
            "head": "identity/b"},
    "dlrm": {"bottom": "relu/b;relu/b", "top": "relu/b;relu/b;identity/b"},
    "policy": {"": "tanh/b;tanh/b;identity/b"},
    "mixer": {"embedding": "identity/b", "layers.*.token_mlp": "gelu/b;identity/b",
              "layers.*.channel_mlp": "gelu/b;identity/b", "head": "identity/b"},
}  # fmt: skip


@pytest.mark.parametrize("name", list(MODELS))
def test_built_in_models(name: str) -> None:
    model, inputs = MODELS[name].build(config=SMALL[name])
    forms = found(model, inputs)
    expected = {}
    for pattern, form in EXPECTED[name].items():
        for layer in range(2) if "*" in pattern else (0,):
            expected[pattern.replace("*", str(layer))] = form
    assert forms == expected


def test_a_mixer_calls_its_mlp_on_a_view() -> None:
    model, inputs = MODELS["mixer"].build(config=SMALL["mixer"])
    contiguous = {b.path: b.calls[0].contiguous for b in find(model, inputs)}
    assert contiguous["layers.0.token_mlp"] is False
    assert contiguous["layers.0.channel_mlp"] is True


def test_linears_that_share_an_input_are_a_group() -> None:
    model, inputs = MODELS["llama"].build(config=SMALL["llama"])
    groups = {b.path: b.group for b in find(model, inputs)}
    for i in (0, 1):
        at = f"layers.{i}.attention"
        assert {groups[f"{at}.{n}_proj"] for n in "qkv"} == {f"{at}#0"}
        assert groups[f"{at}.o_proj"] == groups[f"layers.{i}.mlp"] == ""


def test_linears_that_get_equal_but_different_tensors_are_no_group() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(K, N) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.a(x)
            x = x.clone()
            z = self.b(x)
            x.mul_(2)
            return y, z, self.c(x)

    assert [block.group for block in find(Twice(), X)] == ["", "", ""]


def test_deep_stacks_are_one_block() -> None:
    block = only(zoo.Loop(K, *[8] * 12, N))
    assert block.layers == 13


def test_what_a_bigger_configuration_changes_is_not_the_form() -> None:
    small = find(*MODELS["gpt"].build(config=SMALL["gpt"]))
    wide = find(*MODELS["gpt"].build(config=replace(SMALL["gpt"], width=32)))
    assert [b.form for b in small] == [b.form for b in wide]
    assert all(a.structure != b.structure for a, b in zip(small, wide, strict=True))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda x: torch.where(x > 0, x, 0.0), "gives a finite value for NaN"),  # relu keeps NaN
        (lambda x: torch.log1p(torch.exp(x)), "huge values"),  # softplus does not overflow
        (lambda x: F.relu(x).clamp(max=1e30), "neither an activation"),
    ],
)
def test_what_differs_in_kind_is_refused(act: Callable[[Tensor], Tensor], reason: str) -> None:
    blocks = find(zoo.Functional(act), X)
    assert reason in blocks.refused[0].reason
    assert [block.path for block in blocks] == ["a", "b"]


class AsksForSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, H), nn.Linear(H, N)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x.view(-1, x.size(-1)))))
        return y.view(*x.shape[:-1], N)


def test_what_a_garbage_collection_runs_is_not_part_of_a_call() -> None:
    """Finalizers and callbacks run whenever objects are made, so in any call that is watched."""
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1, 100_000, 100_000)
    try:
        (found,) = find(AsksForSizes().eval(), X)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert collections
    assert found.path == ""
    assert {domain.shapes for domain in found.valid} == {()}, "not only the sizes that were given"
