"""Dataclasses to JSON and back; and saved profiles, whole and damaged."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.files import GZIP
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import Measured
from torchweld.core.record_format import RecordFormat
from torchweld.core.records import RecordError, from_plain, json_text, to_plain
from torchweld.core.saved_records import SavedRecord
from torchweld.profiles.profile import Profile, TimeCheck
from torchweld.profiles.recording.live_profile import profile


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: str
    values: tuple[Measured, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    inner: Inner | None = None
    pairs: tuple[tuple[int, str], ...] = ()
    table: dict[str, Inner] | None = None
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    figure: float | NotMeasured = NotMeasured("nobody has looked")
    pair: Inner | NotMeasured | None = None


FULL = Outer(
    count=3,
    inner=Inner(name="x", values=(1.0, 2.5)),
    pairs=((1, "one"),),
    table={"k": Inner(name="y")},
    kind="b",
    flag=True,
    figure=2.5,
    pair=NotMeasured("busy"),
)


@pytest.mark.parametrize("record", [FULL, Outer(count=0)])
def test_a_record_comes_back_as_it_was(record: Outer) -> None:
    text = json.dumps(to_plain(record))
    assert from_plain(Outer, json.loads(text)) == record


def test_not_measured_is_a_value_that_saves_loads_and_prints() -> None:
    record = Outer(count=1, figure=NotMeasured("the machine is busy"), pair=Inner(name="x"))
    data = to_plain(record)
    assert data["figure"] == {"not_measured": "the machine is busy"}
    assert from_plain(Outer, json.loads(json.dumps(data))) == record
    assert str(record.figure) == "not measured: the machine is busy"
    assert not record.figure
    with pytest.raises(TypeError):
        record.figure * 2  # type: ignore[operator]


@pytest.mark.parametrize("figure", [{"not_measured": 3}, {"not_measured": "x", "y": 1}, {}, None])
def test_what_only_looks_like_not_measured_is_refused(figure: object) -> None:
    with pytest.raises(RecordError, match=r"\.figure"):
        from_plain(Outer, {"count": 1, "figure": figure})


def test_defaults_are_left_out() -> None:
    assert to_plain(Outer(count=1)) == {"count": 1}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({}, "lacks count"),
        ({"count": "3"}, "Outer.count is '3'; int"),
        ({"count": True}, "Outer.count is True; int"),
        ({"count": 1, "more": 2}, "field 'more'"),
        ({"count": 1, "kind": "c"}, "one of 'a', 'b'"),
        ({"count": 1, "inner": []}, "Outer.inner is []; Inner"),
        ({"count": 1, "inner": {"name": "x", "values": ["1"]}}, "Outer.inner.values[0]"),
        ({"count": 1, "pairs": [[1]]}, "Outer.pairs[0] has 1 items"),
        ({"count": 1, "pairs": 3}, "Outer.pairs is 3"),
        ({"count": 1, "table": {"k": 1}}, "Outer.table[k]"),
        ([], "Outer is []"),
    ],
)
def test_data_that_do_not_fit_are_refused_with_their_place(data: Any, complaint: str) -> None:
    with pytest.raises(RecordError) as caught:
        from_plain(Outer, data)
    assert complaint in str(caught.value)


def test_numbers_that_json_does_not_have_are_texts() -> None:
    record = Inner(name="x", values=(0.0, math.inf, -math.inf, math.nan))
    text = json.dumps(to_plain(record), allow_nan=False)
    assert json.loads(text)["values"] == [0.0, "inf", "-inf", "nan"]
    again = from_plain(Inner, json.loads(text))
    assert again.values[:3] == record.values[:3]
    assert math.isnan(again.values[3])


def test_what_stands_for_them_can_be_chosen() -> None:
    assert to_plain((math.nan, 1.5), odd=lambda _: None) == [None, 1.5]


def test_every_field_can_be_asked_for() -> None:
    data = to_plain(Outer(count=1, inner=Inner(name="x")), all_fields=True)
    assert data["inner"] == {"name": "x", "values": []}
    assert (data["flag"], data["figure"]) == (False, {"not_measured": "nobody has looked"})


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {2}]}, "settings[a][1] is a set"),
        (Outer(count=1, table={"k": Inner(name=Path("x"))}), "settings.table[k].name is a"),  # type: ignore[arg-type]
        (Inner, "settings is a type"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(RecordError) as caught:
        json_text(value, "settings")
    assert place in str(caught.value)


# ---- records with a mark ----


@dataclass(frozen=True, kw_only=True)
class Marked(SavedRecord):
    FORMAT = RecordFormat(
        what="thing",
        version=3,
        upgrades={1: lambda f: {"count": f.pop("number"), **f}, 2: lambda f: {**f, "late": True}},
        remedy="make it again",
        by_kind=True,
    )
    count: int
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class Holder(SavedRecord):
    FORMAT = RecordFormat(what="holder", version=1, remedy="no remedy", all_fields=True)
    things: tuple[Marked, ...] = ()


def test_a_mark_stands_wherever_its_record_does() -> None:
    mark = {"kind": "torchweld.thing", "version": 3}
    holder = Holder(things=(Marked(count=1), Marked(count=2, late=True)))
    assert Marked(count=1).to_dict() == {**mark, "count": 1}
    assert holder.to_dict() == {
        "torchweld_holder": 1,
        "things": [{**mark, "count": 1, "late": False}, {**mark, "count": 2, "late": True}],
    }
    assert Holder.from_json(holder.to_json()) == holder


def test_an_earlier_version_is_brought_up_to_date_inside_another_record_too() -> None:
    earlier = {"kind": "torchweld.thing", "version": 1, "number": 5}
    assert Marked.from_dict(earlier) == Marked(count=5, late=True)
    data = {"torchweld_holder": 1, "things": [earlier, {"count": 6}]}
    assert Holder.from_dict(data).things == (Marked(count=5, late=True), Marked(count=6))


@pytest.mark.parametrize("version", [0, 4, -1, True, None, "3", 10**9, []])
def test_another_version_is_refused_with_its_place_and_the_remedy(version: object) -> None:
    data = {"kind": "torchweld.thing", "version": version, "count": 1}
    says = r"has thing format (0|4|-1|unknown); this torchweld reads 3: make it again"
    with pytest.raises(TorchweldError, match=f"^the thing {says}"):
        Marked.from_dict(data)
    with pytest.raises(TorchweldError, match=rf"holder\.things\[0\] {says}"):
        Holder.from_dict({"torchweld_holder": 1, "things": [data]})


@pytest.mark.parametrize("data", [{}, {"count": 1}, {"kind": "another", "version": 3}, [], 3])
def test_what_has_no_mark_is_refused(data: Any) -> None:
    with pytest.raises(TorchweldError, match="is not a thing that torchweld saved"):
        Marked.from_dict(data)


@pytest.mark.parametrize(
    "text", ["Infinity", "NaN", "1e999", "1" + 400 * "0", '"Inf"', '"1.0"', '" inf"', "true"]
)
def test_other_ways_to_write_them_are_refused(text: str) -> None:
    with pytest.raises(RecordError, match=r"values\[0\] is .*; float was expected"):
        from_plain(Inner, json.loads(f'{{"name": "x", "values": [{text}]}}'))


@pytest.fixture
def found(brief_profiles: None) -> Profile:
    return profile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8), training=True)


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_a_profile_comes_back_as_it_was(found: Profile, tmp_path: Path, name: str) -> None:
    found.save(tmp_path / name)
    assert Profile.load(tmp_path / name) == found
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes().startswith(GZIP) == name.endswith(".gz")


def test_a_profile_with_an_open_interval_comes_back_as_it_was(
    found: Profile, tmp_path: Path
) -> None:
    check = TimeCheck(what="a step", corrected_us=1.0, timed_us=1.0, interval=(-1.0, math.inf))
    assert found.timing is not None
    open_ended = replace(found, timing=replace(found.timing, checks=(check,)))
    open_ended.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == open_ended
    assert str(Profile.load(tmp_path / "p.json")) == str(open_ended)


def test_a_profile_that_cannot_be_saved_leaves_what_was_there(
    found: Profile, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    for place in (tmp_path / "missing" / "p.json", tmp_path / "taken"):
        with pytest.raises(TorchweldError, match="cannot be written"):
            found.save(place)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "tw.read_trace reads traces"),
        ('{"traceEvents": []}', "tw.read_trace reads traces"),
        ("{}", "not a profile"),
        ('{"torchweld_profile": 99}', "format 99"),
        ('{"torchweld_profile": 1}', "damaged"),
        ('{"torchweld_profile": 1, "about": 3}', "damaged"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(TorchweldError, match=complaint):
        Profile.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TorchweldError, match=r"nothing\.json"):
        Profile.load(tmp_path / "nothing.json")
