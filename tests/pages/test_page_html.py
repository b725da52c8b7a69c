"""The page as a file: its policy, its data, and names that must stay names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from tests.support.made_pages import HOSTILE, HOSTILE_KIND, large_flame, made_page, unmeasured_page

from torchweld.pages.page_html import DATA_ID, asset, embedded, hash_of, html_of
from torchweld.pages.page_records import Page


class Elements(HTMLParser):
    """What a browser would find: tags with attributes, and the texts of scripts and styles."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}
        self.closed = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.closed = False

    def handle_endtag(self, tag: str) -> None:
        self.closed = True

    def handle_data(self, data: str) -> None:
        here = len(self.tags) - 1
        if self.closed:  # what stands between elements belongs to none
            return
        self.texts[here] = self.texts.get(here, "") + data

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [
            (attrs, self.texts.get(at, ""))
            for at, (name, attrs) in enumerate(self.tags)
            if name == tag
        ]


def parse(page: Page) -> Elements:
    found = Elements()
    found.feed(html_of(page))
    found.close()
    return found


def policy_of(elements: Elements) -> dict[str, str]:
    (content,) = (
        attrs["content"]
        for attrs, _ in elements.all("meta")
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert content is not None
    found = {}
    for rule in content.split(";"):
        name, value = rule.split(None, 1)
        found[name] = value
    return found


def test_the_same_page_gives_the_same_bytes() -> None:
    assert html_of(made_page()) == html_of(made_page())


@pytest.mark.parametrize("make", [made_page, unmeasured_page])
def test_the_data_in_the_page_are_the_page(make: Callable[[], Page]) -> None:
    page = make()
    scripts = parse(page).all("script")
    (data,) = (text for attrs, text in scripts if attrs.get("id") == DATA_ID)
    assert Page.from_json(data) == page


def test_a_policy_allows_this_script_and_this_style_alone() -> None:
    elements = parse(made_page())
    policy = policy_of(elements)
    (style,) = (text for _, text in elements.all("style"))
    (script,) = (text for attrs, text in elements.all("script") if not attrs)
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == f"'{hash_of(script)}'"
    assert policy["style-src"] == f"'{hash_of(style)}'"
    assert set(policy) == {
        "default-src",
        "script-src",
        "style-src",
        "img-src",
        "base-uri",
        "form-action",
    }


def test_nothing_comes_from_elsewhere() -> None:
    elements = parse(made_page())
    for tag, attrs in elements.tags:
        assert "src" not in attrs, (tag, attrs)
        assert attrs.get("href", "data:,") == "data:,", (tag, attrs)
        assert "style" not in attrs, "the policy forbids style attributes"
    assert not re.search(r"url\((?!#)", asset("page.css").replace('"', ""))
    assert "@import" not in asset("page.css")


def test_names_that_are_markup_stay_text() -> None:
    elements = parse(made_page())
    assert [attrs for attrs, _ in elements.all("script")] == [
        {"type": "application/json", "id": DATA_ID},
        {},
    ]
    assert elements.all("img") == []
    ((_, title),) = elements.all("title")
    assert HOSTILE in title


def test_json_in_the_page_has_nothing_that_opens_a_tag() -> None:
    text = embedded(made_page())
    assert "<" not in text
    assert json.dumps(HOSTILE_KIND).strip('"') in text.replace("\\u003c", "<")


def test_the_verdict_is_there_without_a_script() -> None:
    page = made_page()
    verdicts = [text for attrs, text in parse(page).all("h2") if attrs["id"] == "verdict-title"]
    assert [text.strip() for text in verdicts] == [page.verdict]


def test_the_script_does_not_close_itself() -> None:
    assert "</script" not in asset("page.js").lower()
    assert "<!--" not in asset("page.js")
    assert "</style" not in asset("page.css").lower()


def test_a_large_flame_adds_up() -> None:
    flame = large_flame(2_000)
    assert sum(flame.own_us) == pytest.approx(flame.total_us)
    assert len(flame.parent) == 2_000
