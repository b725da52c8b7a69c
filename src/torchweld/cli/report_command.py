"""`torchweld report`: what was measured, as one page to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from torchweld.cli.output_files import check_targets
from torchweld.cli.report_files import (
    bench_file_page,
    is_file,
    kept_history,
    page_of_run,
    plan_file_page,
)
from torchweld.cli.report_output import check_page_name, write_page
from torchweld.cli.typed_command import typed_command
from torchweld.core.errors import TorchweldError
from torchweld.pages.page_building import joined_pages
from torchweld.pages.page_html import html_of
from torchweld.pages.page_records import Page
from torchweld.pages.page_server import PageServer
from torchweld.pages.plan_view import fates_of
from torchweld.pages.redaction import redacted

FILE = click.Path(path_type=Path, dir_okay=True)
EXISTING = click.Path(path_type=Path, exists=True, dir_okay=False)
NAME = "report.html"


@click.command(
    short_help="Make one HTML page of what was measured.",
    epilog="Examples:  torchweld profile --save before.json;  torchweld report before.json;  "
    "torchweld report before.json after.json --plan plan.json --out change.html;  "
    "torchweld report trace.json.gz --serve;  torchweld report main~1;  "
    "torchweld report report.html --redact --out for-others.html",
)
@click.argument("runs", metavar="RUN [RUN2]", nargs=-1, required=True)
@click.option("--out", type=FILE, help=f"The page; {NAME} beside RUN if left out.")
@click.option("--title", help="The heading of the page.")
@click.option(
    "--redact",
    is_flag=True,
    help="Replace names of modules, classes, files, runs, commits and commands by stand-ins.",
)
@click.option("--plan", "plan_file", type=EXISTING, help="Show this plan too.")
@click.option("--bench", "bench_file", type=EXISTING, help="Show this bench too.")
@click.option(
    "--history",
    "history_file",
    type=FILE,
    help="Show the runs of this file too; it is also where a RUN is looked up by its name.",
)
@click.option(
    "--serve",
    metavar="[PORT]",
    is_flag=False,
    flag_value="0",
    help="Show it at http://127.0.0.1:PORT/ until Ctrl-C, and write no file unless --out is given.",
)
@click.option("--json", "json_wanted", is_flag=True, help="Print the page as JSON, write no file.")
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
def report(
    runs: tuple[str, ...],
    out: Path | None,
    title: str | None,
    redact: bool,
    plan_file: Path | None,
    bench_file: Path | None,
    history_file: Path | None,
    serve: str | None,
    json_wanted: bool,
    force: bool,
) -> int:
    """Make one HTML page of what was measured. It needs no network and no other file.

    RUN is a profile, a plan, a bench or a report that torchweld saved, a trace of torch.profiler,
    or the name (main, main~1) or number of a kept run. If two RUNs have
    a profile, the first is before and the second after.
    """
    port = _port(serve)
    if len(runs) > 2:
        raise TorchweldError(f"{len(runs)} RUNs are given; a page shows one, or before and after")
    if serve is not None and json_wanted:
        raise TorchweldError("--serve shows the page and --json prints it; give one")
    if out is None and serve is None and not json_wanted:
        out = (Path(runs[0]).parent if is_file(runs[0]) else Path()) / NAME
    check_page_name("--out", out)
    check_targets({"--out": out}, force)
    planned = [plan_file_page(plan_file)] if plan_file is not None else []
    fates = fates_of(row for one in planned for row in one.blocks)
    given = [page_of_run(run, history_file, fates) for run in runs]
    found = joined_pages(given)
    benched = [bench_file_page(bench_file)] if bench_file is not None else []
    # A kept run has its history on the page anyway.
    wanted = history_file is not None and all(is_file(run) for run in runs)
    kept = [kept_history(history_file)] if wanted and history_file is not None else []
    page = joined_pages([found, *planned, *benched, *kept])
    page = _with_verdict(page, [*planned, *given], [found, *benched])
    # What repeats one of several parts does not repeat the page.
    alone = len(given) == 1 and page == found
    command = page.command if alone and page.command else typed_command()
    page = replace(page, title=title or page.title, command=command)
    if redact:
        page = redacted(page)
    try:
        if out is not None:
            write_page(page, out)
    finally:  # it is printed even if the disk is full
        if json_wanted:
            click.echo(page.to_json())
    if port is not None:
        _serve(page, port)
    return 0


def _with_verdict(page: Page, parts: Sequence[Page], others: Sequence[Page]) -> Page:
    """With the verdict of a plan, which rests on paired rounds; what else was said is a note."""
    plans = [part for part in parts if part.blocks and not part.sides and part.verdict]
    verdict = plans[0].verdict if plans else page.verdict
    said = dict.fromkeys(one.verdict for one in (*plans, *others) if one.verdict)
    said.pop(verdict, None)
    notes = dict.fromkeys((*said, *page.notes))
    return replace(page, verdict=verdict, notes=tuple(notes))


def _port(given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isdecimal() or int(given) > 65535:
        raise TorchweldError(
            f"--serve takes a port from 1 to 65535, or nothing, not {given!r}; put --serve after "
            "the RUN"
        )
    return int(given)


def _serve(page: Page, port: int) -> None:
    with PageServer(html_of(page), port) as server:
        click.echo(f"{server.address} shows the report; Ctrl-C ends")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("ended", err=True)
