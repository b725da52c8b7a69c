"""The example of a workflow in docs/gate.md: its commands are real ones, and its shell is right."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from scripts.doc_pages import fences_of
from tests.support.busy import busy_cores
from tests.support.gate_targets import write_model
from tests.support.made_comparisons import comparison

from torchweld.cli.main import run
from torchweld.core.not_measured import NotMeasured
from torchweld.gates import gate_run
from torchweld.gates import rivalry as against
from torchweld.gates.gate_run import Rival
from torchweld.plans import planner
from torchweld.plans.known_speeds import table_here

BASH = pytest.mark.skipif(sys.platform == "win32", reason="the workflow runs on Linux")


def scripts() -> list[str]:
    """What the workflow runs, step by step."""
    (workflow,) = (fence.text for fence in fences_of("docs/gate.md") if fence.language == "yaml")
    found = []
    for indent, first, rest in re.findall(
        r"^( +)(?:- )?run: (.*)\n((?:\1 {2,}.*\n)*)", workflow, flags=re.MULTILINE
    ):
        del indent
        found.append(dedent(rest) if first == "|" else first)
    return found


def commands(text: str) -> list[list[str]]:
    """The arguments of every call of torchweld."""
    typed = [re.match(r"\s*torchweld (.*)", line) for line in text.splitlines()]
    return [shlex.split(re.split(r"\|\||\||;", one[1])[0], comments=True) for one in typed if one]


def test_every_step_of_the_workflow_is_found() -> None:
    install, accept, counters, time = scripts()
    assert "pip install" in install
    assert [len(commands(text)) for text in (accept, counters, time)] == [1, 1, 1]


def test_the_commands_of_the_workflow_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """The target branch, then a pull request that changes nothing; nothing is timed."""

    @contextmanager
    def rivalry(here: against.Contender, other: against.Contender, *_: Any) -> Iterator[Rival]:
        assert here.folder == tmp_path / "work"
        assert other.folder == tmp_path / "base"
        yield Rival(name="base", measure=lambda number: lambda: comparison(1.0))

    def plan(model: Any, given: Any, *, measure: bool, **options: Any) -> Any:
        assert not measure
        return planner.plan(model, given, force=True, **options)

    monkeypatch.setattr(against, "rivalry", rivalry)
    monkeypatch.setattr(gate_run, "make_plan", plan)
    monkeypatch.setenv("TORCHWELD_HISTORY", str(tmp_path / "work" / ".torchweld" / "h.sqlite"))
    for folder in ("work", "base"):
        write_model(tmp_path / folder / "my")
    monkeypatch.chdir(tmp_path / "work")
    for text in scripts():
        for arguments in commands(text):
            assert run(arguments) == 0, arguments


def called(name: str, *arguments: str, cwd: Path) -> None:
    subprocess.run([name, *arguments], cwd=cwd, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone of a repository whose main has the model, with nothing changed."""
    origin = tmp_path / "origin"
    write_model(origin / "my")
    called("git", "init", "-q", "-b", "main", cwd=origin)
    called("git", "add", ".", cwd=origin)
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    called("git", *author, "commit", "-q", "-m", "A model", cwd=origin)
    called("git", "clone", "-q", "origin", "work", cwd=tmp_path)
    return tmp_path / "work"


@BASH
@pytest.mark.skipif(shutil.which("git") is None, reason="the workflow needs git")
def test_the_workflow_passes_on_a_busy_runner(checkout: Path, tmp_path: Path) -> None:
    """Every step as GitHub runs it, in processes, while others use all of the runner's cores."""
    if isinstance(table := table_here(), NotMeasured):
        pytest.skip(f"nothing can be welded without timing: {table.reason}")
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "torchweld"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m torchweld "$@"\n')
    shim.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{shim.parent}:{os.environ['PATH']}",
        "TORCHWELD_HISTORY": str(checkout / ".torchweld" / "history.sqlite"),
    }
    with busy_cores(os.cpu_count() or 2):
        for script in scripts()[1:]:  # all but the installation
            text = re.sub(r"\$\{\{.*?\}\}", "main", script)
            done = subprocess.run(
                ["bash", "-e", "-c", text], cwd=checkout, env=env, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
            assert " 0 blocks welded" not in done.stdout


@BASH
@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (2, 0)])
def test_not_measured_is_a_warning_and_slower_fails(tmp_path: Path, code: int, ends: int) -> None:
    for name, text in (("torchweld", f"exit {code}"), ("git", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = re.sub(r"\$\{\{.*?\}\}", "main", scripts()[-1])
    done = subprocess.run(
        ["bash", "-e", "-c", script],  # as GitHub runs it
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == ends, done.stderr
    assert ("::warning::" in done.stdout) == (code == 2)
