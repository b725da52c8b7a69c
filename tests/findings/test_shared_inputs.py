"""Linears that share an input, and what is known of inputs where memory has no names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.diagnosed import BYTES_A_US, Model, blocks, found, runs
from tests.support.made_profiles import tensor

from torchweld.findings.evidence import Evidence
from torchweld.profiles.accounting.time_account import account

# ---- without the names of memory ----


def nameless(width: int = 96) -> Model:
    """Two residual blocks, as a trace from a file has them."""
    made = Model()
    x = tensor(32, 64, storage=None)
    for _ in range(2):
        normed = made.run("_softmax", x, storage=None)
        h = made.linear(normed, width, storage=None)
        y = made.linear(made.run("gelu", h, storage=None), 64, storage=None)
        x = made.run("add", x, y, storage=None)
    return made


def test_a_trace_without_storages_is_joined_by_order_and_size() -> None:
    profile = nameless().build()
    assert blocks(profile) == [((1, 3), (2,)), ((6, 8), (7,))]
    finding = found(profile, "mlp-block")
    assert finding is not None
    assert any("joined by order, size and type" in line for line in finding.evidence)


def test_a_gate_is_none_where_its_input_is_not_known() -> None:
    made = Model()
    x = tensor(8, 64, storage=None)
    gate = made.run("silu", made.linear(x, 128, storage=None), storage=None)
    up = made.linear(x, 128, storage=None)
    made.linear(made.run("mul", gate, up, storage=None), 64, storage=None)
    # Whether gate and up read the same x cannot be known.
    assert blocks(made.build()) == []
    assert runs(made.build()) == [(1, 3)]
    assert found(made.build(), "shared-input") is None


def test_what_was_read_already_is_not_joined_again() -> None:
    """The first operand of the residual's sum is as large as what was made last, but older."""
    case = Evidence(profile := nameless(64).build(), account(nameless(64).build()))
    residual = case.flow.reads[4]
    assert [value.producer for value, _ in residual] == [-1, 3]
    assert runs(profile) == [(2,), (4,), (7,), (9,)]


# ---- shared inputs ----


def attention(rows: int, us: Sequence[float] = (200.0, 200.0, 200.0), width: int = 64) -> Model:
    made = Model()
    x = tensor(rows, 64)
    for name, time_us in zip("qkv", us, strict=True):
        made.linear(x, width, made.module(f"attn.{name}"), us=time_us)
    return made


def test_products_of_one_input_are_found() -> None:
    made = attention(8)
    made.run("_softmax", tensor(8, 64))
    finding = found(made.build(), "shared-input")
    assert finding is not None
    assert finding.title.startswith("3 Linears")
    # x once, three weights, three results.
    least_us = (8 * 64 + 3 * 64 * 64 + 3 * 8 * 64) * 4 / BYTES_A_US
    assert finding.saved_us == pytest.approx(600.0 - least_us - 1.0)


def test_products_of_different_inputs_share_nothing() -> None:
    made = Model()
    for _ in range(3):
        made.linear(tensor(8, 64), 64)
    assert found(made.build(), "shared-input") is None


def test_the_same_memory_written_anew_is_another_input() -> None:
    made = Model()
    x = tensor(8, 64)
    made.linear(x, 64)
    made.op("aten::mul_", 50.0, inputs=(x, tensor()))
    made.linear(x, 64)
    assert found(made.build(), "shared-input") is None


def test_products_with_another_in_between_are_not_merged() -> None:
    made = Model()
    x = tensor(8, 64)
    made.linear(x, 64)
    made.linear(tensor(8, 32), 64)
    made.linear(x, 64)
    assert found(made.build(), "shared-input") is None


def test_many_rows_have_nothing_to_share_but_starts() -> None:
    assert found(attention(512, us=(600.0, 600.0, 600.0)).build(), "shared-input") is None
    assert found(attention(64, us=(600.0, 600.0, 600.0)).build(), "shared-input") is not None
