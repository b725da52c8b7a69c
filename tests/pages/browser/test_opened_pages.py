"""Reports as a whole: on a laptop, on a phone, in print, in both themes."""

from __future__ import annotations

import pytest
from tests.support.watched_pages import LAPTOP, PHONE, Opener, Size

from torchweld.pages.page_sections import SECTIONS, device_lanes

pytestmark = pytest.mark.browser

SECTION_IDS = "[...document.querySelectorAll('main > section')].map((one) => one.id)"


def test_the_fused_gpt_has_every_section_and_no_device(opened: Opener) -> None:
    page = opened("gpt fused")
    assert page.ask(SECTION_IDS) == [one for one in SECTIONS if one != "device"]
    assert device_lanes(page.page) == ()
    assert page.one("#flame-device").count() == 0
    assert "device stream" not in page.texts("#timeline")[0]


def test_an_a100_has_its_streams(opened: Opener) -> None:
    page = opened("a100_training_step")
    streams = len(device_lanes(page.page))
    assert streams > 0
    assert page.one("#flame-device").count() == 1
    assert f"{streams} device stream" in page.texts("#timeline")[0]


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("name", ["made", "gpt fused", "a100_training_step", "unmeasured"])
def test_the_page_never_scrolls_sideways(name: str, size: Size, opened: Opener) -> None:
    page = opened(name, size=size)
    page.ask("for (const one of document.querySelectorAll('details')) one.open = true")
    page.settled()
    width = page.ask("document.documentElement.scrollWidth")
    assert width <= size[0], page.ask(
        "(most) => [...document.querySelectorAll('body *')]"
        ".filter((one) => one.getBoundingClientRect().right > most && !one.closest('.scroll'))"
        ".map((one) => `${one.tagName} ${one.className}`).slice(0, 5)",
        size[0],
    )


# Pairs of neighbours that lie over each other, by their texts.
OVERLAPS = """(selector) => {
  const all = [...document.querySelectorAll(selector)].map((one) => {
    const range = document.createRange();
    range.selectNodeContents(one);
    return [one.textContent, range.getBoundingClientRect()];
  });
  return all.slice(1).flatMap(([text, box], i) => {
    const [before, last] = all[i];
    const apart = box.left >= last.right - 1 || box.top >= last.bottom - 1;
    return apart ? [] : [`${before} | ${text}`];
  });
}"""


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize(
    "selector", ["nav.top a", "#environment tr > *", "[role=tab]", ".legend li"]
)
def test_neighbours_do_not_lie_over_each_other(selector: str, size: Size, opened: Opener) -> None:
    page = opened("made", size=size)
    assert page.one(selector).count() > 1
    assert page.ask(OVERLAPS, selector) == []


@pytest.mark.parametrize("name", ["made", "a100_training_step"])
def test_a_report_prints(name: str, opened: Opener) -> None:
    page = opened(name, theme="dark")
    printed = page.tab.pdf()
    assert printed.startswith(b"%PDF-")
    assert printed.count(b"/Type /Page\n") > 1


def test_the_theme_is_chosen_and_kept(opened: Opener) -> None:
    page = opened("made", theme="light")

    def background() -> str:
        colour: str = page.ask("getComputedStyle(document.body).backgroundColor")
        return colour

    light = background()
    page.tab.get_by_label("Dark").check(force=True)
    dark = background()
    assert dark != light
    page.tab.reload()
    page.settled()
    assert background() == dark
    page.tab.get_by_label("Auto").check(force=True)
    assert background() == light
    page.tab.emulate_media(color_scheme="dark")
    assert background() == dark
