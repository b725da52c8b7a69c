"""All by keyboard: Tab reaches every control, where it is shows, and it gets out again."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.watched_pages import Opener, Watched

pytestmark = pytest.mark.browser

# Every element that Tab is to stop at. Of radio buttons in a group it is the chosen one.
STOPS = """[...document.querySelectorAll(
  "a[href], button, input, select, textarea, summary, [tabindex]")]
  .filter((one) => one.tabIndex >= 0 && !one.disabled && one.checkVisibility())
  .filter((one) => one.type !== "radio" || one.checked)
  .map((one, number) => { one.dataset.stop = number; return number; })"""
# Where the focus is, and whether one of its parts, or the label beside it, has the colour for it.
FOCUSED = """() => {
  const one = document.activeElement;
  if (one === null || one === document.body) return null;
  const probe = document.createElement("span");
  document.body.append(probe);
  probe.style.color = "var(--focus)";
  const colour = getComputedStyle(probe).color;
  probe.remove();
  const near = [one, ...one.children, one.nextElementSibling].filter((part) => part !== null);
  const seen = near.some((part) => {
    const style = getComputedStyle(part);
    const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
    return (outlined && style.outlineColor === colour) || style.boxShadow.includes(colour)
      || (style.stroke === colour && parseFloat(style.strokeWidth) >= 2);
  });
  const box = one.getBoundingClientRect();
  const inside = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  const what = `${one.tagName} ${one.id || one.className.baseVal || one.className}`;
  return { stop: Number(one.dataset.stop ?? -1), seen, inside, what };
}"""


def walk(page: Watched, key: str, steps: int) -> list[dict[str, Any]]:
    """Where the focus is after each press; {} outside of the page."""
    found = []
    for _ in range(steps):
        page.tab.keyboard.press(key)
        found.append(page.ask(FOCUSED) or {})
    return found


@pytest.mark.parametrize("name", ["made", "a100_training_step"])
def test_tab_reaches_every_control_and_leaves_again(name: str, opened: Opener) -> None:
    page = opened(name)
    stops = page.ask(STOPS)
    assert len(stops) > 30
    *found, outside = walk(page, "Tab", len(stops) + 1)
    assert outside == {}, "Tab does not leave the page"
    assert [one["stop"] for one in found] == stops
    assert [one["what"] for one in found if not one["seen"]] == []
    assert [one["what"] for one in found if not one["inside"]] == []
    back = walk(page, "Shift+Tab", len(stops))
    assert [one["stop"] for one in back] == stops[::-1]


def test_keys_do_what_the_mouse_does(opened: Opener) -> None:
    page = opened("gpt fused")
    summary = page.one("#account + .tools summary")
    summary.focus()
    page.press("Enter")
    assert page.one("#account + .tools tbody tr").count() == 7
    page.press("Enter")
    assert page.one("#account + .tools table").is_hidden()
    page.press("Enter", "Tab", "Enter")
    said = page.one("#account + .tools [role=status]")
    said.filter(has_text="Copied").wait_for()
    copied: str = page.ask("navigator.clipboard.readText()")
    assert copied.startswith("part\tbefore, µs\t")
    with page.tab.expect_download() as download:
        page.one("#account + .tools .save").focus()
        page.press("Space")
    assert download.value.suggested_filename == "torchweld-account.svg"


def test_radio_buttons_are_chosen_by_arrows(opened: Opener) -> None:
    page = opened("gpt fused")
    boxes = "[...document.querySelectorAll('#welded-map .place')].length"
    before = page.ask("document.querySelector('#welded-map svg').outerHTML")
    page.one("#welded-map input[type=radio]:checked").focus()
    page.press("ArrowRight")
    after = page.ask("document.querySelector('#welded-map svg').outerHTML")
    assert before != after
    assert page.ask(boxes) > 5
    page.one("nav.top, header").locator("input[type=radio]:checked").first.focus()
    page.press("ArrowRight", "ArrowRight")
    assert page.ask("document.documentElement.dataset.theme") == "dark"


def test_a_link_leads_to_its_section(opened: Opener) -> None:
    page = opened("made")
    page.one("nav.top a[href='#numerics']").focus()
    page.press("Enter")
    page.settled()
    top = page.ask("document.getElementById('numerics').getBoundingClientRect().top")
    assert -5 <= top < 400
    # The focus goes on from there.
    page.press("Tab")
    assert page.ask("document.activeElement.closest('section').id") == "numerics"
