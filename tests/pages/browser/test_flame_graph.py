"""The flame graphs: where frames lie, search, zoom, what changed and what vanished."""

from __future__ import annotations

import pytest
from tests.support.shown_figures import duration, found, widths_us
from tests.support.watched_pages import Opener, Watched

from torchweld.pages.page_records import Flame, FlameDiff

pytestmark = pytest.mark.browser

# Number, x and width of every frame that is drawn.
DRAWN = """(view) => [...document.querySelectorAll(`${view} g[data-frame]`)].map((one) => {
  const box = one.querySelector("rect");
  return [Number(one.dataset.frame), box.x.baseVal.value, box.width.baseVal.value];
})"""


def flame_of(page: Watched) -> Flame:
    flame = page.page.sides[-1].flame
    assert flame is not None
    return flame


def diff_of(page: Watched) -> FlameDiff:
    assert page.page.diff is not None
    return page.page.diff


def drawn(page: Watched, view: str = "#flame-now") -> dict[int, tuple[float, float]]:
    return {number: (x, width) for number, x, width in page.ask(DRAWN, view)}


def path_to(flame: Flame, frame: int) -> list[str]:
    names: list[str] = []
    while frame >= 0:
        names.insert(0, flame.names[flame.name[frame]])
        frame = flame.parent[frame]
    return names


def deep_frame(flame: Flame, depth: int) -> int:
    """The widest frame that has so many around it."""
    widths = widths_us(flame)
    depths = [len(path_to(flame, i)) - 1 for i in range(len(widths))]
    return max((i for i, d in enumerate(depths) if d == depth), key=lambda i: widths[i])


@pytest.mark.parametrize("name", ["gpt fused", "bert", "a100_training_step", "cpu_only"])
def test_frames_are_as_wide_as_their_time(name: str, opened: Opener) -> None:
    page = opened(name)
    flame, shown = flame_of(page), drawn(page)
    widths = widths_us(flame)
    whole = page.ask("document.querySelector('#flame-now svg').width.baseVal.value")
    scale = whole / widths[0]
    assert widths[0] == pytest.approx(flame.total_us)
    assert set(shown) == {i for i, us in enumerate(widths) if us * scale >= 0.5} | set(shown)
    for i, (x, width) in shown.items():
        assert width == pytest.approx(widths[i] * scale, abs=1.1), i
        around = flame.parent[i]
        if around >= 0:
            assert x >= shown[around][0] - 0.1
            assert x + width <= shown[around][0] + shown[around][1] + 1.1


@pytest.mark.parametrize("name", ["gpt fused", "a100_training_step"])
def test_a_search_counts_frames_and_time(name: str, opened: Opener) -> None:
    page = opened(name)
    flame = flame_of(page)
    names = [flame.names[i] for i in flame.name]
    widths = widths_us(flame)
    field = page.one("#flame-now input[type=search]")
    for text in ("aten::", "MM", names[-1], "no such frame", "."):
        field.fill(text)
        said = " ".join(page.one("#flame-now .found").inner_text().split())
        assert said == found(names, widths, flame.parent, text), text
        marked = page.ask(
            "[...document.querySelectorAll('#flame-now g.frame.match')]"
            ".map((one) => Number(one.dataset.frame))"
        )
        assert set(marked) == {i for i in drawn(page) if text.lower() in names[i].lower()}
    field.fill("")
    assert page.one("#flame-now .found").inner_text() == ""
    assert page.one("#flame-now .match").count() == 0


@pytest.mark.parametrize("by", ["mouse", "keys"])
@pytest.mark.parametrize("name", ["gpt fused", "a100_training_step"])
def test_zoom_goes_in_and_out_again(name: str, by: str, opened: Opener) -> None:
    page = opened(name)
    flame, before = flame_of(page), drawn(page)
    frame = deep_frame(flame, 2)
    if by == "mouse":
        page.one(f"#flame-now g[data-frame='{frame}'] rect").first.click()
    else:
        go_to(page, flame, frame)
        page.press("Enter")
    whole = page.ask("document.querySelector('#flame-now svg').width.baseVal.value")
    zoomed = drawn(page)
    assert zoomed[frame][0] == 0
    assert zoomed[frame][1] == pytest.approx(whole, abs=1.1)
    assert page.texts("#flame-now .crumbs li") == path_to(flame, frame)
    assert page.ask("Number(document.activeElement.dataset.frame)") == frame
    if by == "mouse":
        page.one("#flame-now .crumbs button").nth(1).click()
        assert page.texts("#flame-now .crumbs li") == path_to(flame, flame.parent[frame])
        page.one("#flame-now").get_by_role("button", name="Whole step").click()
    else:
        page.press("Escape")
        assert page.texts("#flame-now .crumbs li") == path_to(flame, flame.parent[frame])
        page.press("Backspace")
    assert page.one("#flame-now .crumbs").is_hidden()
    assert drawn(page) == before


def go_to(page: Watched, flame: Flame, frame: int) -> None:
    """By arrows alone: down to the first frame inside, then along the row."""
    page.one("#flame-now g[data-frame][tabindex='0']").focus()
    path: list[int] = []
    while frame >= 0:
        path.insert(0, frame)
        frame = flame.parent[frame]
    for wanted in path[1:]:
        page.press("ArrowDown")
        for _ in range(len(flame.name)):
            if page.ask("Number(document.activeElement.dataset.frame)") == wanted:
                break
            page.press("ArrowRight")


@pytest.mark.parametrize("by", ["mouse", "keys"])
def test_the_change_shows_what_is_new_and_what_vanished(by: str, opened: Opener) -> None:
    page = opened("gpt fused")
    diff = diff_of(page)
    before = drawn(page)
    if by == "mouse":
        page.one("#tab-flame-diff").click()
    else:
        page.one("#tab-flame-now").focus()
        page.press("ArrowRight", "ArrowRight")
        assert page.ask("document.activeElement.id") == "tab-flame-diff"
    page.settled()
    title = page.texts("#flame-diff-plot h3")
    assert title == [f"Before {duration(diff.before_us[0])} → after {duration(diff.after_us[0])}"]
    assert page.one("#flame-now").is_hidden()
    after = drawn(page, "#flame-diff")
    check_widths(page, after, diff.after_us)
    # What is gone takes no time now.
    assert states(diff, after) >= {"both", "new", "welded"}
    assert "gone" not in states(diff, after)
    assert page.one("#flame-diff g.state-gone").count() == 0
    box = page.one("#flame-vanished")
    if by == "mouse":
        box.check()
    else:
        box.focus()
        page.press("Space")
    vanished = drawn(page, "#flame-diff")
    check_widths(page, vanished, diff.before_us)
    assert states(diff, vanished) >= {"both", "gone", "welded"}
    assert "new" not in states(diff, vanished)
    assert page.one("#flame-diff g.state-gone").count() > 0
    box.uncheck()
    page.settled()
    assert drawn(page, "#flame-diff") == after
    page.one("#tab-flame-now").click()
    assert page.one("#flame-diff").is_hidden()
    assert drawn(page) == before


def test_a_welded_block_reads_as_one_change(opened: Opener) -> None:
    page = opened("gpt fused")
    diff = diff_of(page)
    page.one("#tab-flame-diff").click()
    page.settled()
    labels = page.ask(
        "[...document.querySelectorAll('#flame-diff g[data-frame]')]"
        ".map((one) => [Number(one.dataset.frame), one.getAttribute('aria-label')])"
    )
    welded = [text for i, text in labels if diff.state[i] == "welded" and " → torchweld::" in text]
    assert any("up" in text.split("→")[0] for text in welded), labels


def check_widths(
    page: Watched, shown: dict[int, tuple[float, float]], times_us: tuple[float, ...]
) -> None:
    whole = page.ask("document.querySelector('#flame-diff svg').width.baseVal.value")
    assert shown
    for i, (_, width) in shown.items():
        assert width == pytest.approx(times_us[i] * whole / times_us[0], abs=1.1)


def states(diff: FlameDiff, shown: dict[int, tuple[float, float]]) -> set[str]:
    return {diff.state[i] for i in shown}


def test_the_device_has_its_own_flame(opened: Opener) -> None:
    page = opened("a100_training_step")
    flame = page.page.sides[0].device_flame
    assert flame is not None
    page.one("#tab-flame-device").click()
    page.settled()
    widths = widths_us(flame)
    assert duration(flame.total_us) in page.texts("#flame-device h3")[0]
    names = [flame.names[i] for i in flame.name]
    page.one("#flame-device input[type=search]").fill("gemm")
    said = " ".join(page.one("#flame-device .found").inner_text().split())
    assert said == found(names, widths, flame.parent, "gemm")


def test_the_pointer_shows_what_a_frame_is(opened: Opener) -> None:
    page = opened("gpt fused")
    flame = flame_of(page)
    frame = deep_frame(flame, 3)
    page.one(f"#flame-now g[data-frame='{frame}'] rect").first.hover()
    said = page.one(".tooltip").inner_text()
    assert flame.names[flame.name[frame]] in said
    assert duration(widths_us(flame)[frame]) in said
    page.press("Escape")
    assert page.one(".tooltip").is_hidden()
