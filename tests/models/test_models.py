"""The built-in models compute what their names say, the same every time, on any torch path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Inputs
from torchweld.models import DEMO, MODELS, seeded
from torchweld.models.bert import Bert, BertConfig
from torchweld.models.dlrm import Dlrm, DlrmConfig
from torchweld.models.gpt import GptConfig
from torchweld.models.llama import LlamaConfig
from torchweld.models.mixer import MixerConfig
from torchweld.models.model_layers import to_patches
from torchweld.models.policy import PolicyConfig
from torchweld.models.vit import VitConfig

# Odd sizes, small enough for a test.
SMALL: dict[str, Any] = {
    "gpt": GptConfig(vocab=97, context=20, width=24, layers=2, heads=3, batch=2, tokens=9),
    "llama": LlamaConfig(
        vocab=89,
        context=16,
        width=24,
        hidden=41,
        layers=2,
        heads=6,
        kv_heads=2,
        batch=2,
        tokens=7,
    ),
    "bert": BertConfig(
        vocab=83, context=15, width=24, hidden=37, layers=2, heads=4, batch=3, tokens=8
    ),
    "vit": VitConfig(size=12, patch=4, width=18, layers=2, heads=3, classes=5, batch=2),
    "dlrm": DlrmConfig(
        features=3, bottom=(11,), top=(9, 7), tables=4, rows=6, bag=3, width=5, batch=19
    ),
    "policy": PolicyConfig(observation=7, hidden=(11, 5), actions=3, batch=4),
    "mixer": MixerConfig(
        size=12, patch=4, width=10, token_hidden=7, channel_hidden=13, layers=2, classes=5, batch=2
    ),
}
OUTPUT_SHAPES = {
    "gpt": (2, 9, 97),
    "llama": (2, 7, 89),
    "bert": (3, 24),
    "vit": (2, 5),
    "dlrm": (19,),
    "policy": (4, 3),
    "mixer": (2, 5),
}
ALL = list(MODELS)


def small(name: str, seed: int = 0) -> tuple[nn.Module, Inputs]:
    return MODELS[name].build(seed, SMALL[name])


# ---- all of them ----


def test_every_model_is_tested_and_the_demo_is_one() -> None:
    assert set(SMALL) == set(OUTPUT_SHAPES) == set(MODELS)
    assert DEMO in MODELS
    assert [builtin.name for builtin in MODELS.values()] == ALL


@pytest.mark.parametrize("name", ALL)
def test_default_model_runs_on_its_own_inputs(name: str) -> None:
    model, inputs = MODELS[name].build()
    assert not model.training
    with torch.no_grad():
        y = inputs.call(model)
    assert y.isfinite().all()
    assert y.std() > 0


@pytest.mark.parametrize("name", ALL)
def test_descriptions_are_one_line_and_follow_the_configuration(name: str) -> None:
    builtin = MODELS[name]
    assert len(f"{name}  {builtin.description}") <= 100
    assert "{" not in builtin.description
    other = replace(builtin, config=SMALL[name])
    assert other.description != builtin.description


@pytest.mark.parametrize("name", ALL)
def test_output_shapes(name: str) -> None:
    model, inputs = small(name)
    assert inputs.call(model).shape == OUTPUT_SHAPES[name]


@pytest.mark.parametrize("name", ALL)
def test_gradients_reach_every_parameter(name: str) -> None:
    model, inputs = small(name)
    y = inputs.call(model.train())
    (y * torch.randn(y.shape)).sum().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


@pytest.mark.parametrize("name", ALL)
def test_same_seed_same_model_and_the_global_state_is_untouched(name: str) -> None:
    before = torch.get_rng_state()
    first, x = small(name, seed=3)
    second, y = small(name, seed=3)
    other, z = small(name, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(x.tensors(), y.tensors(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(x.tensors()[0], z.tensors()[0])
    changed = [
        not torch.equal(a, b)
        for a, b in zip(first.parameters(), other.parameters(), strict=True)
        if a.dim() > 1
    ]
    assert all(changed)


@pytest.mark.parametrize("name", ALL)
def test_the_model_does_not_depend_on_what_was_drawn_before(name: str) -> None:
    torch.manual_seed(11)
    first, x = small(name)
    torch.manual_seed(12)
    second, y = small(name)
    assert torch.equal(x.call(first), y.call(second))


@pytest.mark.parametrize("name", ALL)
def test_state_dict_round_trip(name: str) -> None:
    model, inputs = small(name, seed=1)
    other, _ = small(name, seed=2)
    assert not torch.equal(inputs.call(model), inputs.call(other))
    other.load_state_dict(model.state_dict())
    assert torch.equal(inputs.call(model), inputs.call(other))


@pytest.mark.parametrize("name", ALL)
def test_training_and_gradient_mode_do_not_change_the_result_without_dropout(name: str) -> None:
    model, inputs = small(name)
    with torch.no_grad():
        plain = inputs.call(model)
    with torch.inference_mode():
        assert torch.equal(inputs.call(model), plain)
    torch.testing.assert_close(inputs.call(model.train()), plain)


@pytest.mark.parametrize("name", ["gpt", "bert", "vit"])
def test_dropout_acts_in_training_only(name: str) -> None:
    model, inputs = MODELS[name].build(config=replace(SMALL[name], dropout=0.5))
    assert torch.equal(inputs.call(model), inputs.call(model))
    model.train()
    assert not torch.equal(inputs.call(model), inputs.call(model))


@pytest.mark.parametrize("name", ALL)
def test_rows_of_a_batch_do_not_see_each_other(name: str) -> None:
    model, inputs = small(name)
    together = inputs.call(model)
    alone = Inputs(
        *(t[:1] for t in inputs.args), **{key: t[:1] for key, t in inputs.kwargs.items()}
    )
    torch.testing.assert_close(alone.call(model), together[:1])


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_stays_close(name: str) -> None:
    model, inputs = small(name)
    wide = inputs.call(model)
    half = Inputs(
        *(t.bfloat16() if t.is_floating_point() else t for t in inputs.args), **inputs.kwargs
    )
    narrow = half.call(model.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - wide).norm() < 0.1 * wide.norm()


def test_another_models_configuration_is_refused() -> None:
    with pytest.raises(TorchweldError, match="'gpt' has a GptConfig, not a BertConfig"):
        MODELS["gpt"].build(config=BertConfig())


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (GptConfig, {"heads": 7}),
        (LlamaConfig, {"kv_heads": 3}),
        (LlamaConfig, {"width": 24, "heads": 8}),
        (BertConfig, {"heads": 5}),
        (VitConfig, {"patch": 15}),
        (MixerConfig, {"patch": 0}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: type, fields: dict[str, int]) -> None:
    with pytest.raises(TorchweldError, match="is not a multiple of"):
        config(**fields)


def test_seeded_restores_the_state_after_an_error() -> None:
    before = torch.get_rng_state()

    def fails() -> None:
        with seeded(5):
            torch.randn(3)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(torch.get_rng_state(), before)


# ---- encoders ----


def test_sentence_embeddings_have_unit_length() -> None:
    model, inputs = small("bert")
    torch.testing.assert_close(inputs.call(model).norm(dim=-1), torch.ones(3))


def test_padding_does_not_change_a_sentence() -> None:
    model, _ = small("bert")
    ids = torch.randint(1, 80, (1, 5))
    padded = torch.cat((ids, torch.randint(1, 80, (1, 4))), dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 4])
    torch.testing.assert_close(model(padded, mask), model(ids))
    assert not torch.allclose(model(padded), model(ids))


def test_example_sentences_have_different_lengths() -> None:
    _, inputs = MODELS["bert"].build()
    lengths = inputs.kwargs["attention_mask"].sum(dim=1).tolist()
    assert len(set(lengths)) == len(lengths)
    assert (inputs.kwargs["input_ids"].ne(0).sum(dim=1) == torch.tensor(lengths)).all()


def test_bert_reads_in_both_directions() -> None:
    model, _ = small("bert")
    assert isinstance(model, Bert)
    x = torch.randn(1, 6, 24)
    y = x.clone()
    y[:, 5] += 1
    layer = model.layers[0]
    assert not torch.allclose(layer(x, None)[:, 0], layer(y, None)[:, 0])


# ---- images ----


def test_patches_are_the_squares_of_the_image() -> None:
    images = torch.randn(2, 3, 8, 12)
    patches = to_patches(images, 4)
    assert patches.shape == (2, 6, 48)
    assert torch.equal(patches[1, 4], images[1, :, 4:8, 4:8].flatten())


def test_a_linear_over_patches_is_a_strided_convolution() -> None:
    images = torch.randn(1, 3, 12, 12)
    linear = nn.Linear(48, 5)
    conv = nn.functional.conv2d(images, linear.weight.view(5, 3, 4, 4), linear.bias, stride=4)
    y = linear(to_patches(images, 4)).transpose(1, 2).reshape(1, 5, 3, 3)
    torch.testing.assert_close(y, conv)


@pytest.mark.parametrize("name", ["vit", "mixer"])
def test_every_patch_matters(name: str) -> None:
    model, inputs = small(name)
    (images,) = inputs.args
    images = images[:1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(images)[0, 0], images)
    assert to_patches(gradient, 4).abs().sum(dim=-1).all()


def test_mixer_runs_its_first_mlp_on_a_transposed_view() -> None:
    model, inputs = small("mixer")
    seen: list[bool] = []
    model.get_submodule("layers.0.token_mlp").register_forward_pre_hook(
        lambda _, args: seen.append(args[0].is_contiguous())
    )
    inputs.call(model)
    assert seen == [False]


# ---- recommender ----


def test_dlrm_against_one_row_at_a_time() -> None:
    model, inputs = small("dlrm")
    assert isinstance(model, Dlrm)
    dense, categories = inputs.args
    expected = []
    for row, chosen in zip(dense, categories, strict=True):
        x = model.bottom(row)
        weights = [table.weight for table in model.tables if isinstance(table, nn.EmbeddingBag)]
        tables = [w[ids].sum(dim=0) for w, ids in zip(weights, chosen, strict=True)]
        vectors = [x, *tables]
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        expected.append(model.top(torch.cat((x, torch.stack(products)))))
    torch.testing.assert_close(model(dense, categories), torch.cat(expected))
