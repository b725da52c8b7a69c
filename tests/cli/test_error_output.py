"""Errors on a terminal: wrapped between words, with what is to be pasted in one piece."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweld.cli.error_output import wrapped

LONG = (
    "torchweld: the plan does not fit: it was made on AMD EPYC 9B14, this is Intel Xeon Platinum; "
    "it was made with 2 threads, 1 here; plan again, or give another on_mismatch"
)


def test_a_short_line_is_left_alone() -> None:
    assert wrapped("torchweld: interrupted", 80) == "torchweld: interrupted"


@pytest.mark.parametrize("width", [30, 60, 80, 100, 300])
def test_a_long_line_ends_between_words_and_the_rest_is_indented(width: int) -> None:
    first, *rest = wrapped(LONG, width).split("\n")
    assert rest
    assert all(line.startswith("  ") and line[2] != " " for line in rest)
    assert all(len(line) <= min(width, 100) for line in (first, *rest))
    assert " ".join([first, *(line[2:] for line in rest)]) == LONG


@pytest.mark.parametrize(
    "whole",
    [
        "torchweld gate --baseline main model.py:make --input 8x768 --no-time --accept",
        'pip install "torchweld[models]"',
        "make -C some/folder/where/it/is setup",
        "'a folder with blanks/and a model.py:make'",
        "--history FILE",
        "--seconds 10",
        "/a/path/that/is/longer/than/any/line/of/this/terminal/will/ever/be/history.sqlite",
    ],
)
@pytest.mark.parametrize("width", [20, 40, 60])
def test_what_is_to_be_pasted_stays_in_one_piece(whole: str, width: int) -> None:
    text = f"torchweld: the machine's state is not what it was; this would help: {whole}; or try it"
    assert whole in wrapped(text, width)
    assert len(wrapped(text, width).split("\n")) > 1


def test_an_apostrophe_is_no_quote() -> None:
    text = "torchweld: the model's own code and the plan's own words are not the same as they were"
    assert max(len(line) for line in wrapped(text, 40).split("\n")) <= 40


def test_lines_of_an_error_stay_lines_with_their_margin() -> None:
    text = "torchweld: three reasons:\n  " + "one reason that is long " * 6 + "\n  another"
    first, *rest, last = wrapped(text, 60).split("\n")
    assert (first, last) == ("torchweld: three reasons:", "  another")
    assert rest[0].startswith("  one")
    assert all(line.startswith("    ") for line in rest[1:])


@given(st.text(st.characters(exclude_categories=["C"])), st.integers(1, 200))
def test_no_word_is_lost_or_broken(text: str, width: int) -> None:
    assert wrapped(text, width).split() == text.split()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_lines_and_a_pipe_one(tmp_path: Path) -> None:
    import pty

    command = [sys.executable, "-m", "torchweld", "gate", "--baseline", "main", "gpt"]
    env = {**os.environ, "TORCHWELD_HISTORY": str(tmp_path / "history.sqlite"), "COLUMNS": "50"}
    piped = subprocess.run(command, env=env, capture_output=True, text=True).stderr
    assert piped.count("\n") == 1
    ours, theirs = pty.openpty()
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode().replace("\r\n", "\n")
    os.close(ours)
    assert shown.split() == piped.split()
    assert shown.count("\n") > 1
    assert "torchweld gate --baseline main gpt --accept" in shown
