"""Reads pages of documentation: their fenced blocks with marks, their links and their anchors.

Text in, data out; the tests of the docs and the hooks of the site use it. `docs/README.md` says
which marks there are.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
INDEX = "docs/README.md"

_FENCE = re.compile(
    r"(?P<comments>(?:^[ ]*<!--(?:(?!-->).)*-->\s*?\n\s*)*)"
    r"^(?P<indent>[ ]*)(?P<ticks>`{3,})(?P<language>[\w-]*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)(?P=ticks)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")
_HEADING = re.compile(r"^(#{1,6}) +(.+?) *#*$", re.MULTILINE)
_OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:")


@dataclass(frozen=True, kw_only=True)
class Fence:
    """A fenced block; `line` is that of its first line of text, `marks` the comments before it."""

    page: str
    line: int
    language: str
    text: str
    marks: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def mark(self, name: str) -> str | None:
        """What follows "name:" in the comment before the block; "" if nothing does."""
        for mark in self.marks:
            found, _, rest = mark.partition(":")
            if found == name:
                return rest
        return None


@dataclass(frozen=True, kw_only=True)
class PageLink:
    """`path` is relative to the repository's root; `anchor` is without its #."""

    page: str
    line: int
    target: str
    path: str
    anchor: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def page_names() -> list[str]:
    """Pages that users read, relative to the root: README, its neighbours and all of docs."""
    root = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    return [*root, *sorted(path.relative_to(ROOT).as_posix() for path in docs_files())]


def docs_files() -> Iterator[Path]:
    return (ROOT / "docs").rglob("*.md")


def read_page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences_of(page: str, text: str | None = None) -> list[Fence]:
    """All fenced blocks of a page, in order."""
    text = read_page(page) if text is None else text
    found = []
    for match in _FENCE.finditer(text):
        indent = match["indent"]
        lines = match["text"].splitlines(keepends=True)
        found.append(
            Fence(
                page=page,
                line=text.count("\n", 0, match.start("text")) + 1,
                language=match["language"],
                text="".join(line.removeprefix(indent) for line in lines),
                marks=tuple(mark.strip(" ") for mark in _COMMENT.findall(match["comments"])),
            )
        )
    return found


def code_spans_of(page: str) -> list[tuple[int, str]]:
    """Line and text of all code between single backticks."""
    text = _blanked(read_page(page), _FENCE)
    spans = _CODE_SPAN.finditer(text)
    return [(text.count("\n", 0, span.start()) + 1, " ".join(span[2].split())) for span in spans]


def links_of(page: str, text: str | None = None) -> list[PageLink]:
    """Links to other files and anchors of the repository; not those to other hosts."""
    text = prose_of(read_page(page) if text is None else text)
    return [
        link_to(page, match["target"], text.count("\n", 0, match.start()) + 1)
        for match in _LINK.finditer(text)
        if not _OUTSIDE.match(match["target"])
    ]


def link_to(page: str, target: str, line: int = 0) -> PageLink:
    """A link as `page` writes it, resolved."""
    name, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else page
    return PageLink(page=page, line=line, target=target, path=path, anchor=anchor)


def relinked(page: str, text: str, rewrite: dict[str, str]) -> str:
    """`text` with the targets of its links replaced; code is left alone."""
    prose = prose_of(text)
    parts, end = [], 0
    for match in _LINK.finditer(prose):
        new = rewrite.get(match["target"])
        if new is not None:
            parts += [text[end : match.start("target")], new]
            end = match.end("target")
    return "".join([*parts, text[end:]])


def headings_of(text: str) -> list[tuple[int, str]]:
    """Level and text of every heading."""
    bare = _blanked(text, _FENCE)
    return [(len(match[1]), match[2]) for match in _HEADING.finditer(bare)]


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts and the site make them."""
    seen: Counter[str] = Counter()
    found = set()
    for _, heading in headings_of(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", ""))
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def prose_of(text: str) -> str:
    """`text` with code and comments blanked out; every character keeps its place."""
    return _blanked(_blanked(_blanked(text, _FENCE), _COMMENT), _CODE_SPAN)


def _blanked(text: str, what: re.Pattern[str]) -> str:
    return what.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
