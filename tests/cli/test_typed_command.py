"""A command as a page gives it names no folder of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchweld.cli.typed_command import typed, typed_command


def test_folders_of_the_machine_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    inside, outside = here / "runs" / "a.json", tmp_path / "else" / "b c.html"
    with typed(["report", str(inside), "--out", str(outside), f"--history={inside}", "sub/x", "/"]):
        assert typed_command() == (
            "torchweld report runs/a.json --out 'b c.html' --history=runs/a.json sub/x /"
        )
