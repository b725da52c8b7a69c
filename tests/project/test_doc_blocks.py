"""Blocks of the pages run: Python in order, in one namespace per page, and commands marked quick.

Models are small, budgets for measuring are cut, and every profile counts as measured: what is
tested is that the code works as it stands, not how fast anything is.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from scripts import doc_commands, doc_pages
from scripts.doc_pages import Fence, fences_of

from torchweld.cli.main import run
from torchweld.plans import plan_options

PAGES = doc_pages.page_names()
TRACES = Path(__file__).parents[1] / "traces"

pytestmark = pytest.mark.usefixtures("brief_profiles")


def pages_with(language: str, mark: str = "") -> list[str]:
    found = [fence for page in PAGES for fence in fences_of(page) if fence.language == language]
    kept = [fence.page for fence in found if not mark or fence.mark(mark) is not None]
    return list(dict.fromkeys(kept))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a trace in it; what is kept is kept there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHWELD_HISTORY", str(tmp_path / "history.sqlite"))
    monkeypatch.setattr(plan_options, "BUDGET_S", 1.0)
    monkeypatch.setattr(plan_options, "QUICK_S", 1.0)
    shutil.copy(TRACES / "a100_triton_fused.json.gz", tmp_path / "trace.json.gz")
    return tmp_path


def execute(fence: Fence, namespace: dict[str, Any]) -> str:
    """Runs a block, with what has to run before; returns what it printed, or raised."""
    before = fence.mark("before")
    if before is not None:
        exec(compile(before, f"before {fence.place}", "exec"), namespace)
    if fence.mark("not run") is not None or fence.mark("source") is not None:
        return ""  # or it stands in an example, which runs
    code = compile("\n" * (fence.line - 1) + fence.text, fence.page, "exec")
    expected, out = fence.mark("raises"), io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(code, namespace)
        except Exception as error:
            if expected is None or type(error).__name__ != expected.strip():
                raise
            return str(error)
    assert expected is None, f"{fence.place} raised nothing; it is to raise {expected}"
    return out.getvalue()


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run(page: str) -> None:
    check(fences_of(page), page)


def check(fences: list[Fence], page: str) -> None:
    namespace: dict[str, Any] = {"__name__": f"docs_{Path(page).stem}"}
    said = ""
    for fence in fences:
        if fence.language == "python":
            said = execute(fence, namespace)
        elif fence.language == "text" and fence.mark("printed") is not None:
            assert said.rstrip("\n") == fence.text.rstrip("\n"), fence.place


@pytest.mark.parametrize("page", pages_with("bash", "quick"))
def test_quick_commands_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for fence in fences_of(page):
        if fence.language not in doc_commands.LANGUAGES or fence.mark("quick") is None:
            continue
        *others, last = doc_commands.commands_of(fence)
        for words in (*others, last):
            assert words[0] == "torchweld", f"{fence.place}: only torchweld runs here"
            code = run(words[1:])
            wanted = int(fence.mark("quick") or 0) if words is last else 0
            assert code == wanted, f"{fence.place}: {capsys.readouterr().err}"


def test_several_pages_have_blocks_that_run() -> None:
    assert len(pages_with("python")) > 15
    assert len(pages_with("bash", "quick")) > 2


# --- the reader of pages itself ---------------------------------------------

PAGE = """
<!-- before:
import math
-->
```python
x = math.floor(2.5)
print(x)
```
<!-- printed -->
```text
{printed}
```
<!-- raises: {error} -->
```python
x / 0
```
<!-- not run: there is no such name -->
```python
nonsense
```
"""


def test_blocks_of_a_page_share_names_and_are_held_to_what_they_print() -> None:
    def fences(printed: str = "2", error: str = "ZeroDivisionError") -> list[Fence]:
        return fences_of("x.md", PAGE.format(printed=printed, error=error))

    check(fences(), "x.md")
    with pytest.raises(AssertionError, match=r"x\.md:11"):
        check(fences(printed="3"), "x.md")
    with pytest.raises(ZeroDivisionError):
        check(fences(error="KeyError"), "x.md")
    with pytest.raises(AssertionError, match="raised nothing"):
        check(fences_of("x.md", "<!-- raises: KeyError -->\n```python\n1\n```\n"), "x.md")


def test_an_error_names_the_line_of_the_page() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        check(fences_of("x.md", "one\n\n```python\n1\n1 / 0\n```\n"), "x.md")
    trace = caught.value.__traceback__
    lines = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "x.md":
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    assert lines == [5]
