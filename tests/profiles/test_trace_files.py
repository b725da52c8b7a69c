"""Files a trace can come in: compressed, reordered, cut, damaged, or no trace at all."""

from __future__ import annotations

import gc
import gzip
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.made_traces import TRACES, MadeTrace, a_folder, five_ops, names

from torchweld.core.errors import TorchweldError
from torchweld.profiles.profile import About, Module, Profile
from torchweld.profiles.recording.trace_profile import read_trace
from torchweld.profiles.traces import trace_stream

# ---- forms of a file ----


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace", "trace.txt"])
@pytest.mark.parametrize("packed", [False, True])
def test_compression_is_told_by_content_not_by_name(
    tmp_path: Path, name: str, packed: bool
) -> None:
    raw = five_ops().text().encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert len(read_trace(path).ops) == 5
    assert len(read_trace(str(path)).ops) == 5


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(five_ops().events))
    assert len(read_trace(path).ops) == 5


@pytest.mark.parametrize("order", [("events", "rank"), ("rank", "events")])
def test_keys_may_come_in_any_order(tmp_path: Path, order: tuple[str, str]) -> None:
    parts: dict[str, dict[str, Any]] = {
        "events": {"traceEvents": MadeTrace().launch("sgemm", 0, 5, 3, 1).events},
        "rank": {
            "otherData": {"nested": [1, {"traceEvents": [1]}]},
            "distributedInfo": {"rank": 3, "world_size": 8},
            "deviceProperties": [{"id": 0, "name": "Tesla T4"}],
            "baseTimeNanoseconds": 1727743122000000000,
        },
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**parts[order[0]], **parts[order[1]]}))
    profile = read_trace(path)
    assert profile.about.rank == 3
    assert profile.device is not None
    assert profile.device.name == "Tesla T4"


def test_several_compressed_parts_are_one_trace(tmp_path: Path) -> None:
    raw = five_ops().text().encode()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(raw[:300]) + gzip.compress(raw[300:]) + bytes(100))
    profile = read_trace(path)
    assert len(profile.ops) == 5
    assert profile.notices == ()


@given(st.integers(1, 400), st.booleans())
def test_where_blocks_end_does_not_matter(size: int, packed: bool) -> None:
    trace = MadeTrace(header={"distributedInfo": {"rank": 1234567}, "späte": 'Größe " \\ é'})
    trace.op('aten::"quoted" \\ {[,]}', 1700000000000000.125, 3.5, **{"Input Dims": [[1, 2], []]})
    trace.op("aten::längst", 1700000000000010, -0.0).launch("sgemm", 5, 6, 7, 1)
    with pytest.MonkeyPatch.context() as patch, a_folder() as folder:
        path = trace.write(folder / ("trace.json.gz" if packed else "trace.json"))
        whole = read_trace(path)
        patch.setattr(trace_stream, "BLOCK", size)
        assert read_trace(path) == whole
    assert len(whole.ops) == 2
    assert whole.about.rank == 1234567


def test_the_order_of_events_in_the_file_does_not_matter(tmp_path: Path) -> None:
    trace = MadeTrace().step(1, 0, 100).op("aten::linear", 1, 30).op("aten::addmm", 5, 20)
    trace.launch("sgemm", 10, 20, 10, 1).op("aten::relu", 40, 5).launch("relu", 42, 50, 4, 2)
    there = read_trace(trace.write(tmp_path / "trace.json"))
    trace.events.reverse()
    back = read_trace(trace.write(tmp_path / "trace.json"))
    assert [(op.name, op.parent, op.kernels) for op in back.ops] == [
        (op.name, op.parent, op.kernels) for op in there.ops
    ]
    assert there.ops[1].parent == 0
    assert back.device is not None
    assert there.device is not None
    assert back.device.kernels == there.device.kernels
    assert back.device.gaps == there.device.gaps


def test_fractions_of_a_microsecond_survive_times_since_1970(tmp_path: Path) -> None:
    text = (
        '[{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1661203462598738.125,"dur":2.25},'
        '{"ph":"X","cat":"cpu_op","name":"b","pid":1,"tid":1,"ts":1661203462598741.379,"dur":0.003}]'
    )
    path = tmp_path / "trace.json"
    path.write_text(text)
    a, b = read_trace(path).ops
    assert b.start_us - a.start_us == pytest.approx(3.254, abs=1e-9)
    assert (a.raw_us, b.raw_us) == pytest.approx((2.25, 0.003))


# ---- events that cannot be used ----


def malformed(**change: Any) -> Any:
    event = {"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1, "ts": 3, "dur": 1}
    changed = {**event, **change}
    return {key: value for key, value in changed.items() if value is not ...}


@pytest.mark.parametrize(
    "event",
    [
        malformed(ts=...),
        malformed(ts=None),
        malformed(ts="12"),
        malformed(ts=math.nan),
        malformed(ts=math.inf),
        malformed(ts=-math.inf),
        malformed(ts=10**400),
        malformed(ts=[1]),
        malformed(dur=...),
        malformed(dur=-1),
        malformed(dur="1"),
        malformed(dur=math.nan),
        malformed(dur=math.inf),
        malformed(name=...),
        malformed(name=7),
        malformed(name=["a"]),
        malformed(cat=...),
        malformed(cat=[]),
        malformed(pid=...),
        malformed(tid={}),
        malformed(ph=...),
        malformed(ph={}),
        malformed(args=[1]),
        malformed(args="text"),
        None,
        7,
        "text",
        [],
        {},
    ],
    ids=repr,
)
@pytest.mark.parametrize("first", [False, True])
def test_a_malformed_event_is_skipped_and_counted(tmp_path: Path, event: Any, first: bool) -> None:
    trace = five_ops()
    trace.events.insert(0 if first else 3, event)
    profile = read_trace(trace.write(tmp_path / "trace.json"))
    assert len(profile.ops) == 5
    assert [op.start_us for op in profile.ops] == [0, 10, 20, 30, 40]
    (notice,) = profile.notices
    assert notice.startswith("1 events were skipped")


def test_shapes_that_cannot_be_read_are_counted_and_the_op_stays(tmp_path: Path) -> None:
    trace = MadeTrace()
    wrong: list[Any] = [[["a"]], 5, [[-1]], [[1.5]], [[2], [3]], None]
    for i, shapes in enumerate(wrong):
        trace.op("aten::mm", 10 * i, 5, **{"Input Dims": shapes, "Input type": ["float"]})
    profile = read_trace(trace.write(tmp_path / "trace.json"))
    assert [op.inputs for op in profile.ops] == [()] * 6
    assert profile.notices == ("6 ops have shapes that cannot be read",)


def test_begin_and_end_events_are_skipped_and_said(tmp_path: Path) -> None:
    trace = five_ops()
    for phase in "BEBE":
        trace.events.append(malformed(ph=phase, dur=...))
    (notice,) = read_trace(trace.write(tmp_path / "trace.json")).notices
    assert "4 events were skipped" in notice
    assert "'B' (2), 'E' (2)" in notice


def test_unknown_categories_are_skipped_and_said(tmp_path: Path) -> None:
    trace = five_ops().add("mtia_ccp_events", "job", 3, 4)
    profile = read_trace(trace.write(tmp_path / "trace.json"))
    assert len(profile.ops) == 5
    (notice,) = profile.notices
    assert "'mtia_ccp_events' (1)" in notice


def test_arrows_names_and_marks_are_no_news(tmp_path: Path) -> None:
    trace = five_ops()
    trace.events += [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 3, "pid": 1, "tid": 1, "ts": 4, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 3, "pid": 0, "tid": 7, "ts": 9, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {"ph": "i", "name": "Record Window End", "s": "g", "pid": "", "tid": "", "ts": 99},
    ]
    trace.add("Trace", "PyTorch Profiler (0)", 0, 50, pid="Spans", tid="PyTorch Profiler")
    trace.add("overhead", "Activity Buffer Request", 5, 5, pid=-1, tid=0)
    assert read_trace(trace.write(tmp_path / "trace.json")).notices == ()


def test_bytes_that_are_not_text_are_replaced_and_said(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(five_ops().text().encode().replace(b"op3", b"op\xff\xfe"))
    profile = read_trace(path)
    assert names(profile)[3] == "aten::op\ufffd\ufffd"
    assert profile.notices == ("2 characters are not UTF-8 and were replaced",)


def test_a_byte_order_mark_and_raw_control_characters_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("\ufeff" + five_ops().text().replace("op3", "op\n3"), encoding="utf-8")
    profile = read_trace(path)
    assert names(profile)[3] == "aten::op\n3"
    assert profile.notices == ()


# ---- broken files ----


@given(st.data())
def test_a_cut_file_gives_every_event_that_is_whole(data: st.DataObject) -> None:
    raw = five_ops().text().encode()
    # Where each event ends, the last byte included.
    ends = [raw.index(f"op{i}".encode()) for i in range(5)]
    ends = [raw.index(b"}}", end) + 2 for end in ends]
    cut = data.draw(st.integers(1, len(raw) - 1))
    whole = sum(end <= cut for end in ends)
    with a_folder() as folder:
        path = folder / "trace.json"
        path.write_bytes(raw[:cut])
        if whole == 0:
            with pytest.raises(TorchweldError, match=r"trace\.json"):
                read_trace(path)
            return
        profile = read_trace(path)
    assert len(profile.ops) == whole
    (notice,) = profile.notices
    assert f"first {whole} events" in notice


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9, 0.999])
def test_a_cut_compressed_file_gives_all_that_can_be_had_and_says_so(
    tmp_path: Path, share: float
) -> None:
    raw = (TRACES / "cpu_only.json.gz").read_bytes()
    raw = raw[: int(share * len(raw))]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(raw)
    inflater = zlib.decompressobj(wbits=31)
    text = inflater.decompress(raw) + inflater.flush()
    begun = text.count(b'"ph": "X"')
    whole, part = read_trace(TRACES / "cpu_only.json.gz"), read_trace(path)
    assert names(part) == names(whole)[: len(part.ops)]
    assert "compressed data end early" in part.notices[0]
    # The last one that began may be cut.
    assert any(f"first {count:,} events" in part.notices[0] for count in (begun, begun - 1))


def test_a_flipped_byte_in_a_compressed_file_gives_what_is_before_it(tmp_path: Path) -> None:
    raw = bytearray((TRACES / "cpu_only.json.gz").read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path = tmp_path / "trace.json.gz"
    path.write_bytes(raw)
    profile = read_trace(path)
    assert 500 < len(profile.ops) < 2_424
    assert "only a part of the trace could be read" in profile.notices[0]


def test_what_follows_the_compressed_data_costs_no_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(five_ops().text().encode()) + b"something else")
    profile = read_trace(path)
    assert len(profile.ops) == 5
    assert "damaged after the last event" in profile.notices[0]


def test_a_wrong_checksum_costs_no_events(tmp_path: Path) -> None:
    raw = bytearray(gzip.compress(five_ops().text().encode()))
    raw[-5] ^= 1
    path = tmp_path / "trace.json.gz"
    path.write_bytes(raw)
    profile = read_trace(path)
    assert len(profile.ops) == 5
    assert "damaged" in profile.notices[0]


@pytest.mark.parametrize(
    "damage",
    ["\x00\x00\x00", '"', "}", "]", '{"a" 1}', "nan", "[" * 100_000, "1" * 10_000, '{"ph": tru}'],
    ids=lambda text: text[:8],
)
def test_damage_in_the_middle_gives_what_is_before_it(tmp_path: Path, damage: str) -> None:
    text = five_ops().text()
    at = text.index('{"ph": "X", "cat": "cpu_op", "name": "aten::op3"')
    path = tmp_path / "trace.json"
    path.write_text(text[:at] + damage + text[at:])
    profile = read_trace(path)
    assert names(profile) == ["aten::op0", "aten::op1", "aten::op2"]
    assert "only a part of the trace could be read" in profile.notices[0]
    place = int(profile.notices[0].partition("at character ")[2].partition(":")[0].replace(",", ""))
    # A stray quotation mark makes a text of the bracket and the mark behind it.
    assert at <= place <= at + len(damage) + 2


def test_damage_does_not_make_it_read_the_rest_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_stream, "LONGEST_VALUE", 10_000)
    text = five_ops().text()
    path = tmp_path / "trace.json"
    path.write_text(text.replace("aten::op4", "x" * 600_000))
    profile = read_trace(path)
    assert len(profile.ops) == 4
    assert "more than 10,000 characters" in profile.notices[0]


def save_a_profile(path: Path) -> None:
    about = About(source="trace", what="made")
    root = Module(path="", kind="workload")
    Profile(about=about, step_us=1.0, modules=(root,), ops=()).save(path)


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "worker.pt.trace.json").write_text("[]")


NOT_TRACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "there is no file"),
    "directory": (make_directory, r"directory.*such as worker\.pt\.trace\.json"),
    "empty": (lambda path: path.write_text(""), "is empty"),
    "only spaces": (lambda path: path.write_text(" \n\t"), "is empty"),
    "nothing compressed": (lambda path: path.write_bytes(gzip.compress(b"")), "is empty"),
    "prose": (lambda path: path.write_text("Dear reader"), "begins with 'Dear reader'"),
    "binary": (lambda path: path.write_bytes(bytes(range(200, 256))), "not with JSON"),
    "broken gzip": (lambda path: path.write_bytes(b"\x1f\x8bxx"), "damaged"),
    "a number": (lambda path: path.write_text("17"), "not with JSON"),
    "another document": (lambda path: path.write_text('{"a": 1}'), 'no list "traceEvents"'),
    "no list": (lambda path: path.write_text('{"traceEvents": 3}'), 'no list "traceEvents"'),
    "cut early": (lambda path: path.write_text('{"schema'), "damaged before its first event"),
    "no key": (lambda path: path.write_text("{1: 2}"), "damaged before its first event"),
    "no events": (lambda path: path.write_text('{"traceEvents": []}'), "no events"),
    "empty list": (lambda path: path.write_text("[]"), "no events"),
    "cut list": (lambda path: path.write_text("["), "no event of"),
    "numbers": (lambda path: path.write_text("[1, 2, 3]"), "none of the 3 events"),
    "deep": (lambda path: path.write_text("[" * 200_000), "no event of"),
    "another tool's": (
        lambda path: path.write_text('[{"ph": "B", "name": "a", "ts": 1, "pid": 1, "tid": 1}]'),
        "none of the 1 events .*'B'",
    ),
    "a saved profile": (save_a_profile, r"Profile\.load"),
}


@pytest.mark.parametrize("what", NOT_TRACES)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path: Path, what: str) -> None:
    make, reason = NOT_TRACES[what]
    path = tmp_path / "given.json"
    make(path)
    with pytest.raises(TorchweldError, match=reason) as caught:
        read_trace(path)
    assert "given.json" in str(caught.value)


def test_a_saved_and_compressed_profile_is_refused_too(tmp_path: Path) -> None:
    save_a_profile(tmp_path / "p.json.gz")
    with pytest.raises(TorchweldError, match=r"Profile\.load"):
        read_trace(tmp_path / "p.json.gz")


def test_garbage_collection_is_left_as_it_was(tmp_path: Path) -> None:
    path = five_ops().write(tmp_path / "trace.json")
    assert gc.isenabled()
    read_trace(path)
    assert gc.isenabled()
    with pytest.raises(TorchweldError):
        read_trace(tmp_path / "missing.json")
    assert gc.isenabled()
    gc.disable()
    try:
        read_trace(path)
        assert not gc.isenabled()
    finally:
        gc.enable()
