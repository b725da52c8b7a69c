"""A table of known speeds says "faster" only where measured blocks all around were."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from torchweld.core.blocks import parse_spec
from torchweld.core.errors import BlockError, TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.plans.known_speeds import (
    LEAST_GAIN,
    TABLES,
    KnownSpeed,
    SpeedCell,
    SpeedTable,
    load_table,
    table_text,
)

ROWS = (1, 4, 16, 64)
WIDTHS = (64, 256, 1024)


def cell(
    sizes: tuple[int, ...], rows: int = 1, kind: str = "linear", low: float = 2.0, **changes: Any
) -> SpeedCell:
    given: dict[str, Any] = {
        "dtype": "float32",
        "way": "packed",
        "verdict": "faster",
        "speedup": low + 0.1,
        "interval": (low, low + 0.2),
    }
    return SpeedCell(kind=kind, sizes=sizes, rows=rows, **{**given, **changes})


UNMEASURED: dict[str, Any] = {
    "verdict": "not measured",
    "speedup": NotMeasured("too noisy"),
    "interval": None,
}


def made(cells: Sequence[SpeedCell], **changes: Any) -> SpeedTable:
    given: dict[str, Any] = {
        "isa": "avx512",
        "cpu": "AMD EPYC",
        "torch": "2.13.0",
        "threads": 2,
        "command": "torchweld bench --table avx512.json",
        "date": "2026-11-17",
    }
    return SpeedTable(cells=tuple(cells), **{**given, **changes})


def grid() -> SpeedTable:
    """Linears, MLPs, gated MLPs and chains, faster everywhere."""
    cells = [cell((K, N), rows) for K, N, rows in product(WIDTHS, WIDTHS, ROWS)]
    for w, rows in product(WIDTHS, ROWS):
        cells += [cell((w, 4 * w, w), rows, kind) for kind in ("relu", "gelu", "silu-gated")]
        cells += [cell((w,) * n, rows, kind) for kind in ("relu", "gelu") for n in (4, 7)]
    return made(cells)


def with_cell(table: SpeedTable, name: str, **changes: Any) -> SpeedTable:
    assert name in [one.name for one in table.cells]
    cells = [replace(one, **changes) if one.name == name else one for one in table.cells]
    return replace(table, cells=tuple(cells))


def shapes_of(form: str, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for layer, K, N in zip(parse_spec(form), sizes, sizes[1:], strict=False):
        wide = 2 * N if layer.gate not in ("none", "separate") else N
        for _ in range(layer.weights):
            found.append((K, wide) if layer.transposed else (wide, K))
            found += [(wide,)] * layer.bias
    return found


def known(
    table: SpeedTable,
    form: str,
    sizes: Sequence[int],
    rows: int = 4,
    dtype: str = "float32",
    packed: bool = True,
    training: bool = False,
) -> KnownSpeed | NotMeasured:
    shapes = shapes_of(form, sizes)
    return table.known(form, shapes, dtype, rows, packed, training=training)


def is_faster(found: KnownSpeed | NotMeasured) -> bool:
    return isinstance(found, KnownSpeed) and found.verdict == "faster"


MLP = "gelu/b;identity/b"


# ---- the rule ----


@pytest.mark.parametrize(
    ("form", "sizes", "rows"),
    [
        ("identity/b", (64, 256), 1),  # measured itself
        ("identity", (768, 768), 5),  # between four in width and two in rows
        ("gelu/b", (768, 768), 5),  # what comes behind the last layer adds to the gain
        (MLP, (256, 1024, 256), 64),
        (MLP, (300, 1500, 257), 7),
        ("relu;identity", (64, 256, 64), 1),
        ("silu/b;identity/b", (100, 400, 100), 2),  # by relu and gelu
        ("leaky_relu:0.2/b;gelu/b", (100, 400, 100), 2),
        ("silu/separate;identity", (256, 1024, 256), 4),
        ("silu/first;identity", (256, 1024, 256), 4),
        ("silu/interleaved/b;identity/b", (200, 1000, 200), 4),
        ("gelu_tanh/second;identity", (256, 1024, 256), 4),  # as silu
        ("relu/b;relu/b;identity/b", (17, 128, 128, 6), 1),
        ("tanh/b;relu/b;tanh/b;identity", (70, 256, 256, 64, 2), 33),
    ],
)
def test_a_block_among_faster_ones_is_faster(form: str, sizes: tuple[int, ...], rows: int) -> None:
    found = known(grid(), form, sizes, rows)
    assert is_faster(found), found
    assert isinstance(found, KnownSpeed)
    assert found.speedup == 2.0
    assert "at least 2.00 times the original's speed, by " in found.words


@pytest.mark.parametrize(
    ("form", "sizes", "rows"),
    [
        ("identity/b", (64, 256), 65),  # more rows than any
        ("identity/b", (63, 256), 4),
        ("identity/b", (256, 1025), 4),
        (MLP, (1024, 8192, 1024), 4),
        (MLP, (768, 64, 768), 4),  # a bottleneck: none is narrower inside
        ("relu;relu;identity", (16, 16, 16, 16), 1),
        ("relu;" * 7 + "identity", (64,) * 9, 1),  # more layers than any
        ("identity/b/t", (64, 256), 1),
        ("gelu/b/t;identity/b/t", (256, 1024, 256), 4),
        ("gelu/b/t;identity/b", (256, 1024, 256), 4),
        ("identity;identity", (256, 1024, 256), 4),  # no activation to gain by
        ("silu/separate", (256, 1024), 4),
        ("silu;silu/separate;identity", (256, 256, 1024, 256), 4),
        ("relu/separate;identity", (256, 1024, 256), 4),  # cheaper than silu
        ("identity/separate;identity", (256, 1024, 256), 4),
    ],
)
def test_what_nothing_measured_surrounds_is_not_known(
    form: str, sizes: tuple[int, ...], rows: int
) -> None:
    found = known(grid(), form, sizes, rows)
    assert isinstance(found, NotMeasured)
    assert "table of speeds" in found.reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes_ways_and_training_are_not_known(dtype: str) -> None:
    table = grid()
    assert isinstance(known(table, MLP, (256, 1024, 256), dtype=dtype), NotMeasured)
    assert isinstance(known(table, MLP, (256, 1024, 256), packed=False), NotMeasured)
    trained = known(table, MLP, (256, 1024, 256), training=True)
    assert isinstance(trained, NotMeasured)
    assert "inference" in trained.reason


@pytest.mark.parametrize(
    "corner",
    ["4 × 256→1024 linear", "16 × 1024→256 linear", "4 × 256→256 linear", "16 × 1024→1024 linear"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "slower", "speedup": 0.9, "interval": (0.8, 0.95)},
        {"verdict": "same", "speedup": 1.0, "interval": (0.99, 1.01)},
        {"speedup": 1.2, "interval": (LEAST_GAIN, 1.3)},
    ],
)
def test_one_corner_that_is_not_faster_decides(corner: str, changes: dict[str, Any]) -> None:
    table = with_cell(grid(), corner, **changes)
    found = known(table, "identity/b", (768, 768), 5)
    assert isinstance(found, KnownSpeed)
    assert found.verdict == "not faster"
    assert not found.faster
    assert found.speedup == changes["interval"][0]
    assert corner in found.words
    # Another cell of the grid does not have that corner.
    assert is_faster(known(table, "identity/b", (100, 100), 1))


def test_a_corner_that_was_not_measured_is_not_a_corner_that_is_slower() -> None:
    table = with_cell(grid(), "4 × 256→256 linear", **UNMEASURED)
    found = known(table, "identity/b", (768, 768), 5)
    assert found == NotMeasured("4 × 256→256 linear was not measured when the table was made")
    slower = {"verdict": "slower", "speedup": 0.9, "interval": (0.8, 0.95)}
    both = with_cell(table, "16 × 256→256 linear", **slower)
    found = known(both, "identity/b", (768, 768), 5)
    assert isinstance(found, KnownSpeed)
    assert found.verdict == "not faster"


def test_a_cell_that_was_left_out_is_outside_of_the_grid() -> None:
    table = grid()
    table = replace(table, cells=tuple(c for c in table.cells if c.name != "64 × 1024→1024 linear"))
    assert is_faster(known(table, "identity/b", (768, 768), 16))
    assert isinstance(known(table, "identity/b", (768, 768), 17), NotMeasured)


def test_hot_and_cold_have_to_be_faster_both() -> None:
    slow = cell((64, 256), cold=True, verdict="slower", low=0.7)
    table = made([cell((64, 256)), slow])
    found = known(table, "identity/b", (64, 256), 1)
    assert isinstance(found, KnownSpeed)
    assert (found.verdict, found.speedup) == ("not faster", 0.7)
    assert "cold is slower than eager" in found.words


def test_an_activation_that_was_not_measured_needs_the_cheapest_and_the_costliest() -> None:
    slow = {"verdict": "same", "speedup": 1.0, "interval": (0.99, 1.01)}
    for kind in ("relu", "gelu"):
        table = with_cell(grid(), f"4 × 256→1024→256 {kind}", **slow)
        other = "gelu" if kind == "relu" else "relu"
        assert not is_faster(known(table, "tanh/b;identity/b", (256, 1024, 256)))
        assert is_faster(known(table, f"{other}/b;identity/b", (256, 1024, 256)))
    only_gelu = made([c for c in grid().cells if c.kind == "gelu"])
    assert isinstance(known(only_gelu, "tanh;identity", (256, 1024, 256)), NotMeasured)
    assert is_faster(known(only_gelu, "gelu;identity", (256, 1024, 256)))


def test_one_that_was_measured_itself_goes_before_those_it_lies_between() -> None:
    own = cell((256, 1024, 256), 4, "tanh", low=1.5)
    table = replace(grid(), cells=(*grid().cells, own))
    found = known(table, "tanh/b;identity/b", (256, 1024, 256))
    assert isinstance(found, KnownSpeed)
    assert found.cells == (own,)


def test_transposed_weights_have_cells_of_their_own() -> None:
    table = made([cell((64, 256), kind="linear-conv1d")])
    assert is_faster(known(table, "identity/b/t", (64, 256), 1))
    assert isinstance(known(table, "identity/b", (64, 256), 1), NotMeasured)


@pytest.mark.parametrize("shapes", [[], [(4, 4)], [(4,), (4,)], [(4, 4, 4), (4,)]])
def test_shapes_that_do_not_fit_the_form_are_refused(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(BlockError, match=r"shapes were given|expected two dimensions"):
        grid().known("identity/b", shapes, "float32", 1, True)


def test_a_table_says_where_its_speeds_are_from() -> None:
    assert made([]).source == (
        "not measured here: by the table for avx512 (AMD EPYC, 2 threads, torch 2.13.0, 2026-11-17)"
    )
    assert "1 thread," in made([], threads=1).source
    assert "\x1b" not in made([], cpu="an \x1b[31m evil CPU").source


# ---- files ----


def saved(folder: Path, table: SpeedTable) -> Path:
    path = folder / f"{table.isa}.json"
    path.write_text(table_text(table))
    return path


def test_a_table_loads_again_and_has_a_line_for_each_cell(tmp_path: Path) -> None:
    table = with_cell(grid(), "4 × 256→256 linear", **UNMEASURED)
    lines = saved(tmp_path, table).read_text().splitlines()
    assert sum('"kind"' in line for line in lines) == len(table.cells)
    assert max(line.count('"kind"') for line in lines) == 1
    assert load_table("avx512", tmp_path) == table
    empty = made([])
    assert SpeedTable.from_json(table_text(empty)) == empty


@pytest.mark.parametrize("isa", ["neon", "avx", "../avx512", "", "AVX512", "\x1b[31m"])
def test_no_table_is_said_to_be_none(tmp_path: Path, isa: str) -> None:
    saved(tmp_path, grid())
    found = load_table(isa, tmp_path)
    assert isinstance(found, NotMeasured)
    assert "no table of speeds for" in found.reason
    assert "shipped: avx512" in found.reason
    assert "\x1b" not in found.reason


def test_without_kernels_there_is_no_table() -> None:
    assert isinstance(load_table(None), NotMeasured)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"isa": "avx2"}, "it is for avx2, not for avx512"),
        ({"date": "yesterday"}, "date"),
        ({"torchweld_table": 99}, "format 99"),
        ({"threads": 0}, "threads"),
        ({"more": 1}, "more"),
        ({"cells": [{"kind": "linear"}]}, "lacks"),
    ],
)
def test_a_damaged_table_is_one_clear_error(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    path = saved(tmp_path, grid())
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(TorchweldError, match=complaint):
        load_table("avx512", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "not measured"},
        {"speedup": NotMeasured("no")},
        {"interval": None},
        {"speedup": 3.0},
        {"speedup": -1.0},
        {"speedup": 2.1, "interval": (2.2, 2.0)},
        {"rows": 0},
        {"sizes": (4,)},
        {"way": "folded"},
    ],
)
def test_a_cell_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    bad = cell((64, 256), **changes) if "rows" not in changes and "sizes" not in changes else None
    table = made([bad or replace(cell((64, 256)), **changes)])
    with pytest.raises(TorchweldError, match=r"cells\[0\]"):
        SpeedTable.from_json(table_text(table))


# ---- what is shipped ----

SHIPPED = sorted(path.stem for path in TABLES.glob("*.json"))


def test_tables_for_avx2_and_avx512_are_shipped() -> None:
    assert {"avx2", "avx512"} <= set(SHIPPED)


@pytest.mark.parametrize("isa", SHIPPED)
def test_a_shipped_table_is_found_in_the_package_and_says_how_it_was_made(isa: str) -> None:
    assert (resources.files("torchweld") / "plans" / "tables" / f"{isa}.json").is_file()
    table = load_table(isa)
    assert isinstance(table, SpeedTable)
    assert table.isa == isa
    assert f"torchweld bench --table src/torchweld/tables/{isa}.json" in table.command
    assert table_text(table) == (TABLES / f"{isa}.json").read_text()
    places = [(c.name, c.dtype, c.way) for c in table.cells]
    assert len(set(places)) == len(places)
    assert {c.way for c in table.cells} == {"packed", "natural"}
    # A table most of whose cells could not be measured was made on a busy machine.
    unmeasured = [c for c in table.cells if c.verdict == "not measured"]
    assert len(unmeasured) < len(table.cells) / 4


@pytest.mark.parametrize("isa", SHIPPED)
def test_what_a_shipped_table_measured_it_knows(isa: str) -> None:
    table = load_table(isa)
    assert isinstance(table, SpeedTable)
    hits = 0
    for one in table.cells:
        suffix = "/t" if one.kind.endswith("-conv1d") else ""
        name = one.kind.removesuffix("-conv1d")
        if name == "linear":
            form = "identity/b" + suffix
        elif name.endswith("-gated"):
            form = f"{name.removesuffix('-gated')}/separate;identity"
        else:
            form = f"{name}/b{suffix};" * (len(one.sizes) - 2) + f"identity/b{suffix}"
        found = known(table, form, one.sizes, one.rows, one.dtype, one.way == "packed")
        assert not is_faster(found) or one.faster
        hits += is_faster(found)
    assert hits
