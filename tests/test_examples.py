"""The examples run, and do what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from torchweld.planning import planner

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_the_whole_model_of_the_readme_runs_as_it_stands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Welded or not, as this machine measures; a call of original code would warn, and fail."""
    monkeypatch.setattr(planner, "QUICK_S", 1.0)
    section = (ROOT / "README.md").read_text().partition("## A whole model")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    exec(compile(found[1], "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "welded" in out
    assert "never" not in out


def test_sentence_embeddings_keep_their_similarities(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "sentence_embeddings.py"))
    example["main"](seconds=0.2)
    out = capsys.readouterr().out
    assert "is closest to" in out
    moved = re.search(r"moved by at most (\S+)", out)
    assert moved is not None
    assert float(moved[1]) < 1e-5  # similarities of unit vectors, in float32
    assert "the query alone" in out
    assert "eight documents" in out


def test_tokens_of_a_sentence_do_not_depend_on_the_others() -> None:
    example = runpy.run_path(str(EXAMPLES / "sentence_embeddings.py"))
    alone = example["tokenize"](["Bread, water and salt"], 100).kwargs["input_ids"]
    both = example["tokenize"](["Bread, water and salt", "a b c d e f"], 100).kwargs
    assert both["input_ids"][0, :4].tolist() == alone[0].tolist()
    assert both["attention_mask"].sum(dim=1).tolist() == [4, 6]
