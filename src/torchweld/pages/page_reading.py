"""Reads a report back: the page that `html_of` made, or its data as JSON -> `Page`.

Files may come from anywhere. Nothing in them is run; what is larger than any page, of another
version or not of the declared types is refused, with the name of the file.
"""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path

from torchweld.core.errors import TorchweldError
from torchweld.core.files import parse_json, read_whole
from torchweld.pages.page_html import DATA_ID
from torchweld.pages.page_records import Page

# Pages have some megabytes; a trace of 200,000 events gives less than 15.
MOST_BYTES = 1 << 28
REMEDY = "give a page that torchweld report, or --report of another command, has written"


def read_page(path: str | os.PathLike[str]) -> Page:
    """The page in a file, HTML or JSON, compressed or not."""
    name = str(Path(path))
    text = read_whole(path, "report", MOST_BYTES).decode(errors="replace")
    if text.lstrip("\ufeff \t\r\n").startswith("<"):
        text = data_in(text, name)
    try:
        return Page.from_dict(parse_json(text))
    except TorchweldError as error:
        raise TorchweldError(f"{name} cannot be read: {error}") from error


def data_in(html: str, name: str) -> str:
    """The JSON that a page carries."""
    finder = _DataFinder()
    finder.feed(html)
    finder.close()
    if len(finder.found) != 1 or finder.open:
        what = "no data" if not finder.found else "more than one set of data, or half of one"
        raise TorchweldError(f"{name} is not a report of torchweld: it has {what}; {REMEDY}")
    return "".join(finder.found[0])


class _DataFinder(HTMLParser):
    """The texts of the elements that carry a page's data."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.found: list[list[str]] = []
        self.open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script" and given.get("id") == DATA_ID:
            self.open = given.get("type") == "application/json"
            self.found.append([])

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag != "script"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.found[-1].append(data)
