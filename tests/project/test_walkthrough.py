"""The walk-through says what its scripts print; the cheat sheet knows every rule of the package."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import fill_docs
from scripts.doc_pages import ROOT
from scripts.fill_docs import DocsError

from torchweld import findings
from torchweld.profiles.accounting.time_splits import PARTS

PAGE = fill_docs.WALKTHROUGH.read_text()
SHEET = (ROOT / "docs" / "cheatsheet.md").read_text()
SCRIPTS = sorted(path.name for path in fill_docs.EXAMPLES.glob("0*.py"))
COMPILES = ("02_linear.py", "04_compiled.py")


@pytest.mark.usefixtures("brief_profiles")
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_shows_what_a_script_prints(script: str) -> None:
    """All but what follows a tilde: times, shares, bars, how fast."""
    if script in COMPILES and shutil.which("c++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    path = f"examples/{script}"
    blocks = [block for block in fill_docs.blocks_of(PAGE) if block.path == path]
    assert any(block.kind == "output" for block in blocks)
    output = fill_docs.output_of(ROOT / path, "--seconds", "0.01")
    found = list(fill_docs.drifted(blocks, fill_docs.wanted_texts(blocks, {path: output})))
    assert not found, "\n".join(
        [*found, "run python -m scripts.fill_docs, and read the text again"]
    )


def test_the_page_shows_the_code_that_runs() -> None:
    blocks = [block for block in fill_docs.blocks_of(PAGE) if block.kind == "source"]
    assert blocks
    found = list(fill_docs.drifted(blocks, fill_docs.wanted_texts(blocks, {})))
    assert not found, "\n".join(found)


def test_a_script_says_what_can_be_chosen() -> None:
    script = fill_docs.EXAMPLES / SCRIPTS[0]
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True
    )
    assert "how many kernels" in done.stdout
    assert "--device" in done.stdout


@pytest.mark.usefixtures("brief_profiles")
def test_a_script_writes_a_page_and_nothing_else_and_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, page = fill_docs.EXAMPLES / SCRIPTS[0], tmp_path / "page.html"
    monkeypatch.chdir(tmp_path)
    fill_docs.output_of(script, "--report", page.name)
    assert list(tmp_path.iterdir()) == [page]
    assert f"wrote {page}" in capsys.readouterr().err
    written = page.read_text(encoding="utf-8")
    assert written.lower().startswith("<!doctype html>")
    assert "aten::mm" in written
    with pytest.raises(SystemExit):
        fill_docs.output_of(script, "--report", str(page))
    assert "is there already" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == written
    with pytest.raises(SystemExit):
        fill_docs.output_of(script, "--report", str(tmp_path / "missing" / "page.html"))
    assert "there is no folder" in capsys.readouterr().err


# ---- the comparison itself ----

SAID = """\
<!-- output: examples/a.py, The ops -->
```text
aten::mm   16x256            ~  12.0 µs  ▇▇▇
2 kernels
~ only here
```
"""
TRUE = """
The ops
-------
aten::mm   16x256            ~   7.5 µs  ▇
2 kernels

The rest
--------
more
"""


def differences(page: str, output: str) -> list[str]:
    blocks = fill_docs.blocks_of(page)
    return list(
        fill_docs.drifted(blocks, fill_docs.wanted_texts(blocks, {"examples/a.py": output}))
    )


def test_only_what_follows_a_tilde_may_differ() -> None:
    assert differences(SAID, TRUE) == []
    for said, true in (("16x256", "16x255"), ("2 kernels", "3 kernels"), ("aten::mm", "aten::bmm")):
        (found,) = differences(SAID, TRUE.replace(said, true))
        assert true in found
    assert differences(SAID, TRUE.replace("2 kernels\n", ""))
    assert differences(SAID, TRUE.replace("~   7.5 µs  ▇", ""))  # a time that is no longer shown


def test_a_block_is_filled_and_then_agrees() -> None:
    other = TRUE.replace("2 kernels", "3 kernels")
    texts = fill_docs.wanted_texts(fill_docs.blocks_of(SAID), {"examples/a.py": other})
    page = fill_docs.filled(SAID, texts)
    assert "3 kernels" in page
    assert "7.5 µs" in page  # all of the block is of one run
    assert differences(page, other) == []


def test_an_empty_block_is_filled_too() -> None:
    comment, fence = SAID.splitlines(keepends=True)[:2]
    empty = f"before\n{comment}{fence}```\nafter\n"
    texts = fill_docs.wanted_texts(fill_docs.blocks_of(empty), {"examples/a.py": TRUE})
    (text,) = texts.values()
    assert fill_docs.filled(empty, texts) == f"before\n{comment}{fence}{text}```\nafter\n"


def test_a_block_without_a_source_is_an_error() -> None:
    with pytest.raises(DocsError, match="prints no 'The ops', but The others"):
        differences(SAID, TRUE.replace("The ops\n-------", "The others\n----------"))
    with pytest.raises(DocsError, match="1 comments name a source, but 0 blocks"):
        fill_docs.blocks_of("<!-- output: examples/a.py, The ops -->\nno block\n")
    with pytest.raises(DocsError, match="no class or function 'Nothing'"):
        fill_docs.source_of(fill_docs.EXAMPLES / "look.py", "Nothing")


# ---- the cheat sheet ----


def rules_of_the_package() -> set[str]:
    """Every `rule="…"` in the sources of the findings."""
    found = set()
    for path in Path(findings.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "rule":
                assert not isinstance(node.value, ast.JoinedStr)
                if isinstance(node.value, ast.Constant):
                    found.add(str(node.value.value))
    return found


def test_the_cheat_sheet_has_every_rule_and_no_other() -> None:
    rules = rules_of_the_package()
    assert len(rules) == len(findings.RULES)
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| `([^|]+)` \| [^|]+ \|$", SHEET, re.MULTILINE)
    assert set(rows) == rules


def test_the_cheat_sheet_has_every_part_of_the_account() -> None:
    for part in PARTS:
        name = part.removesuffix("_us").replace("_", " ")
        assert f"**{name}**" in SHEET, name
