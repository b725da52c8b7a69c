"""What the page is drawn with: built from `web/`, and in step with the records."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import Bounds
from torchweld.findings.finding import Finding
from torchweld.pages.page_html import asset
from torchweld.pages.page_records import FRAME_KINDS, Fate, FrameKind, Page
from torchweld.profiles.accounting.time_splits import Split
from torchweld.profiles.profile import About

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"
ASSETS = ROOT / "src" / "torchweld" / "pages" / "assets"
NAMED = {Fate: "Fate", FrameKind: "FrameKind"}
STATES = ("both", "new", "gone", "welded")


def script_type(kind: Any) -> str:
    """A type of Python as TypeScript writes it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in NAMED:
        return NAMED[kind]
    if origin is Annotated:
        odd = isinstance(arguments[1], Bounds) and arguments[1].odd
        return "Measured" if odd else script_type(arguments[0])
    if origin is Literal:
        named = "FrameState" if arguments == STATES else ""
        return named or " | ".join(f'"{one}"' for one in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(script_type(one) for one in arguments)
    if origin is tuple:
        return tuple_type(arguments)
    plain = {str: "string", bool: "boolean", int: "number", float: "number"}
    return {**plain, types.NoneType: "null"}.get(kind, getattr(kind, "__name__", "?"))


def tuple_type(arguments: tuple[Any, ...]) -> str:
    if arguments[-1] is Ellipsis:
        inner = script_type(arguments[0])
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    text = f"[{', '.join(script_type(one) for one in arguments)}]"
    return "Interval" if text == "[Measured, Measured]" else text


def records_of(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The record and all records in it."""
    if dataclasses.is_dataclass(kind):
        if isinstance(kind, type) and kind.__name__ not in found and kind is not NotMeasured:
            found[kind.__name__] = kind
            hints = get_type_hints(kind, include_extras=True)
            for field in dataclasses.fields(kind):
                records_of(hints[field.name], found)
        return found
    for argument in get_args(kind):
        records_of(argument, found)
    return found


def expected_lines(kind: Any) -> Iterator[str]:
    """Fields with a default are left out of JSON where they have it."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        needed = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        yield f"{field.name}{'' if needed else '?'}: {script_type(hints[field.name])};"


def test_the_script_reads_what_the_records_say() -> None:
    text = (WEB / "src" / "page_data.ts").read_text()
    said = {
        name: [line.strip() for line in body.strip().splitlines()]
        for name, body in re.findall(r"export interface (\w+) \{(.*?)\n\}", text, re.DOTALL)
    }
    records = records_of(Page, {})
    assert {"PageSide", "Flame", "Strip", Split.__name__, Finding.__name__, About.__name__} <= set(
        records
    )
    assert set(said) - {"NotMeasured"} == set(records)
    for name, kind in records.items():
        assert said[name] == list(expected_lines(kind)), name
    kinds = ", ".join(f'"{kind}"' for kind in FRAME_KINDS)
    assert f"FRAME_KINDS: FrameKind[] = [{kinds}];" in text
    for literal, name in NAMED.items():
        allowed = " | ".join(f'"{one}"' for one in get_args(literal))
        assert f"export type {name} = {allowed};" in text


def test_the_assets_are_built_from_the_sources(tmp_path: Path) -> None:
    if shutil.which("node") is None or not (WEB / "node_modules" / "esbuild").is_dir():
        pytest.skip("no node, or no web/node_modules: `make web` brings them")
    command = ["node", "build.mjs", str(tmp_path)]
    done = subprocess.run(command, cwd=WEB, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = {path.name: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    kept = {path.name: path.read_bytes() for path in sorted(ASSETS.iterdir())}
    assert kept.keys() == built.keys()
    for name, content in built.items():
        assert kept[name] == content, f"{name} is not what web/ gives: run `make web`"


def test_every_library_in_the_script_has_its_licence() -> None:
    text = asset("licences.txt")
    heads = re.findall(r"^(\S+) \S+ \((\S+)\)\n=+$", text, re.MULTILINE)
    assert {licence for _, licence in heads} <= {"ISC", "BSD-3-Clause", "MIT", "Apache-2.0"}
    assert text.count("Copyright") >= len(heads)
