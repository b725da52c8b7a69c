"""Profiles on a terminal: what is shown is what the account says, in 100 columns, for any names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.block_profiles import Call, block_places, blocks, make, on_device
from tests.support.made_profiles import make_faults, make_peaks
from tests.support.measured import measured
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import duration, figure, share
from torchweld.core.safe_text import clean
from torchweld.findings import Finding, diagnose, welding_bound
from torchweld.machine.page_faults import UNCOUNTED
from torchweld.profiles.accounting.time_account import Split, account, roofline
from torchweld.profiles.profile import Allocation, Memory, Profile, TimeCheck, Timing
from torchweld.profiles.recording.profile_building import describe
from torchweld.profiles.step_faults import DISTURBED, StepFaults
from torchweld.report import View, profile_sections, profile_text
from torchweld.report.module_tree import MOST_ROWS, Tree, label, merged_path
from torchweld.report.profile_sections import findings_section
from torchweld.report.profile_verdict import PARTS, bar, verdict
from torchweld.report.text_style import bar_cells, cut, to_text


def text_of(profile: Profile, findings: Any = None, **view: Any) -> str:
    return profile_text(profile, account(profile), findings, View(**view))


def line_of(text: str, start: str) -> str:
    """The only line that begins with `start`, indentation aside."""
    (found,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return found


def finding(**changes: Any) -> Finding:
    facts: dict[str, Any] = {
        "rule": "few-rows",
        "title": "Linears with few rows",
        "cause": "Eight rows do not fill the product's tiles.",
        "action": "Weld them: torchweld fuse.",
        "evidence": ("8 rows", "3 % of the roofline"),
        "waste": "time above the roofline",
        "bound": 1.25,
        "saved_us": 150.0,
        "modules": ("layers.*.mlp",),
    }
    return Finding(**{**facts, **changes})


# ---- the sentence and the bar ----


def test_the_verdict_has_the_figures_of_the_account() -> None:
    profile = blocks(training=True)
    found = account(profile)
    text = " ".join(text_of(profile).split())
    step = measured(found.step)
    whole = step.total_us
    assert f"Net: one training step takes {duration(measured(profile.step_us))}" in text
    assert f"{share(step.useful_us, whole)} is arithmetic and necessary traffic" in text
    assert f"{share(step.waste_us, whole)} is waste, mostly slow kernels" in text
    assert f"explained {share(measured(found.explained), 1)}." in text


def test_what_was_not_priced_is_not_called_necessary_or_zero() -> None:
    text = " ".join(text_of(blocks(peaks=None)).split())
    assert "it is not known how much is necessary" in text
    assert "is arithmetic and necessary traffic" not in text
    assert "note: no peaks" in text


def test_a_profile_without_ops_says_so() -> None:
    empty = replace(make([("", "Net")], []), step_us=12.0)
    assert "no op was recorded" in text_of(empty)


def test_a_trace_without_modules_does_not_say_that_nothing_is_explained() -> None:
    profile = blocks()
    about = replace(profile.about, source="trace")
    root = replace(profile.modules[0], path="")
    ops = tuple(replace(op, module=0) for op in profile.ops)
    bare = replace(profile, about=about, modules=(root,), ops=ops, memory=None)
    said = verdict(bare, account(bare)).plain
    assert said.endswith("; it is not known which modules the ops belong to.")
    assert "explained" not in said


@given(
    st.tuples(*[st.floats(0, 1e6)] * 6),
    st.floats(-1e6, 1e6),
)
def test_no_part_is_more_than_the_whole(parts: tuple[float, ...], unexplained_us: float) -> None:
    split = Split(**{part.field: 0.0 for part in PARTS})
    named = [part.field for part in PARTS if part.field != "unexplained_us"]
    split = replace(split, **dict(zip(named, parts, strict=True)), unexplained_us=unexplained_us)
    netted = split.netted
    assert netted.total_us == pytest.approx(split.total_us, abs=1e-6)
    if split.total_us > 1e-3:
        for part in PARTS:
            assert -1e-9 <= part.of(netted) <= netted.total_us * (1 + 1e-9)


def test_parts_that_explain_too_much_are_not_shown_as_more_than_the_step() -> None:
    """The clock says 1 ms, the ops come to 1.1 ms."""
    profile = blocks()
    short = replace(profile, step_us=0.9 * measured(profile.step_us))
    text = text_of(short)
    head = text.partition("modules")[0]
    assert all(int(found) <= 100 for found in re.findall(r"(\d+) %", head))
    assert "−" not in head


@given(
    st.lists(st.floats(-1e6, 1e9), min_size=1, max_size=9),
    st.integers(1, 200),
)
def test_a_bar_is_filled_in_proportion(values: list[float], width: int) -> None:
    cells = bar_cells(values, width)
    whole = sum(value for value in values if value > 0)
    assert sum(cells) == (width if whole > 0 else 0)
    for value, count in zip(values, cells, strict=True):
        exact = max(value, 0.0) / whole * width if whole > 0 else 0.0
        assert abs(count - exact) <= 1 + 1e-6


def test_the_bar_reads_without_colour() -> None:
    assert len({part.sign for part in PARTS}) == len(PARTS)
    split = Split(arithmetic_us=50.0, host_us=25.0, slow_us=25.0)
    assert bar(split, 100).plain == "█" * 50 + "=" * 25 + "▒" * 25
    overdone = replace(split, unexplained_us=-40.0)
    assert bar(overdone, 100).plain == bar(split, 100).plain


# ---- the tree ----


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5)])


def test_the_tree_reads_as_print_does() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Block(8), Block(8), Block(8), Block(16), Block(8)])
    model.drop = nn.Dropout(0.1)
    places = [(place.path, place.kind, place.extra) for place in describe([("", model)])]
    profile = make(places, [Call(name="aten::add")])
    tree = Tree(profile, account(profile))
    rows = [row for row in tree.rows([(0,)], "model", None) if not row.own]
    printed = [line.removesuffix("(") for line in str(model).splitlines() if line.strip() != ")"]
    assert [label(row, 200) for row in rows] == printed


def test_identical_blocks_are_one_line_with_sums() -> None:
    profile = blocks(4)
    found = account(profile)
    tree = Tree(profile, found)
    rows = {row.name: row for row in tree.rows([(0,)], "model", None) if not row.own}
    block, up = rows["0-3"], rows["up"]
    assert len(block.modules) == len(up.modules) == 4
    one = next(i for i, module in enumerate(profile.modules) if module.path == "layers.2")
    assert block.total_us == pytest.approx(4 * profile.modules[one].total_us)
    assert block.calls == 4
    assert block.ops == 4 * found.modules[one].launches
    split = measured(found.modules[one].split)
    assert measured(block.split).total_us == pytest.approx(4 * split.total_us)
    line = line_of(text_of(profile), "(0-3): 4 x Block")
    assert line.split()[3:7] == ["Block", "1264", "97", "%"]


def test_a_block_that_differs_is_not_merged() -> None:
    places = [p if p[0] != "layers.2.norm" else (p[0], "RMSNorm") for p in block_places(4)]
    profile = make(places, [Call(name="aten::add", path="layers.0")])
    text = text_of(profile)
    assert line_of(text, "(0-1): 2 x Block")
    assert line_of(text, "(2): Block")
    assert line_of(text, "(3): Block")


def test_what_a_module_does_itself_has_a_line_where_they_matter() -> None:
    text = text_of(blocks(2))
    assert line_of(text, "· itself").split()[2:5] == ["32.0", "5", "%"]
    calls = [Call(name="aten::add", path="a", us=1.0), Call(name="aten::mm", us=1e5)]
    small = text_of(make([("", "Net"), ("a", "A"), ("a.b", "B")], calls))
    assert line_of(small, "· itself").startswith("  ·")  # the root's; that of `a` is too small


def test_forward_and_backward_show_in_training_alone() -> None:
    assert " fwd " not in text_of(blocks())
    profile = blocks(training=True)
    header = line_of(text_of(profile), "module ")
    row = line_of(text_of(profile), "(head)")
    module = profile.modules[-1]
    figures = re.findall(r"[\d.]+(?: %)?", row.split(")")[2])
    columns = dict(zip(header.split()[1:6], figures[:5], strict=True))
    assert columns["fwd"] == figure(module.forward_us)
    assert columns["bwd"] == figure(module.backward_us)


def test_depth_cuts_the_tree() -> None:
    assert "(layers)" not in text_of(blocks(), depth=0)
    shallow = text_of(blocks(), depth=2)
    assert "(0-3): 4 x Block" in shallow
    assert "(mlp)" not in shallow


def test_a_tree_that_is_too_long_is_shown_less_deep_and_says_so() -> None:
    wide = [("", "Net"), *((f"m{i}", "A") for i in range(MOST_ROWS - 10))]
    wide += [(f"m{i}.inner", f"B{i}") for i in range(MOST_ROWS - 10)]
    text = text_of(make(wide, [Call(name="aten::add", path="m3.inner")]))
    assert "1 levels deep; --depth shows more" in text
    assert "(m7): A" in text
    assert "(inner)" not in text
    deep = text_of(make(wide, [Call(name="aten::add", path="m3.inner")]), depth=2)
    assert "(inner): B7" in deep


def test_one_module_alone_and_alike_ones_together() -> None:
    profile = blocks(4)
    one = text_of(profile, module="layers.2.mlp")
    assert one.startswith("layers.2.mlp: 279 µs, 21 % of the step")
    assert "LayerNorm" not in one
    assert "native_layer_norm" not in one
    assert line_of(one, "addmm").split()[1] == "2"
    many = text_of(profile, module="layers.*.mlp")
    assert many.startswith("layers.*.mlp: 1.12 ms, 86 % of the step")
    assert line_of(many, "addmm").split()[1] == "8"


def test_a_star_stands_for_a_name_and_so_not_for_the_root() -> None:
    profile = blocks(4)
    tree = Tree(profile, account(profile))
    paths = {profile.modules[i].path for group in tree.select("*") for i in group}
    assert paths == {"layers", "head"}
    total_us = sum(measured(tree.total_us(i)) for group in tree.select("*") for i in group)
    assert total_us <= measured(profile.step_us)


def test_a_module_that_is_not_there_is_an_error_that_helps() -> None:
    with pytest.raises(TorchweldError, match=r"no module 'layers.1.mpl'.*layers.1.mlp"):
        text_of(blocks(), module="layers.1.mpl")


def test_siblings_can_be_sorted() -> None:
    def order(**view: Any) -> list[str]:
        return re.findall(r"^ +\((norm|mlp|layers|head)\)", text_of(blocks(), **view), re.M)

    assert order() == ["layers", "norm", "mlp", "head"]
    assert order(order="time") == ["layers", "mlp", "norm", "head"]
    ops = text_of(blocks(), order="ops").partition("\nops")[2]
    assert ops.splitlines()[2].split()[0] == "addmm"


def test_merged_paths() -> None:
    assert merged_path(["a.3.b"]) == "a.3.b"
    assert merged_path(["a.3.b", "a.5.b"]) == "a.*.b"


# ---- the other sections ----


def test_findings_say_bound_cause_action_and_evidence() -> None:
    text = text_of(blocks(), [finding()])
    flat = " ".join(text.split())
    assert (
        "1 Linears with few rows At most 1.25x: 20 % of the step is time above the roofline."
        in flat
    )
    assert "Eight rows do not fill the product's tiles." in flat
    assert "→ Weld them: torchweld fuse." in flat
    assert "8 rows; 3 % of the roofline; in layers.*.mlp" in flat


def test_only_the_first_findings_are_shown_and_the_rest_counted() -> None:
    many = [finding(title=f"title {i}") for i in range(9)]
    text = to_text(findings_section(many))
    assert "title 4" in text
    assert "title 5" not in text
    assert "and 4 more" in text


def test_no_finding_is_said() -> None:
    assert "Nothing that costs enough" in text_of(blocks(), [])
    assert "findings" not in text_of(blocks())


@pytest.mark.parametrize(
    ("live", "helps"), [(True, "torchweld info --measure"), (False, "--this-machine")]
)
def test_without_peaks_no_finding_means_that_nothing_can_be_told(live: bool, helps: str) -> None:
    profile = replace(blocks(live=live), peaks=None)
    for findings in ([], [finding()]):
        flat = " ".join(text_of(profile, findings).partition("\nops ")[0].split())
        assert "costs enough" not in flat
        assert "faster is not known" in flat
        assert helps in flat
    assert "faster is not known" not in text_of(blocks(), [finding()])


def test_the_op_table_is_that_of_the_account() -> None:
    profile = blocks()
    found = account(profile)
    chosen = [i for i, op in enumerate(profile.ops) if op.name == "aten::addmm"]
    self_us = sum(profile.ops[i].self_us for i in chosen)
    flops = sum(found.ops[i].flops for i in chosen)
    row = line_of(text_of(profile), "addmm").split()
    part = share(self_us, measured(profile.step_us))
    assert row[1:6] == ["9", *duration(self_us).split(), *part.split()]
    assert row[6] == figure(flops / self_us / 1e3)


def test_timing_shows_raw_corrected_unexplained_and_checks() -> None:
    timing = Timing(
        wall_us=1000.0,
        raw_us=1500.0,
        corrected_us=1020.0,
        first_us=9000.0,
        events=400,
        op_cost_us=1.2,
        module_cost_us=2.0,
        steps=3,
        checks=(
            TimeCheck(
                what="held-out steps", corrected_us=1020.0, timed_us=1000.0, interval=(-0.01, 0.05)
            ),
            TimeCheck(what="layers.3", corrected_us=80.0, timed_us=100.0),
        ),
    )
    flat = " ".join(text_of(replace(blocks(), timing=timing, step_us=1020.0)).split())
    assert "one step takes 1.02 ms" in flat
    assert "1.00 ms without the profiler, on the clock 1.50 ms under" in flat
    assert "1.02 ms under the profiler, its cost taken away and outliers cut back: the" in flat
    assert flat.count("the step that all parts add up to") == 1
    assert "held-out steps 1.02 ms 1.00 ms +2.0 % −1.0 % to +5.0 %" in flat
    assert "layers.3 80.0 µs 100 µs −20.0 % too few rounds to tell" in flat
    assert "the very first step took 9.00 ms" in flat


def test_timing_says_how_many_page_faults_and_their_cost_if_there_are_many() -> None:
    def said(faults: StepFaults | NotMeasured, **changes: Any) -> str:
        flat = " ".join(text_of(replace(blocks(), faults=faults, **changes)).split())
        (found,) = re.findall(r"(?:[\d,]+ page faults? per|page faults:).*?(?= checks? |$)", flat)
        return str(found)

    step_us = measured(blocks().step_us)
    many = make_faults(2000, fault_us=step_us / 10_000)
    assert said(make_faults(1)) == "1 page fault per step without the profiler"
    assert said(many) == (
        "2,000 page faults per step without the profiler: 8.19 MB of fresh pages at "
        f"{duration(many.fault_us)} per fault, 20 % of the step at most; "
        f"{duration(step_us / 5)} per step in the kernel"
    )
    assert said(replace(many, system_us=DISTURBED)).endswith("20 % of the step at most")
    assert (
        said(many, step_us=NotMeasured("busy")) == "2,000 page faults per step without the profiler"
    )
    assert said(UNCOUNTED) == f"page faults: {UNCOUNTED}"


def test_memory_groups_what_layers_made_alike() -> None:
    profile = blocks(3)
    index = {module.path: i for i, module in enumerate(profile.modules)}
    memory = Memory(
        allocations=12,
        allocated_bytes=5_000_000,
        peak_bytes=3_000_000,
        at_peak=tuple(
            Allocation(bytes=1_000_000, module=index[path], op="aten::linear", phase="forward")
            for path in ("layers.0.mlp.up", "layers.2.mlp.up", "head")
        ),
        saved_bytes={"layers.0.mlp.act": 400_000, "layers.1.mlp.act": 400_000},
        module_bytes={},
    )
    text = text_of(replace(profile, memory=memory))
    flat = " ".join(text.split())
    assert "12 allocations of 5.00 MB per step; peak 3.00 MB" in flat
    assert "layers.*.mlp.up 2.00 MB linear" in flat
    assert "layers.*.mlp.act 800 kB" in flat
    assert "head 1.00 MB linear" in flat


def test_a_device_shows_states_launches_kernels_and_gaps() -> None:
    profile = on_device(blocks(2, live=False))
    flat = " ".join(text_of(profile).split())
    assert "65.0 µs from first kernel to last: █ computing 85 %" in flat
    assert "11 launches: 22.0 µs on the host for 55.0 µs of work" in flat
    assert "3 occupancy queries, 1.50 µs" in flat
    assert "gemm 9 45.0 µs 69 %" in flat
    assert "triton_poi_fused_gelu_mul_0 2 10.0 µs 15 % in it: gelu, mul" in flat
    assert "host wait 10 10.0 µs" in flat
    assert "ended by aten::gelu in layers.0.mlp.act, before triton_poi_fused" in flat
    assert "of the 65.0 µs from the first kernel to the last on Example GPU" in flat


def test_notices_come_last() -> None:
    text = text_of(blocks(notices=("the machine was busy",)))
    assert text.rstrip().endswith("note: the machine was busy")


# ---- any names, any width ----

NASTY = "a[red]b[/red] :smile: \x1b[31mc\nd\r\x00e\u202ef\u2028"


def nasty_profile() -> Profile:
    place = NASTY.replace(".", "")
    places = [("", NASTY), (place, NASTY, NASTY), (f"{place}.x", "Linear", "y" * 300)]
    calls = [Call(name=NASTY, path=place), Call(name="aten::mm", path=f"{place}.x")]
    return on_device(make(places, calls, notices=(NASTY,)))


def test_names_of_models_cannot_format_or_control_the_terminal() -> None:
    profile = nasty_profile()
    text = text_of(profile, [finding(title=NASTY, cause=NASTY, modules=(NASTY,))])
    assert "a[red]b[/red] :smile: \\x1b[31mc\\nd\\r\\x00e\\u202ef\\u2028" in text
    for char in set(NASTY) - {"\n"}:
        assert char.isprintable() or char not in text
    coloured = to_text(profile_sections(profile, account(profile), [], View()), colour=True)
    assert "\x1b[31mc" not in coloured
    assert "\x1b[" in coloured


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize(
    "profile",
    [blocks(12, training=True), on_device(blocks(3, live=False)), nasty_profile()],
    ids=["training", "device", "nasty"],
)
def test_everything_fits(profile: Profile, width: int) -> None:
    text = text_of(profile, [finding(evidence=("word " * 60,))], width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_names_are_cut_where_it_shows() -> None:
    assert cut("abcdef", 4) == "abc…"
    assert cut("abcd", 4) == "abcd"
    assert clean("plain") == "plain"


def test_top_kernels_are_those_that_the_devices_figures_cover() -> None:
    profile = on_device(blocks(2, live=False))
    assert profile.device is not None
    half_us = sorted(call.start_us for call in profile.device.calls)[3]
    device = replace(profile.device, until_us=half_us)
    text = text_of(replace(profile, device=device))
    row = line_of(text[: text.index("  products ")], "gemm_128x64")
    covered = [k for k in filter(device.covers, device.kernels) if k.name == "gemm_128x64"]
    assert 0 < len(covered) < sum(k.name == "gemm_128x64" for k in device.kernels)
    assert row.split()[1] == str(len(covered))


# ---- one figure for the step ----


def shares_of(text: str) -> dict[str, int]:
    """Share of each line at the left edge of the tree."""
    tree = text.partition("\nmodules")[2].partition("\n\n")[0]
    lines = [line for line in tree.splitlines()[2:] if line and not line.startswith(" ")]
    return {line.split()[0]: int(re.findall(r"(\d+) %", line)[0]) for line in lines}


def test_the_lines_of_the_tree_add_up_to_the_step() -> None:
    profile = blocks()
    assert shares_of(text_of(profile)) == {"Net": 100}
    longer = text_of(replace(profile, step_us=1.25 * measured(profile.step_us)))
    assert shares_of(longer) == {"Net": 80, "·": 20}
    assert "· unexplained, in no module" in longer


def test_an_op_that_beats_its_roofline_has_no_share_of_it() -> None:
    """The peak is none then; a share above 100 % would say more about the peak than the op."""
    slow = make_peaks(gflops=0.01, threads=1)
    profile = replace(blocks(), peaks=slow)
    rows = roofline(profile, account(profile))
    assert all(row.of_roofline is None or row.of_roofline <= 1.0 for row in rows)
    assert next(row for row in rows if row.name == "aten::addmm").of_roofline is None
    text = text_of(profile, [])
    assert all(int(found) <= 100 for found in re.findall(r"(\d+) %", text.partition("timing")[0]))
    assert any("measured while it was busy" in notice for notice in account(profile).notices)
    assert not any("was busy" in notice for notice in account(blocks()).notices)
    assert isinstance(welding_bound(profile), NotMeasured)
    assert diagnose(profile) == ()
    assert "is not known: some were faster than the peaks" in " ".join(text.split())
