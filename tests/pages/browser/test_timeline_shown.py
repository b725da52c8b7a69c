"""The timeline: its lanes, what is under the pointer, zoom and pan by keys."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from tests.support.shown_figures import duration
from tests.support.watched_pages import SVG, Opener, Watched

from torchweld.pages.page_records import Timeline

pytestmark = pytest.mark.browser

REPORTS = ["gpt fused", "a100_training_step"]
CANVAS = "#timeline-now canvas"
UNITS = {"ns": 1e-3, "µs": 1.0, "ms": 1e3, "s": 1e6}


def timeline_of(page: Watched) -> Timeline:
    timeline = page.page.sides[-1].timeline
    assert timeline is not None
    return timeline


def keys(page: Watched, *pressed: str) -> None:
    page.one(CANVAS).focus()
    page.press(*pressed)


def saved(page: Watched) -> ElementTree.Element:
    return page.saved_svg(page.one("#timeline-now .save"))


def seen_us(page: Watched) -> tuple[float, float]:
    """From when to when the drawing goes, by the ticks of what would be saved."""
    drawing = saved(page)
    ticks = []
    for one in drawing.iter(f"{SVG}text"):
        time = re.fullmatch(r"([\d.,]+) (ns|µs|ms|s)", one.text or "")
        if time is not None:
            ticks.append((float(one.attrib["x"]), float(time[1].replace(",", "")) * UNITS[time[2]]))
    (x, us), (last_x, last_us) = min(ticks), max(ticks)
    per_pixel = (last_us - us) / (last_x - x)
    start_us = us - x * per_pixel
    return start_us, start_us + float(drawing.attrib["width"]) * per_pixel


@pytest.mark.parametrize("name", REPORTS)
def test_every_lane_is_drawn(name: str, opened: Opener) -> None:
    page = opened(name)
    timeline = timeline_of(page)
    texts = [one.text or "" for one in saved(page).iter(f"{SVG}text")]
    for lane in timeline.lanes:
        (head,) = (text for text in texts if text.removesuffix(" · device") == lane.name)
        assert lane.device == ("device" in head)
    assert duration(timeline.end_us) in page.texts("#timeline-now h3")[0]
    inked = page.ask(
        f"""(() => {{ const canvas = document.querySelector("{CANVAS}");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return data.filter((value, i) => i % 4 === 3 && value > 0).length; }})()"""
    )
    assert inked > 1000


@pytest.mark.parametrize("name", REPORTS)
def test_keys_zoom_and_pan(name: str, opened: Opener) -> None:
    page = opened(name)
    whole = seen_us(page)
    assert whole == pytest.approx((0, timeline_of(page).end_us), abs=1e-6)
    keys(page, "+", "+", "+")
    near = seen_us(page)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) * 0.6**3, rel=1e-3)
    assert sum(near) == pytest.approx(sum(whole), rel=1e-3)
    keys(page, "Shift+ArrowRight", "d")
    later = seen_us(page)
    step = (near[1] - near[0]) * 0.4
    assert later == pytest.approx((near[0] + step, near[1] + step), rel=1e-3)
    keys(page, "Shift+ArrowLeft", "a")
    assert seen_us(page) == pytest.approx(near)
    keys(page, "-")
    far = seen_us(page)
    assert far[1] - far[0] > near[1] - near[0]
    keys(page, "Escape")
    assert seen_us(page) == pytest.approx(whole)


def test_ticks_differ_however_near_one_looks(opened: Opener) -> None:
    page = opened("a100_training_step")
    for _ in range(3):
        keys(page, *["+"] * 8)
        texts = [one.text or "" for one in saved(page).iter(f"{SVG}text")]
        ticks = [text for text in texts if re.fullmatch(r"[\d.,]+ (ns|µs|ms|s)", text)]
        assert len(set(ticks)) == len(ticks) > 3


def test_buttons_zoom_and_pan(opened: Opener) -> None:
    page = opened("a100_training_step")
    whole = seen_us(page)
    buttons = page.one("#timeline-now .controls")
    for _ in range(3):
        buttons.get_by_role("button", name="Zoom in").click()
    near = seen_us(page)
    assert near[1] - near[0] < (whole[1] - whole[0]) / 2
    buttons.get_by_role("button", name="Later").click()
    assert seen_us(page)[0] > near[0]
    buttons.get_by_role("button", name="Earlier").click()
    assert seen_us(page) == pytest.approx(near)
    buttons.get_by_role("button", name="Zoom out").click()
    assert seen_us(page)[1] > near[1]
    buttons.get_by_role("button", name="Whole step").click()
    assert seen_us(page) == pytest.approx(whole)


@pytest.mark.parametrize("name", REPORTS)
def test_the_pointer_and_the_keys_find_a_span(name: str, opened: Opener) -> None:
    page = opened(name)
    timeline = timeline_of(page)
    lane = timeline.lanes[0]
    top = [i for i, depth in enumerate(lane.depth) if depth == 0]
    widest = max(top, key=lambda i: lane.duration_us[i])
    wanted = timeline.names[lane.name_index[widest]]
    page.one(CANVAS).scroll_into_view_if_needed()
    box = page.one(CANVAS).bounding_box()
    assert box is not None
    middle = lane.start_us[widest] + lane.duration_us[widest] / 2
    # The first row of the first lane lies below the axis and the lane's name.
    x, y = box["x"] + box["width"] * middle / timeline.end_us, box["y"] + 54
    page.tab.mouse.move(x, y)
    said = page.one(".tooltip").inner_text()
    assert wanted in said
    assert duration(lane.duration_us[widest]) in said
    page.tab.mouse.click(x, y)
    chosen = page.one("#timeline-now .flame-said").inner_text()
    assert chosen.startswith(wanted)
    keys(page, "Enter")
    near = seen_us(page)
    assert lane.start_us[widest] - lane.duration_us[widest] * 0.06 <= near[0]
    assert near[1] <= lane.start_us[widest] + lane.duration_us[widest] * 1.06
    keys(page, "Escape", "ArrowRight")
    following = top[top.index(widest) + 1] if top[-1] != widest else widest
    name_of = timeline.names[lane.name_index[following]]
    assert page.one("#timeline-now .flame-said").inner_text().startswith(name_of)
