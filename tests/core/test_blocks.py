"""Layers, forms and specs: text and data say the same, and mistakes are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.helpers import ISAS, fixed, kernel_runs, random_tensors, shapes_of
from tests.support.strategies import layer_forms

import torchweld as tw
from torchweld.core.blocks import (
    GATES,
    Layer,
    LayerForm,
    format_spec,
    parse_spec,
    split_tensors,
    with_dropout,
)
from torchweld.core.errors import BlockError
from torchweld.ops.backends import reference_backend

W, B = fixed(4, 3), fixed(4)


@given(st.lists(layer_forms(), min_size=1, max_size=5))
def test_parsing_undoes_formatting(forms: list[LayerForm]) -> None:
    assert parse_spec(format_spec(forms)) == tuple(forms)


probabilities = st.floats(0, 1, exclude_min=True, exclude_max=True)


@given(layer_forms(), probabilities)
def test_dropout_is_a_flag_with_every_digit(form: LayerForm, probability: float) -> None:
    dropping = replace(form, dropout=probability)
    assert parse_spec(str(dropping)) == (dropping,)
    assert str(dropping) == f"{form}/drop:{probability!r}"


def test_dropout_is_given_to_each_layer() -> None:
    forms = parse_spec("gelu/b;identity/b")
    assert format_spec(with_dropout(forms, (0.1, 0.0))) == "gelu/b/drop:0.1;identity/b"
    assert with_dropout(forms, ()) == forms


def test_what_is_no_probability_is_refused() -> None:
    with pytest.raises(BlockError, match=r"dropout=1\.5; allowed is 0 ≤ dropout < 1"):
        LayerForm(dropout=1.5)


@pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")
@pytest.mark.parametrize("op", ["chain", "group"])
def test_ops_for_inference_refuse_dropout(op: str) -> None:
    with pytest.raises(ValueError, match="has dropout, which torchweld::chain_training alone"):
        getattr(torch.ops.torchweld, op)(torch.randn(2, 3), [W], "gelu/drop:0.5")


@pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")
@given(st.lists(layer_forms(), min_size=1, max_size=4))
def test_the_op_reads_a_spec_as_python_does(forms: list[LayerForm]) -> None:
    """The numbers it computes are those of the forms, parameters to the last digit."""
    tensors = random_tensors([5] * (len(forms) + 1), forms, torch.float64)
    x = torch.randn(3, 5, dtype=torch.float64)
    with kernel_runs():
        y = torch.ops.torchweld.chain(x, tensors, format_spec(forms))
    torch.testing.assert_close(y, reference_backend.chain(x, tensors, forms))


@pytest.mark.parametrize(
    ("layer", "spec", "tensors"),
    [
        (Layer(W), "identity", [W]),
        (Layer(W, B), "identity/b", [W, B]),
        (Layer(W, B, "gelu"), "gelu/b", [W, B]),
        (Layer(W, activation="leaky_relu:0.2"), "leaky_relu:0.2", [W]),
        (Layer(W.t(), B, "silu", transposed=True), "silu/b/t", [W.t(), B]),
        (Layer(W, B, "silu", gated="second"), "silu/b/second", [W, B]),
        (Layer(W, activation="silu", gate=2 * W), "silu/separate", [2 * W, W]),
        (
            Layer(W, B, "silu", gate=2 * W, gate_bias=2 * B),
            "silu/b/separate",
            [2 * W, 2 * B, W, B],
        ),
    ],
)
def test_a_layer_knows_its_form_and_tensors(
    layer: Layer, spec: str, tensors: list[torch.Tensor]
) -> None:
    assert format_spec([layer.form]) == spec
    assert len(layer.tensors) == layer.form.tensors == len(tensors)
    for one, other in zip(layer.tensors, tensors, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_form_counts_its_tensors(gate: str, bias: bool) -> None:
    form = LayerForm(gate=gate, bias=bias)  # type: ignore[arg-type]
    assert form.tensors == len(shapes_of(form, 3, 4))
    assert form.weights == (2 if gate == "separate" else 1)


def test_split_gives_each_form_its_own() -> None:
    forms = parse_spec("gelu/b;silu/separate;identity")
    tensors = list(torch.arange(5.0).unbind())
    parts = split_tensors(forms, tensors)
    assert [form for form, _ in parts] == list(forms)
    assert [[int(t) for t in own] for _, own in parts] == [[0, 1], [2, 3], [4]]


def test_the_wrong_number_of_tensors_is_named() -> None:
    with pytest.raises(BlockError, match="asks for 2 tensors, 1 were given"):
        split_tensors(parse_spec("gelu/b"), [W])


@pytest.mark.parametrize("gated", ["third", "separate", "none", ""])
def test_an_unknown_gate_is_named(gated: str) -> None:
    with pytest.raises(BlockError, match=f"gated='{gated}'; allowed: 'first', 'second', 'inter"):
        Layer(W, gated=gated)  # type: ignore[arg-type]


def test_one_weight_cannot_hold_the_gate_and_have_another() -> None:
    with pytest.raises(BlockError, match="leave one of them out"):
        Layer(W, gated="first", gate=W)


@pytest.mark.parametrize(
    "layer",
    [{"bias": B, "gate": W}, {"gate": W, "gate_bias": B}, {"bias": B, "gate_bias": B}],
)
def test_biases_come_for_gate_and_up_or_for_none(layer: dict[str, torch.Tensor]) -> None:
    with pytest.raises(BlockError, match="a bias for both or for neither"):
        Layer(W, **layer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown activation ''"),
        ("gelu;", "unknown activation ''"),
        ("gelu/x", "unknown flag 'x' in a spec; there are: b t separate first"),
        ("elu:1,2,3", "takes 1 number"),
        ("gelu/drop:0", "a probability above 0 and below 1 follows drop:"),
        ("gelu/drop:1", "flag 'drop:1' in a spec"),
        ("gelu/drop:", "flag 'drop:' in a spec"),
        ("gelu/drop:0,5", "flag 'drop:0,5' in a spec"),
    ],
)
def test_both_languages_refuse_a_bad_spec_in_the_same_words(spec: str, message: str) -> None:
    with pytest.raises(BlockError, match=message):
        parse_spec(spec)
    with pytest.raises(ValueError, match=message):
        torch.ops.torchweld.chain(torch.randn(2, 3), [W], spec)


def test_no_layers_at_all() -> None:
    with pytest.raises(BlockError, match="at least one layer"):
        tw.mlp(torch.randn(2, 3), [])


def test_what_is_not_a_layer_is_named() -> None:
    with pytest.raises(BlockError, match=r"layers\[1\] is a Tensor; expected torchweld.Layer"):
        tw.mlp(torch.randn(2, 3), [Layer(W), W])  # type: ignore[list-item]


def test_errors_are_value_errors() -> None:
    assert issubclass(BlockError, tw.TorchweldError)
    assert issubclass(tw.TorchweldError, ValueError)
