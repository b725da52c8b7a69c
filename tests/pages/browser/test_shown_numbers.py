"""Every report opens, with the sections there are data for and the numbers in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from tests.support.made_pages import made_page
from tests.support.shown_figures import duration, figure, parts_us, share
from tests.support.watched_pages import PHONE, Opener, Report, Watched, open_report

from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_html import html_of
from torchweld.pages.page_records import PageSide
from torchweld.pages.page_sections import sections_of

pytestmark = pytest.mark.browser

# Rows of a table as lists of texts, one line each.
ROWS = """(selector) => [...document.querySelectorAll(`${selector} tbody tr`)].map((row) =>
  [...row.cells].map((cell) => cell.textContent.replaceAll(/\\s+/g, " ").trim()))"""


def test_a_report_has_the_sections_that_there_are_data_for(page: Watched) -> None:
    wanted = list(sections_of(page.page))
    assert (
        page.ask("[...document.querySelectorAll('main > section')].map((one) => one.id)") == wanted
    )
    links = page.ask("[...document.querySelectorAll('nav.top a')].map((one) => one.hash)")
    assert links == [f"#{section}" for section in wanted]
    heads = page.ask(
        "[...document.querySelectorAll('main > section')].map((one) =>"
        " document.getElementById(one.getAttribute('aria-labelledby')).textContent.trim())"
    )
    assert all(heads)
    assert heads[0].replace("\u00a0", " ").replace("\u2060", "") == page.page.verdict
    assert page.texts("h1") == [page.page.title]
    assert page.requests == [page.report.path.as_uri()]


def test_the_verdict_shows_the_steps_and_their_parts(page: Watched) -> None:
    sides = page.page.sides
    figures = page.ask(
        "[...document.querySelectorAll('.figures > div')].map((one) =>"
        " [one.querySelector('dt').textContent, one.querySelector('dd').firstChild.textContent])"
    )
    steps = figures[: len(sides)]
    assert [value for _, value in steps] == [duration(step_us(side)) for side in sides]
    for (what, _), side in zip(steps, sides, strict=True):
        assert (f"mean of {side.about.steps}" in what) == (side.about.steps > 1)
    # Without modules there is nothing it could be explained down to.
    named = any(row.path and row.kind != "Optimizer" for side in sides for row in side.modules)
    known = not any(isinstance(side.explained, NotMeasured) for side in sides)
    assert ("Explained" in dict(figures)) == (named and known)
    accounts = [side.account for side in sides if not isinstance(side.account, NotMeasured)]
    if not accounts:
        assert page.one("#account").count() == 0
        return
    bars = [parts_us(account) for account in accounts]
    shown = page.texts("#account .legend .value")
    assert shown == [" → ".join(map(duration, parts)) for parts in zip(*bars, strict=True)]
    widths = page.ask(
        "[0, 1, 2, 3, 4, 5, 6].map((part) => [...document.querySelectorAll("
        "`#account svg rect.part-${part}`)].map((one) => one.width.baseVal.value))"
    )
    whole = page.ask("document.querySelector('#account svg').width.baseVal.value")
    scale = whole / max(map(sum, bars))
    for part, found in enumerate(widths):
        wanted = [bar[part] * scale for bar in bars if bar[part] > 0]
        assert found == pytest.approx(wanted, abs=2)


def step_us(side: PageSide) -> float | NotMeasured:
    """Of one step, where several were recorded."""
    return (
        side.step_us if isinstance(side.step_us, NotMeasured) else side.step_us / side.about.steps
    )


def test_every_module_is_in_the_table_with_its_time_and_calls(page: Watched) -> None:
    modules = page.page.sides[-1].modules
    page.one(".module-table").get_by_role("button", name="Unfold all").click()
    heads = page.texts("#module-table thead th")
    rows = page.ask(
        """[...document.querySelectorAll("#module-table tbody tr[data-path]")].map((row) =>
          [row.dataset.path, ...[...row.cells].map((cell) => cell.textContent)])"""
    )
    assert sorted(row[0] for row in rows) == sorted(row.path for row in modules)
    before = {row.path: row for row in page.page.sides[0].modules}
    compared = len(page.page.sides) > 1
    for path, *cells in rows:
        shown = dict(zip(heads, cells, strict=True))
        (row,) = (one for one in modules if one.path == path)
        assert shown["calls"] == f"{row.calls:,}"
        assert shown["ops"] == f"{row.launches:,}"
        if isinstance(modules[0].time_us, NotMeasured):
            assert not {"time", "before", "after", "share"} & set(heads)
            continue
        # The time of what lies inside a welded block is the block's.
        part = row.fate == "part" and row.time_us == 0
        wanted = "–" if part else duration(row.time_us)
        assert shown["after" if compared else "time"] == wanted, path
        on_device = "host " if page.page.sides[-1].device_flame is not None else ""
        for column, us in (("forward", row.forward_us), ("backward", row.backward_us)):
            if f"{on_device}{column}" in heads:
                assert shown[f"{on_device}{column}"] == ("–" if part else duration(us)), path
        assert any(one.backward_us for one in modules) == (f"{on_device}backward" in heads)
        if modules[0].time_us > 0 and not isinstance(row.time_us, NotMeasured):
            assert shown["share"] == share(row.time_us, modules[0].time_us), path
        if compared and path in before:
            assert shown["before"] == duration(before[path].time_us)


def test_every_finding_is_a_card(page: Watched) -> None:
    findings = [one for side in page.page.sides for one in side.findings]
    assert page.texts("#findings .card h3") == [" ".join(one.title.split()) for one in findings]
    bounds = page.texts("#findings .card .bound strong")
    for finding, bound in zip(findings, bounds, strict=True):
        if finding.once_us > 0:
            assert bound == duration(finding.once_us)
        elif finding.bound < 1000:
            assert bound == f"{figure(finding.bound)}×"


@pytest.mark.parametrize("name", ["gpt fused", "made"])
def test_every_block_is_shown_with_its_speed_and_reason(name: str, opened: Opener) -> None:
    page = opened(name)
    rows = page.ask(ROWS, "#welded .scroll:not(.tall)")
    shown = {row[0]: row for row in rows}
    assert len(shown) == len(rows)
    names = [starred(block.path) for block in page.page.blocks]
    assert {
        name if name in shown else block.path
        for name, block in zip(names, page.page.blocks, strict=True)
    } == set(shown)
    for name, block in zip(names, page.page.blocks, strict=True):
        row = shown.get(name) or shown[block.path]
        path, what, outcome, serves, speed, _, reason = row
        assert (outcome, serves) == (block.outcome, block.serves)
        assert path in (name, block.path)
        assert what == block.what
        assert block.reason in reason
        if isinstance(block.speedup, float):
            assert speed == f"{figure(block.speedup)}×"
        else:
            assert speed == ("not measured" if block.speedup is not None else "–")


def starred(path: str) -> str:
    """The row of alike blocks in all layers."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def counted_rows(page: Watched) -> dict[str, int]:
    """How many rows each plot's table is to have; all tables below are cut at 400."""
    shown = page.page
    found = {"numerics-plot": len(shown.errors)}
    found["samples-plot"] = sum(len(one.ratios) + len(one.control) for one in shown.strips)
    sides = shown.sides
    found["roofline-plot"] = sum(len(side.points) for side in sides) + len(sides[-1].roofs)
    for number, plot in enumerate(shown.history):
        found[f"history-{number}"] = len(plot.points)
    for number, plots in enumerate(shown.curves):
        found[f"bench-curves-{number}"] = sum(len(curve.points) for curve in plots.curves)
    for number, cells in enumerate(shown.maps):
        found[f"bench-map-{number}"] = len(cells.cells)
    flame, timeline = sides[-1].flame, sides[-1].timeline
    found["flame-now-plot"] = len(flame.name) if flame is not None else 0
    spans = sum(len(lane.start_us) for lane in timeline.lanes) if timeline is not None else 0
    found["timeline-now-plot"] = spans
    return {name: count for name, count in found.items() if count > 0}


@pytest.mark.parametrize("name", ["made", "gpt fused", "a100_training_step"])
def test_every_plot_has_its_table(name: str, opened: Opener) -> None:
    page = opened(name)
    for plot, count in counted_rows(page).items():
        details = page.one(f"#{plot} + .tools details.table")
        details.locator("summary").click()
        page.settled()
        assert details.locator("tbody tr").count() == min(count, 400), plot
        if count > 400:
            assert f"copying gives all {count}" in details.inner_text()
    plots = page.one("figure.plot").count()
    assert plots == page.one("figure.plot + .tools details.table").count()


@pytest.mark.parametrize("name", ["made", "a100_training_step"])
def test_host_and_device_stand_side_by_side(name: str, opened: Opener) -> None:
    page = opened(name)
    device = page.page.sides[-1].device
    assert device is not None
    host = device.host
    assert page.texts("#device-now-times-title") == [device.name]
    assert page.ask(ROWS, "#device-now-times") == [
        [f"outermost ops ({host.ops:,})", duration(host.ops_us),
         f"kernels and copies ({device.kernels:,})", duration(device.launched_us)],
        [f"of them, launches ({device.launches:,})", duration(host.launch_us),
         "computing", duration(device.compute_us)],
        [f"occupancy queries ({device.occupancy_queries:,})", duration(host.occupancy_us),
         "only copies or communication", duration(device.non_compute_us)],
        ["waiting for the device", duration(host.waiting_us), "idle", duration(device.idle_us)],
    ]  # fmt: skip
    rows = page.ask(ROWS, "#device-now-products")
    assert len(rows) == len(device.products) > 2
    calls = page.ask(ROWS, "#device-now-calls")
    assert calls == [[one.name, f"{one.count:,}", duration(one.us)] for one in host.calls]
    for product, (kernel, count, us, _, maker, tile, layout, dtype, cores) in zip(
        device.products, rows, strict=False
    ):
        assert (kernel, count) == (" ".join(product.name.split()), f"{product.count:,}")
        assert us == duration(product.us)
        gemm = product.gemm
        known = {True: "yes", False: "no", None: ""}
        assert (maker, tile, layout, dtype, cores) == (
            ("", "", "", "", "") if gemm is None
            else (gemm.maker, "×".join(map(str, gemm.tile or ())), gemm.layout or "",
                  gemm.dtype or "", known[gemm.tensor_cores])
        )  # fmt: skip
    assert device.cores in page.texts("#device-now-products .note")[0].replace("\u00a0", " ")


def test_a_bench_shows_what_each_side_launches(opened: Opener) -> None:
    page = opened("made")
    rows = page.ask(ROWS, "#bench-launches")
    assert [row[2] for row in rows] == ["3 gemm, 2 pointwise", "3 gemm", "not measured"]
    assert [row[-1] for row in rows] == ["yes", "no", ""]
    assert rows[0][3:7] == [duration(us) for us in (474.0, 88.0, 31.0, 520.0)]
    assert rows[1][4] == "–"
    assert rows[2][3:7] == [*["not measured"] * 3, duration(500.0)]
    kernels = page.copied(page.one("#bench-kernels").get_by_role("button", name="Copy as TSV"))
    assert [row[2] for row in kernels[1:]] == [
        kernel.name for one in page.page.launched for kernel in one.rows
    ]
    (note,) = page.texts("#bench-launches .note")
    assert "1 side did not launch what was expected." in note
    assert "Torch.profiler recorded no kernel." in note


@pytest.mark.parametrize("name", ["gpt fused", "made", "a100_training_step"])
def test_the_environment_and_the_command_are_there(name: str, opened: Opener) -> None:
    page = opened(name)
    rows = page.ask(ROWS, "#environment table")
    assert rows == [[what, " ".join(value.split())] for what, value in page.page.environment]
    assert page.texts("#environment pre") == [" ".join(page.page.command.split())]
    # Only a command that measures repeats what was measured.
    shows = page.page.command.startswith("torchweld report")
    wanted = "To make this page again" if shows else "To repeat it"
    assert page.texts("#environment h3") == [wanted]
    assert shows == (name == "a100_training_step")


def test_every_table_can_be_copied(page: Watched) -> None:
    missing = page.ask(
        """[...document.querySelectorAll("main table")].filter((table) => {
          if (table.matches(".environment, .heat, .printed table")) return false;
          const holder = table.closest(".titled-table, .module-table, details.table");
          return holder === null || !/Copy as TSV/.test(holder.textContent);
        }).map((table) => table.closest("section").id)"""
    )
    assert missing == []


def test_a_reason_is_said_once(browser: Browser, tmp_path: Path) -> None:
    made = made_page()
    busy = [NotMeasured(f"other work took {share} of the time") for share in ("a half", "all")]
    told = tuple(
        f"{side.name} was not measured: {why.reason}"
        for side, why in zip(made.sides, busy, strict=True)
    )
    sides = tuple(
        replace(side, step_us=why, account=why, explained=why, faults_per_step=None)
        for side, why in zip(made.sides, busy, strict=True)
    )
    shown = replace(made, sides=sides, not_comparable=told, diff=None)
    path = tmp_path / "busy.html"
    path.write_text(html_of(shown))
    page = open_report(browser, Report(path, shown))
    doubts = page.texts("#verdict .doubt")
    assert doubts == [f"Not comparable: {one}." for one in told]
    page.tab.context.close()


def test_long_names_break_between_their_parts(opened: Opener) -> None:
    page = opened("gpt fused", size=PHONE)
    broken = page.ask(
        """[...document.querySelectorAll("#memory td")].filter((one) => one.querySelector("wbr"))
          .map((one) => [...one.childNodes].map((part) => part.textContent))"""
    )
    assert broken
    for parts in broken:
        assert all(part == "" or part.endswith((".", "_", "::")) for part in parts[:-1])


def test_copied_figures_are_in_full(opened: Opener) -> None:
    page = opened("made")
    tools = page.one("#samples-plot + .tools")
    tools.locator("summary").click()
    head, *rows = page.copied(tools.get_by_role("button", name="Copy as TSV"))
    strips = page.page.strips
    wanted = [value for one in strips for value in (*one.ratios, *one.control)]
    shown = [row[head.index("ratio")] for row in rows]
    assert [float(text) for text in shown] == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)
