"""Chains of element-wise ops and MLP blocks: structure and bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.diagnosed import BYTES_A_US, Model, blocks, found, runs
from tests.support.made_profiles import changed, tensor

from torchweld.profiles.profile import Tensor

# ---- chains ----


def test_a_chain_could_save_all_but_one_pass_over_memory() -> None:
    made = Model()
    x = tensor(1000, 1000)
    made.run("neg", made.run("abs", made.run("mul", x, us=2000.0), us=2000.0), us=2000.0)
    finding = found(made.build(), "pointwise-chain")
    assert finding is not None
    # x is read and the result written, 4 MB each, and one op is started.
    assert finding.saved_us == pytest.approx(6000.0 - 8e6 / BYTES_A_US - 1.0)
    assert "16.0 MB per step move between them" in finding.evidence[1]


def test_bytes_a_step_are_those_of_one_step() -> None:
    made = Model()
    for _ in range(2):
        x = tensor(1000, 1000)
        made.run("neg", made.run("abs", made.run("mul", x, us=2000.0), us=2000.0), us=2000.0)
    profile = made.build()
    two_steps = replace(profile, about=replace(profile.about, steps=2))
    finding = found(two_steps, "pointwise-chain")
    assert finding is not None
    assert "16.0 MB per step move between them" in finding.evidence[1]


def test_single_ops_between_products_are_no_chain() -> None:
    made = Model()
    x = made.run("relu", made.linear(tensor(100, 100), 100))
    made.run("relu", made.linear(x, 100))
    profile = made.build()
    assert runs(profile) == [(1,), (3,)]
    assert found(profile, "pointwise-chain") is None


def test_what_others_read_is_not_claimed() -> None:
    """A result in the middle of a chain that a softmax reads as well has to be written."""

    def saved_us(also_read: bool) -> float:
        made = Model()
        middle = made.run("abs", tensor(1000, 1000), us=2000.0)
        made.run("neg", middle, us=2000.0)
        made.run("_softmax", middle if also_read else tensor(1000, 1000), us=2000.0)
        finding = found(made.build(), "pointwise-chain")
        assert finding is not None
        return finding.saved_us

    assert saved_us(False) - saved_us(True) == pytest.approx(4e6 / BYTES_A_US)


def test_an_input_that_two_ops_of_a_chain_read_has_to_be_read_once() -> None:
    made = Model()
    x = tensor(1000, 1000)
    made.run("mul", x, made.run("sigmoid", x, us=3000.0), us=3000.0)
    finding = found(made.build(), "pointwise-chain")
    assert finding is not None
    assert finding.saved_us == pytest.approx(6000.0 - 8e6 / BYTES_A_US - 1.0)


def test_a_chain_does_not_reach_around_a_product() -> None:
    """relu → product → add, where the add also reads the relu: the product has to come between."""
    made = Model()
    x = made.run("relu", tensor(100, 100))
    made.run("add", x, made.linear(x, 100))
    assert runs(made.build()) == [(0,), (2,)]


def test_ops_in_place_are_a_chain_too() -> None:
    made = Model()
    x = tensor(100, 100)
    y = made.run("abs", x)
    for _ in range(2):
        made.op("aten::mul_", 100.0, inputs=(y, tensor()))
    assert runs(made.build()) == [(0, 1, 2)]


def test_ops_over_other_elements_do_not_join() -> None:
    made = Model()
    row = made.run("abs", tensor(100))
    made.run("add", tensor(1000, 100), row)
    assert runs(made.build()) == [(0,), (1,)]


def test_forward_and_backward_are_not_one_chain() -> None:
    made = Model()
    y = made.run("abs", tensor(100, 100))
    made.run("mul", y, tensor(100, 100), phase="backward")
    assert runs(made.build()) == [(0,), (1,)]


def test_the_backward_of_a_chain_goes_with_it() -> None:
    made = Model()
    x = tensor(1000, 1000)
    y = made.run("abs", x, us=2000.0)
    made.run("exp", y, us=2000.0)
    made.op("ExpBackward0", 50.0, phase="backward")
    inputs = (tensor(1000, 1000), y)
    made.op("aten::mul", 2000.0, inputs=inputs, makes=4_000_000, parent=2, phase="backward")
    made.ops[1] = changed(made.ops[1], sequence=7)
    without = found(made.build(training=True), "pointwise-chain")
    made.ops[2] = changed(made.ops[2], sequence=7)
    joined = found(made.build(training=True), "pointwise-chain")
    assert without is not None
    assert joined is not None
    assert without.saved_us == pytest.approx(4000.0 - 3 * 4e6 / BYTES_A_US - 1.0)
    # y, which the backward read, need not be written for it; its gradients have to be moved.
    assert joined.saved_us == pytest.approx(6050.0 - 4 * 4e6 / BYTES_A_US - 2 * 1.0)


def test_the_mask_of_a_dropout_is_part_of_the_chain() -> None:
    made = Model()
    hidden = made.run("gelu", made.linear(tensor(64, 64), 64))
    mask = tensor(64, 64)
    made.op("aten::bernoulli_", 100.0, inputs=(mask,))
    made.op("aten::div_", 100.0, inputs=(mask, tensor()))
    made.run("mul", hidden, mask)
    assert runs(made.build()) == [(1, 2, 3, 4)]


# ---- blocks ----


def mlp(made: Model, x: Tensor, path: str = "", hidden: int = 256, **options: object) -> Tensor:
    names = [f"{path}.{name}" if path else name for name in ("fc1", "act", "fc2")]
    parent = made.module(path, "MLP") if path else 0
    assert parent >= 0
    fc1, act, fc2 = (made.module(name) for name in names)
    h = made.linear(x, hidden, fc1, **options)
    a = made.run("gelu", h, module=act, storage=options.get("storage", -1))  # type: ignore[arg-type]
    return made.linear(a, x.shape[-1], fc2, **options)


def test_blocks_of_many_layers_are_one_finding() -> None:
    made = Model()
    x = tensor(8, 64)
    for i in range(3):
        made.module(f"layers.{i}", "Layer")
        y = mlp(made, made.run("_softmax", x), f"layers.{i}.mlp")
        x = made.run("add", x, y)
    finding = found(made.build(), "mlp-block")
    assert finding is not None
    assert finding.title == "3 MLP blocks as separate ops"
    assert finding.modules == ("layers.*.mlp",)
    assert any("3 × (8 × 64 → 256 → 64, gelu, float32)" in line for line in finding.evidence)


def test_a_gate_is_two_products_of_one_input() -> None:
    made = Model()
    x = tensor(8, 64)
    gate = made.run("silu", made.linear(x, 128))
    made.linear(made.run("mul", gate, made.linear(x, 128)), 64)
    profile = made.build()
    assert blocks(profile) == [((0, 2, 4), (1, 3))]
    finding = found(profile, "mlp-block")
    assert finding is not None
    assert finding.title == "1 gated MLP block as separate ops"
    assert any("8 × 64 → 128 → 64, gated, silu mul" in line for line in finding.evidence)


def test_a_packed_gate_is_found() -> None:
    """One product makes both halves, which are views of its result."""
    made = Model()
    both = made.linear(tensor(8, 64), 256)
    half = tensor(8, 128, storage=both.storage, strides=(256, 1))
    act = made.run("silu", half, shape=(8, 128))
    made.linear(made.run("mul", act, half), 64)
    assert blocks(made.build()) == [((0, 3), (1, 2))]


def test_three_layers_are_one_chain() -> None:
    made = Model()
    x = made.run("relu", made.linear(tensor(8, 16), 32))
    made.linear(made.run("relu", made.linear(x, 32)), 1)
    assert blocks(made.build()) == [((0, 2, 4), (1, 3))]


@pytest.mark.parametrize("between", ["_softmax", "native_layer_norm", "sum"])
def test_a_norm_between_the_linears_is_no_block(between: str) -> None:
    made = Model()
    h = made.run(between, made.run("gelu", made.linear(tensor(8, 64), 64)))
    made.linear(h, 64)
    profile = made.build()
    assert blocks(profile) == []
    assert found(profile, "mlp-block") is None


def test_a_residual_between_the_linears_is_no_block() -> None:
    made = Model()
    x = tensor(8, 64)
    made.linear(made.run("gelu", made.run("add", x, made.linear(x, 64))), 64)
    assert blocks(made.build()) == []


def test_products_of_different_inputs_do_not_make_a_gate() -> None:
    made = Model()
    one, other = made.linear(tensor(8, 64), 64), made.linear(tensor(8, 64), 64)
    made.linear(made.run("mul", one, other), 64)
    assert blocks(made.build()) == []


def test_rows_that_are_mixed_between_the_linears_end_a_block() -> None:
    """A reshape puts several rows of the hidden values into one."""
    made = Model()
    hidden = made.run("gelu", made.linear(tensor(32, 64), 16))
    made.linear(tensor(8, 64, storage=hidden.storage), 64)
    assert blocks(made.build()) == []


def test_hidden_values_that_someone_else_reads_end_a_block() -> None:
    made = Model()
    hidden = made.run("gelu", made.linear(tensor(8, 64), 64))
    made.linear(hidden, 64)
    made.run("_softmax", hidden)
    assert blocks(made.build()) == []


def test_activations_as_weights_are_no_block() -> None:
    """The result of the activation is the right factor: no Linear reads it."""
    made = Model()
    hidden = made.run("gelu", made.linear(tensor(64, 64), 64))
    made.run("mm", tensor(64, 64), hidden)
    assert blocks(made.build()) == []


def test_the_backward_of_a_block_is_claimed_and_adding_gradients_up_is_not() -> None:
    def saved_us(backward_us: float, accumulating_us: float, joined: bool) -> float:
        made = Model()
        mlp(made, tensor(8, 64))
        made.ops[0] = changed(made.ops[0], sequence=3)
        sequence = 3 if joined else 99
        node = made.op("MmBackward0", 0.0, phase="backward", sequence=sequence)
        made.op(
            "aten::mm",
            backward_us,
            inputs=(tensor(64, 8), tensor(8, 256)),
            makes=65536,
            parent=node,
            phase="backward",
        )
        made.op("torch::autograd::AccumulateGrad", accumulating_us, phase="backward")
        finding = found(made.build(training=True), "mlp-block")
        assert finding is not None
        return finding.saved_us

    base = saved_us(100.0, 0.0, joined=True)
    assert saved_us(300.0, 0.0, joined=True) == pytest.approx(base + 200.0)
    assert saved_us(100.0, 500.0, joined=True) == pytest.approx(base)
    assert saved_us(100.0, 0.0, joined=False) < base
    assert saved_us(300.0, 0.0, joined=False) == pytest.approx(saved_us(100.0, 0.0, joined=False))


def test_what_a_checkpoint_computes_again_in_a_backward_node_is_not_its_backward() -> None:
    def saved_us(norm_us: float) -> float:
        made = Model()
        mlp(made, tensor(8, 64))
        made.ops[2] = changed(made.ops[2], sequence=3)
        node = made.op("MmBackward0", 5.0, phase="backward", sequence=3)
        made.op("aten::_softmax", norm_us, inputs=(tensor(8, 64),), parent=node, phase="recompute")
        finding = found(made.build(training=True), "mlp-block")
        assert finding is not None
        return finding.saved_us

    assert saved_us(500.0) == pytest.approx(saved_us(50.0))


def test_python_of_a_module_that_does_more_is_not_claimed() -> None:
    """A model with a slow loop around one small block does not promise to lose its loop."""

    def saved_us(python_us: float, more: bool) -> float:
        made = Model()
        outer = made.module("outer", python_us=python_us)
        assert outer > 0
        mlp(made, tensor(8, 64), "outer.mlp")
        if more:
            made.run("_softmax", tensor(8, 64), module=outer)
        finding = found(made.build(), "mlp-block")
        assert finding is not None
        return finding.saved_us

    assert saved_us(1000.0, more=True) == pytest.approx(saved_us(0.0, more=True))
    assert saved_us(1000.0, more=False) > 900.0


def test_what_replaces_a_module_is_called_as_well() -> None:
    """One call of the outermost module stays, as long as the cheapest in the profile."""

    def saved_us(outer_us: float, inner_us: float, fused_call_us: float | None = None) -> float:
        made = Model()
        made.module("block", python_us=outer_us)
        fc1, act, fc2 = (made.module(f"block.{n}", python_us=inner_us) for n in ("a", "b", "c"))
        h = made.run("gelu", made.linear(tensor(8, 64), 64, fc1), module=act)
        made.linear(h, 64, fc2)
        made.run("_softmax", tensor(8, 64))
        profile = made.build()
        if fused_call_us is not None:
            profile = replace(profile, fused_call_us=fused_call_us)
        finding = found(profile, "mlp-block")
        assert finding is not None
        return finding.saved_us

    base = saved_us(0.0, 0.0)
    assert saved_us(10.0, 4.0) == pytest.approx(base + 3 * 4.0 + 10.0 - 4.0)
    assert saved_us(10.0, 4.0, fused_call_us=1.0) == saved_us(10.0, 4.0)
    # A fused block that is known to cost more than that.
    assert saved_us(10.0, 4.0, fused_call_us=7.0) == pytest.approx(base + 3 * 4.0 + 10.0 - 7.0)
    assert saved_us(3.0, 4.0) == pytest.approx(base + 3 * 4.0)


def test_python_between_two_ops_of_a_block_is_claimed_as_far_as_it_was_seen() -> None:
    def saved_us(pause_us: float, python_us: float) -> float:
        made = Model()
        made.places[0].python_us = python_us
        made.linear(made.run("gelu", made.linear(tensor(8, 64), 64)), 64)
        made.run("_softmax", tensor(8, 64))
        for i, start_us in enumerate((0.0, 100.0 + pause_us, 200.0 + pause_us, 900.0)):
            made.starts[i] = start_us
        finding = found(made.build(), "mlp-block")
        assert finding is not None
        return finding.saved_us

    assert saved_us(30.0, 200.0) == pytest.approx(saved_us(0.0, 200.0) + 30.0)
    assert saved_us(30.0, 20.0) == pytest.approx(saved_us(0.0, 20.0) + 20.0)
