"""What is typed becomes a grid of cases, or an error that helps."""

from __future__ import annotations

import pytest

from torchweld.bench.bench_cases import MlpShape
from torchweld.bench.bench_grid import (
    BLOCKS,
    cases_of,
    demo_cases,
    listed,
    mlp_of,
    mlps_of,
    parse_dtype,
    parse_rows,
    parse_sizes,
)
from torchweld.bench.bench_presets import PRESETS, preset_named
from torchweld.core.activations import ACTIVATIONS
from torchweld.core.errors import TorchweldError


def test_lists_have_commas_or_are_repeated_and_name_each_once() -> None:
    assert listed("--rows", ["1,8", "64", "8"]) == ["1", "8", "64"]
    assert listed("--rows", []) == []


def test_numbers_of_an_activation_stay_with_it() -> None:
    assert listed("--block", ["gelu,softplus:2,20,relu"]) == ["gelu", "softplus:2,20", "relu"]
    (mlp,) = mlps_of(["softplus:2,20"], ["8x16"])
    assert mlp.activation == "softplus:2,20"


def test_an_option_without_a_value_is_an_empty_grid() -> None:
    with pytest.raises(TorchweldError, match=r"--rows ', ' names nothing, and the grid is empty"):
        listed("--rows", [", "])


def test_sizes_are_in_by_hidden_or_all_of_them() -> None:
    assert parse_sizes("8x16x4") == parse_sizes("8→16→4") == (8, 16, 4)
    assert mlp_of("gelu", (8, 16)).sizes == (8, 16, 8)
    assert mlp_of("gelu", (8, 16, 4)).sizes == (8, 16, 4)
    assert mlp_of("relu", (8, 16, 16, 4)).sizes == (8, 16, 16, 4)
    assert mlp_of("linear", (8, 16)).sizes == (8, 16)
    for text in ("", "8", "8xa", "8.5x2", "8x-2", "8,16"):
        with pytest.raises(TorchweldError, match="such as 768x3072"):
            parse_sizes(text)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("linear", (8, 16, 8), "linear, which has two: in x out"),
        ("swiglu", (8, 16, 16, 8), "exactly three"),
        ("gelu", (8, 0), "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_their_kind(kind: str, sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        mlp_of(kind, sizes)


@pytest.mark.parametrize(
    ("name", "kind"), [("geglu", "gelu-gated"), ("swiglu", "silu-gated"), ("reglu", "relu-gated")]
)
def test_usual_names_are_gated_forms(name: str, kind: str) -> None:
    mlp = mlp_of(name, (8, 16))
    assert mlp == mlp_of(kind, (8, 16))
    assert (mlp.gated, mlp.bias, mlp.kind_text) == (True, False, kind)


def test_every_activation_is_a_kind_plain_and_gated() -> None:
    plain = mlps_of([name for name in ACTIVATIONS if name != "identity"], ["8x16"])
    gated = mlps_of([f"{name}-gated" for name in ACTIVATIONS], ["8x16"])
    assert len(plain) == len(ACTIVATIONS) - 1
    assert all(mlp.gated for mlp in gated)


def test_rows_may_be_batch_by_sequence() -> None:
    assert (parse_rows("64"), parse_rows("8x128")) == ((64,), (8, 128))
    for text in ("0", "8x0", "-1", "a", "8x", "1.5"):
        with pytest.raises(TorchweldError, match="such as 64, or batch x sequence"):
            parse_rows(text)


def test_dtypes_have_long_and_short_names() -> None:
    assert parse_dtype("bf16") == parse_dtype("bfloat16") == "bfloat16"
    with pytest.raises(TorchweldError, match=r"'fp23'; did you mean 'fp32'\?"):
        parse_dtype("fp23")


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["gleu"], r"unknown block 'gleu'; did you mean 'g.*elu'\?"),
        (["tinny"], r"did you mean 'tiny'\?"),
        (["swigl"], r"did you mean 'swiglu'\?"),
        (["sofplus:1"], r"did you mean 'softplus'\?"),
        (["gelu:3"], "gelu takes 0"),
    ],
)
def test_unknown_kinds_are_named_with_the_nearest(kinds: list[str], message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        mlps_of(kinds, ["8x16"])


def test_every_combination_is_a_case_and_rows_go_fastest() -> None:
    cases = cases_of(["gelu", "linear"], ["8x16", "8x32"], ["1", "2x3"], ["fp32", "bf16"])
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 * 2
    assert [str(case) for case in cases[:3]] == [
        "1 × 8→16→8 gelu fp32",
        "2×3 × 8→16→8 gelu fp32",
        "1 × 8→16→8 gelu bf16",
    ]
    assert cases[1].rows == 6


def test_built_in_blocks_have_their_own_sizes() -> None:
    assert mlps_of(["tiny", "gelu"], ["8x16"]) == [BLOCKS["tiny"], MlpShape(sizes=(8, 16, 8))]
    with pytest.raises(TorchweldError, match="--sizes 8x16 goes with kinds of blocks, and tiny"):
        mlps_of(["tiny"], ["8x16"])


def test_the_demo_goes_from_small_to_large_in_two_dtypes() -> None:
    cases = cases_of([], [], [], [])
    assert cases == demo_cases()
    assert {case.dtype for case in cases} == {"float32", "bfloat16"}
    assert {case.rows for case in cases} == {1, 8, 64}
    assert len(cases) == len(set(cases)) <= 20
    demo_blocks = {case.mlp for case in cases}
    assert {case.mlp for case in cases_of([], [], ["3"], [])} == demo_blocks


def test_the_walk_through_is_a_linear_an_mlp_and_a_gated_one_over_batch_and_sequence() -> None:
    cases = PRESETS["blog"].cases
    kinds = list(dict.fromkeys(case.mlp.kind_text for case in cases))
    assert kinds == ["linear", "gelu", "gelu-gated"]
    assert {case.mlp.sizes[:2] for case in cases} == {(768, 3072)}
    assert all(len(case.lead) == 2 for case in cases)


def test_models_have_a_row_for_each_well_known_one() -> None:
    labels = {case.label for case in PRESETS["models"].cases}
    for model in ("BERT-base", "GPT-2", "ViT-B/16", "Llama-like 1B", "Llama-like 7B"):
        assert model in labels
    assert {"Mixtral expert", "DLRM top", "RL policy"} <= labels


def test_rows_and_dtypes_take_the_place_of_a_presets_own() -> None:
    cases = PRESETS["models"].cases_of(["2"], ["fp16"])
    assert len(cases) == len(PRESETS["models"].rows)
    assert {(case.rows, case.dtype) for case in cases} == {(2, "float16")}
    with pytest.raises(TorchweldError, match=r"unknown preset 'blok'; did you mean 'blog'\?"):
        preset_named("blok")


def test_work_counts_gate_up_and_down_and_what_has_to_move() -> None:
    (gated,) = cases_of(["swiglu"], ["8x16"], ["3"], ["bf16"])
    assert gated.mlp.flops(3) == 2 * 3 * 3 * 8 * 16
    assert gated.moved_bytes == 2 * (3 * 8 * 16 + 3 * (8 + 8))
