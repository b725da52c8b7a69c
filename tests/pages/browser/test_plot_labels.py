"""Labels in plots: none covers another, and none is cut at the edge."""

from __future__ import annotations

import pytest
from tests.support.watched_pages import LAPTOP, PHONE, TRACES, Opener, Size

pytestmark = pytest.mark.browser

BOXES = """(selector) => [...document.querySelectorAll(selector)].map((one) => {
    const { left, right, top, bottom } = one.getBoundingClientRect();
    return [one.textContent, left, right, top, bottom];
})"""


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("name", ["made", "gpt fused", "a100_training_step", "cpu_only"])
@pytest.mark.parametrize("plot", ["#roofline-plot .dot-name", "#memory-plot .haloed"])
def test_no_name_covers_another(plot: str, name: str, size: Size, opened: Opener) -> None:
    page = opened(name, size=size)
    boxes = page.ask(BOXES, f"{plot}, {plot.split()[0]} .end.roof-name")
    if "memory" in plot and name in TRACES:
        assert boxes == []
        return
    assert boxes
    holder = page.one(f"{plot.split()[0]} svg").bounding_box()
    assert holder is not None
    for i, (text, left, right, top, bottom) in enumerate(boxes):
        assert left >= holder["x"] - 1, text
        assert right <= holder["x"] + holder["width"] + 1, text
        for other, left2, right2, top2, bottom2 in boxes[:i]:
            # The boxes of lines of text are higher than their letters.
            apart_x = right <= left2 + 1 or right2 <= left + 1
            apart_y = bottom - 3 <= top2 + 3 or bottom2 - 3 <= top + 3
            assert apart_x or apart_y, (text, other)


@pytest.mark.parametrize("name", ["gpt fused", "made"])
def test_the_blocks_of_errors_are_told_apart_on_a_phone(name: str, opened: Opener) -> None:
    page = opened(name, size=PHONE)
    blocks = list(dict.fromkeys(row.block for row in page.page.errors))
    boxes = page.ask(BOXES, "#numerics-plot svg text.strong")
    heads = [text for text, *_ in boxes]
    assert len(heads) == len(set(heads)) == len(blocks) > 2
    holder = page.one("#numerics-plot svg").bounding_box()
    assert holder is not None
    for text, _, right, _, _ in boxes:
        assert right <= holder["x"] + holder["width"] + 1, text


def test_a_model_that_is_one_block_has_a_map(opened: Opener) -> None:
    """There is nothing inside the block to draw, so the block is drawn."""
    page = opened("one block")
    places = page.one("#welded-map g.place")
    assert places.count() == 1
    assert (places.first.text_content() or "").startswith("Sequential")
    assert "fate-welded" in (places.first.get_attribute("class") or "")
    assert page.one("#blocks tbody td").first.inner_text() == "the model"


def test_a_trace_without_modules_has_no_map(opened: Opener) -> None:
    page = opened("a100_alexnet_inference")
    assert page.one("#welded-map").count() == 0
    assert "not known how much is necessary or which modules" in page.texts("h2")[0]
    # Of what no trace tells, nothing is said.
    assert "aults" not in page.one("#verdict").inner_text()
