"""A page reads back as it was; whatever else a file holds is refused with its name."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from tests.support.block_profiles import blocks

from torchweld.core.errors import TorchweldError
from torchweld.pages import page_reading
from torchweld.pages.page_building import page_of
from torchweld.pages.page_html import html_of
from torchweld.pages.page_reading import read_page
from torchweld.pages.page_records import Page
from torchweld.pages.page_sections import SECTIONS, sections_of

EVIL = "</script><script>alert(1)</script><!-- <b>&amp;\u2028 \x00 “ü” '\""


def test_a_page_reads_back_from_html_and_from_json(tmp_path: Path) -> None:
    page = page_of([blocks()], title=EVIL, notes=[EVIL], command=EVIL)
    (tmp_path / "a.html").write_text(html_of(page))
    assert read_page(tmp_path / "a.html") == page
    page.save(tmp_path / "a.json.gz")
    assert read_page(tmp_path / "a.json.gz") == page
    (tmp_path / "b.html.gz").write_bytes(gzip.compress(html_of(page).encode()))
    assert read_page(str(tmp_path / "b.html.gz")) == page


def test_a_page_of_version_1_is_read() -> None:
    page = read_page(Path(__file__).parents[1] / "data" / "report_1.html")
    assert page.title == "a page of version 1"
    assert [side.name for side in page.sides] == ["before", "after"]
    assert not page.redacted
    wanted = set(SECTIONS) - {"timeline", "device", "memory"}
    assert wanted <= set(sections_of(page))
    assert read_again(page) == page


def read_again(page: Page) -> Page:
    found: Page = Page.from_json(page.to_json())
    return found


def html(data: str, more: str = "") -> str:
    start = '<!doctype html><script type="application/json" id="torchweld-report">'
    return f"{start}{data}</script>{more}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<html><p>hello</p></html>", "is not a report of torchweld: it has no data"),
        (html("{", html("{}")), "more than one set of data"),
        ('<script type="application/json" id="torchweld-report">{}', "half of one"),
        ('<script id="torchweld-report">{"torchweld_report": 1}</script>', "it is not JSON"),
        (html("{"), "it is not JSON"),
        (html("[]"), "is not a report that torchweld saved"),
        (html('{"torchweld_report": 99, "title": "", "verdict": ""}'), "report format 99; this"),
        (html('{"torchweld_report": 3, "new": {"a": [1]}, "title": {}}'), "report format 3; this"),
        (html('{"torchweld_report": "3.1", "new": 1}'), "report format unknown; this"),
        (html('{"torchweld_report": 1, "title": 3, "verdict": ""}'), r"report.title is 3"),
        ('{"torchweld_report": 1}', "lacks title, verdict"),
        ("", "it is not JSON"),
    ],
)
def test_other_files_are_refused_with_their_name(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "odd.html").write_text(text)
    with pytest.raises(TorchweldError, match=why) as caught:
        read_page(tmp_path / "odd.html")
    assert str(tmp_path / "odd.html") in str(caught.value)


def test_nothing_larger_than_a_page_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.html").write_text(html_of(Page(title="", verdict="")))
    monkeypatch.setattr(page_reading, "MOST_BYTES", 100)
    with pytest.raises(TorchweldError, match="more than 100 bytes"):
        read_page(tmp_path / "a.html")
    with pytest.raises(TorchweldError, match="cannot be read"):
        read_page(tmp_path / "not there.html")
