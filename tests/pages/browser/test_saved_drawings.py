"""Every plot can be saved as an SVG file that stands alone, and its table copied in full."""

from __future__ import annotations

import re

import pytest
from tests.support.watched_pages import SVG, Opener

pytestmark = pytest.mark.browser

# What a drawing may say in an attribute that names another place: one in itself.
REFERENCES = ("href", "{http://www.w3.org/1999/xlink}href", "src")


@pytest.mark.parametrize("name", ["made", "a100_training_step"])
def test_saved_drawings_stand_alone(name: str, opened: Opener) -> None:
    page = opened(name)
    labels = [one.get_attribute("aria-label") for one in page.one("button.save").all()]
    assert len(labels) == page.one("figure.plot").count() >= 4
    for number in range(len(labels)):
        if number % 8 == 7:
            page = opened(name)  # a browser asks its user before the eleventh
        button = page.one("button.save").nth(number)
        drawing = page.saved_svg(button)
        label = labels[number]
        assert drawing.tag == f"{SVG}svg"
        assert float(drawing.attrib["width"]) > 100
        assert f"{SVG}script" not in {one.tag for one in drawing.iter()}
        assert len(list(drawing.iter())) > 5, label
        ids = {one.attrib["id"] for one in drawing.iter() if "id" in one.attrib}
        for one in drawing.iter():
            assert not set(REFERENCES) & set(one.attrib), label
            assert not {"class", "style"} & set(one.attrib), label
            for value in one.attrib.values():
                for used in re.findall(r"url\(([^)]*)\)", value):
                    assert used.strip("'\"").lstrip("#") in ids, label


def test_a_saved_drawing_shows_what_is_seen(opened: Opener) -> None:
    """Zoomed and searched, in the theme that is on."""
    page = opened("gpt fused", theme="dark")
    button = page.one("#flame-now .save")
    whole = len(list(page.saved_svg(button).iter(f"{SVG}rect")))
    page.one("#flame-now g[data-frame] rect").nth(3).click()
    page.settled()
    drawing = page.saved_svg(button)
    back = next(drawing.iter(f"{SVG}rect"))
    assert back.attrib["fill"] == page.ask("getComputedStyle(document.body).backgroundColor")
    shown = page.one("#flame-now g[data-frame] rect").count()
    assert len(list(drawing.iter(f"{SVG}rect"))) == pytest.approx(shown + 1, abs=3)
    assert shown < whole


@pytest.mark.parametrize("name", ["a100_training_step"])
def test_copies_have_rows_that_the_page_leaves_out(name: str, opened: Opener) -> None:
    page = opened(name)
    timeline = page.page.sides[0].timeline
    assert timeline is not None
    details = page.one("#timeline-now-plot + .tools details")
    details.locator("summary").click()
    page.settled()
    head, *rows = page.copied(details.get_by_role("button", name="Copy as TSV"))
    assert head == ["op", "lane", "module", "from, µs", "time, µs"]
    assert len(rows) == sum(len(lane.start_us) for lane in timeline.lanes) > 400
    times = sorted(us for lane in timeline.lanes for us in lane.duration_us)
    assert sorted(float(row[4]) for row in rows) == times
