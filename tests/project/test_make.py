"""`make demo` and `make test` print what a person wants to read; `scripts/quietly` does it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUIETLY = ROOT / "scripts" / "quietly"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# Stands for Python: makes an environment whose pip is noisy, and fails where it is told to.
PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then
  mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
  printf '#!/bin/sh\\necho "torchweld $*: 1.5x faster"\\n' > "$3/bin/torchweld"
  chmod +x "$3/bin/torchweld"
elif [ "$2" = pip ]; then
  echo "Collecting $*"
  echo "a warning of pip" >&2
  case "$*" in *"$BREAKS"*) echo "no matching distribution"; exit 3;; esac
else
  echo "tests of $*"
fi
"""


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, "MAKEFLAGS": "", "BREAKS": "nothing", **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def make(target: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    given = ("TORCH=2.13.0", f"PYTHON={python}", f"VENV={folder / 'venv'}")
    return run("make", "--no-print-directory", target, *given, **env)


def without_times(text: str) -> list[str]:
    return re.sub(r"\b\d+ s\b", "N s", text).splitlines()


def test_success_is_one_line_with_its_time() -> None:
    done = run(QUIETLY, "counting", "sh", "-c", "echo out; echo err >&2")
    assert (done.returncode, without_times(done.stdout)) == (0, ["counting … N s"])


def test_a_failure_shows_everything_and_passes_the_exit_code_on() -> None:
    done = run(QUIETLY, "counting", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert done.returncode == 7
    assert without_times(done.stdout) == [
        "counting … failed after N s, with exit code 7:",
        "",
        r"$ sh -c echo\ out\;\ echo\ err\ \>\&2\;\ exit\ 7",
        "out",
        "err",
    ]


def test_a_command_that_does_not_exist() -> None:
    done = run(QUIETLY, "counting", "no-such-command")
    assert done.returncode == 127
    assert "not found" in done.stdout


def test_the_demo_is_its_stages_its_result_and_what_comes_next(tmp_path: Path) -> None:
    done = make("demo", tmp_path)
    venv = tmp_path / "venv"
    assert done.returncode == 0, done.stdout
    assert without_times(done.stdout) == [
        f"making {venv} … N s",
        "installing torch 2.13.0 … N s",
        "building the kernels, installing the tools … N s",
        "",
        "torchweld fuse: 1.5x faster",
        "",
        "Next, a model of your own: make() in my/model.py returns it, with inputs to call it with.",
        f"  {venv}/bin/torchweld fuse my/model.py:make",
    ]
    again = make("demo", tmp_path)
    assert again.stdout.splitlines()[:2] == ["", "torchweld fuse: 1.5x faster"]


def test_the_tests_are_set_up_quietly_with_a_real_model(tmp_path: Path) -> None:
    done = make("test", tmp_path)
    assert done.returncode == 0, done.stdout
    assert without_times(done.stdout)[1:] == [
        "installing torch 2.13.0 … N s",
        "building the kernels, installing the tools … N s",
        "installing the weights of all-MiniLM-L6-v2 … N s",
        "tests of -m pytest -q -n 2 --dist loadfile",
    ]


def test_a_stage_that_fails_shows_pips_whole_output_and_is_tried_again(tmp_path: Path) -> None:
    done = make("demo", tmp_path, BREAKS="torch==")
    assert done.returncode != 0
    assert "exit code 3:" in done.stdout
    assert "Collecting -m pip install torch==2.13.0" in done.stdout
    assert "a warning of pip\nno matching distribution" in done.stdout
    assert "faster" not in done.stdout
    assert make("demo", tmp_path).returncode == 0


def test_what_builds_the_page_is_there_before_the_tests() -> None:
    """Or the test that builds the page again and compares would be skipped."""
    steps = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert steps.index("web-tools") < steps.index("test")
    done = run("make", "-n", "--no-print-directory", "web-tools")
    assert "web/node_modules/.installed" in done.stdout
