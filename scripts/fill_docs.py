"""Fills the walk-through with what the examples print, and says where it has drifted from them.

    python -m scripts.fill_docs            runs the examples; rewrites all blocks if one has drifted
    python -m scripts.fill_docs --all      rewrites in any case: then all times are of one machine
    python -m scripts.fill_docs --check    changes nothing; exit code 1 if a block has drifted

A block stands under a comment that names its source:

    <!-- output: examples/03_geglu_mlp.py, The guess -->     the part under this heading
    <!-- source: examples/small_model.py, GeGLU -->          a class or function

What follows a `~` on a line belongs to one machine and is not compared; a line that begins with one
need not be there at all.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import re
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from scripts.doc_pages import ROOT, fences_of

EXAMPLES = ROOT / "examples"
WALKTHROUGH = ROOT / "docs" / "walkthrough.md"

KINDS = ("output", "source")


class DocsError(Exception):
    """A block names something that is not there."""


@dataclass(frozen=True, kw_only=True)
class DocBlock:
    kind: str
    path: str
    part: str
    text: str
    line: int  # of the page, where the text begins

    @property
    def name(self) -> str:
        return f"{self.path}, {self.part}"


def blocks_of(page: str) -> list[DocBlock]:
    """All blocks of a page; raises for a comment that is not followed by one."""
    found = []
    for fence in fences_of(WALKTHROUGH.name, page):
        for kind in KINDS:
            if (mark := fence.mark(kind)) is not None:
                path, _, part = mark.strip().partition(", ")
                block = DocBlock(kind=kind, path=path, part=part, text=fence.text, line=fence.line)
                found.append(block)
    comments = re.findall(rf"<!-- (?:{'|'.join(KINDS)}):", page)
    if len(comments) != len(found):
        raise DocsError(f"{len(comments)} comments name a source, but {len(found)} blocks follow")
    return found


def filled(page: str, texts: Mapping[str, str]) -> str:
    """The page with the text of every block replaced; texts by the block's name."""
    lines = page.splitlines(keepends=True)
    for block in reversed(blocks_of(page)):
        first = block.line - 1
        lines[first : first + block.text.count("\n")] = [texts[block.name]]
    return "".join(lines)


# ---- what belongs into a block ----


def output_of(script: Path, *args: str) -> str:
    """What an example prints."""
    out = io.StringIO()
    with (
        patch.object(sys, "argv", [str(script), *args]),
        patch.object(sys, "path", [str(script.parent), *sys.path]),
        contextlib.redirect_stdout(out),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def parts_of(output: str) -> dict[str, str]:
    """The text under each heading, which is a line with a line of dashes below it."""
    found: dict[str, list[str]] = {}
    lines = output.splitlines()
    current: list[str] = []
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line and below == "-" * len(line):
            if line in found:
                raise DocsError(f"two parts of an output are called {line!r}")
            current = found[line] = []
        else:
            current.append(line)
    return {name: "\n".join(text[1:]).strip("\n") + "\n" for name, text in found.items()}


def source_of(file: Path, name: str) -> str:
    """The lines of a class or function."""
    text = file.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]) + "\n"
    raise DocsError(f"{file.name} has no class or function {name!r}")


def wanted_texts(blocks: Sequence[DocBlock], outputs: Mapping[str, str]) -> dict[str, str]:
    """What belongs into each block; outputs by the path of the script."""
    found = {}
    for block in blocks:
        if block.kind == "source":
            found[block.name] = source_of(ROOT / block.path, block.part)
            continue
        parts = parts_of(outputs[block.path])
        if block.part not in parts:
            raise DocsError(f"{block.path} prints no {block.part!r}, but {', '.join(parts)}")
        found[block.name] = parts[block.part]
    return found


# ---- what has drifted ----


def portable(text: str) -> list[str]:
    """The lines that are the same on every machine."""
    lines = [line for line in text.splitlines() if not line.startswith("~")]
    return [re.sub(r"\s*~.*", " ~", line) for line in lines]


def drifted(blocks: Sequence[DocBlock], texts: Mapping[str, str]) -> Iterator[str]:
    """A diff for each block that says something else than its source."""
    for block in blocks:
        said, true = portable(block.text), portable(texts[block.name])
        if said != true:
            yield "\n".join(difflib.unified_diff(said, true, "in the page", block.name, "", "", 2))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--all", action="store_true", help="rewrite even if only times differ")
    chosen = parser.parse_args()
    page = WALKTHROUGH.read_text()
    blocks = blocks_of(page)
    scripts = sorted({block.path for block in blocks if block.kind == "output"})
    texts = wanted_texts(blocks, {path: output_of(ROOT / path) for path in scripts})
    found = list(drifted(blocks, texts))
    print(*found, sep="\n\n")
    print(f"{len(found)} of {len(blocks)} blocks have drifted")
    if chosen.check:
        return 1 if found else 0
    if found or chosen.all:
        WALKTHROUGH.write_text(filled(page, texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
