"""A bench as text: what it was measured with, tables, maps, and the result in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from torchweld.bench.bench_goals import GoalVerdict
from torchweld.bench.bench_results import Bench
from torchweld.bench.bench_summary import Summary
from torchweld.bench.kernel_goals import KernelVerdict
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import counted, figure, size
from torchweld.core.safe_text import clean
from torchweld.machine.machine_load import load_words
from torchweld.report.bench_extras import callers_section, latency_section, map_section
from torchweld.report.bench_kernels import device_words, kernels_section
from torchweld.report.bench_peers import goals_section, peers_section
from torchweld.report.bench_tables import shown, speed_table, wider, work_table
from torchweld.report.bench_training import step_words, training_section


def bench_head(bench: Bench) -> Iterator[RenderableType]:
    """What is shown before anything is measured: load, machine, and who does not take part."""
    busy = load_words(bench.busy_cores)
    if busy:
        yield Text(busy, style="yellow")
    kernels = f"kernels for {bench.isa}" if bench.isa else "no compiled kernels"
    if bench.on_gpu:
        kernels = f"on {bench.device}: {device_words(bench)}"
    cache = "cold" if bench.cold else "hot"
    what = f"{clean(bench.target)}; " if bench.target else ""
    what += "steps of training; " if bench.training else ""
    yield Text(
        f"{what}torch {bench.torch}, {kernels}, {counted(bench.threads, 'thread')}, weights "
        f"{cache}; {bench.cpu}"
    )
    for name, why in bench.left_out.items():
        yield Text(f"left out: {name}: {clean(why)}", style="yellow")
    yield from note_lines(bench.notes)


def note_lines(notes: Sequence[str]) -> Iterator[RenderableType]:
    for note in notes:
        yield Text(clean(note), style="yellow")


def bench_sections(
    bench: Bench,
    summary: Summary,
    width: int,
    goals: Sequence[GoalVerdict] = (),
    kernels: Sequence[KernelVerdict] = (),
) -> Iterator[RenderableType]:
    """What is shown after the measurement: everything that was found."""
    if bench.cells:
        speeds, spare = speed_table(bench, width)
        yield speeds
        yield Text(_speed_legend(bench, spare), style="dim")
        if bench.training:
            yield Text(step_words(bench), style="dim")
        yield ""
        work, spare = work_table(bench, width)
        yield work
        yield Text(_work_legend(bench, spare), style="dim")
        yield from _work_notes(bench)
        for section in (
            kernels_section(bench, kernels, width),
            training_section(bench, width),
            latency_section(bench, width),
            callers_section(bench, width),
            map_section(bench),
            peers_section(bench),
            goals_section(goals),
        ):
            for i, part in enumerate(section):
                yield from ["", part] if i == 0 else [part]
        yield ""
    yield from closing(summary)


def _speed_legend(bench: Bench, spare: list[str]) -> str:
    text = (
        f"{', '.join(bench.names[1:])}: speed over eager's in the same rounds, the best in bold; "
        "≈ no difference, ~ noisy, – not measured."
    )
    if "interval" not in spare:
        text += f" interval: {bench.first}'s, 99 %."
    if "error" not in spare:
        text += " error: the largest, relative to eager's, both against fp64."
    return text + wider(spare)


def _work_legend(bench: Bench, spare: list[str]) -> str:
    host = "starting ops, and Python" if bench.target else "what it takes with nothing to compute"
    host = "until the call returns" if bench.on_gpu else host
    text = f"eager→{bench.first}."
    if bench.peaks_known and "of peak" not in spare:
        whose = "the GPU needs by its vendor's figures" if bench.on_gpu else "this machine needs"
        text += (
            f" of peak: of the least time {whose}, for the multiply-adds (c) or to read the data "
            "(m)."
        )
    text += " ops: what a call dispatches"
    text += "" if bench.training else f"; host: {host}"
    return f"{text}{'' if 'CPU µs' in spare else '; CPU: of all threads'}.{wider(spare)}"


def _work_notes(bench: Bench) -> Iterator[RenderableType]:
    """Why the table of work has dashes for calls that were timed, and how often."""
    timed = [
        (cell, name)
        for cell in bench.cells
        for name in ("eager", bench.first)
        if not isinstance(cell.result(name).us, NotMeasured)
    ]
    costs = [cell.result(name).cost for cell, name in timed]
    shares = [bench.of_peak(cell, name) for cell, name in timed] if bench.peaks_known else []
    figures: dict[str, Sequence[object]] = {
        "shares of the peak": shares,
        "host times": [cost.host_us for cost in costs],
        "CPU times": [cost.cpu_us for cost in costs],
    }
    for what, found in figures.items():
        unknown = [one.reason for one in found if isinstance(one, NotMeasured)]
        if unknown:
            said = f"{len(unknown)} of {len(found)} {what} are not measured: {unknown[0]}"
            yield Text(clean(said), style="yellow")


def closing(summary: Summary) -> Iterator[RenderableType]:
    """The result in one sentence, and what went wrong in one line each."""
    for failure in summary.failed:
        yield Text(f"breaks the numerical rule, so not timed: {clean(failure)}", style="red")
    for reason, cells in summary.refused.items():
        where = cells[0] if len(cells) == 1 else f"{len(cells)} cells ({cells[0]}, …)"
        yield Text(f"left out in {clean(where)}: {clean(reason)}", style="yellow")
    told = tuple(reason.partition(": ")[2] for reason in summary.refused)
    news = [one for one in summary.unmeasured if not one.endswith(told)]
    if news:
        more = f" ({counted(len(news) - 1, 'more cell')} likewise)" if len(news) > 1 else ""
        yield Text(f"not measured: {clean(news[0])}{more}", style="yellow")
    worst, mean = summary.worst, summary.mean
    if isinstance(worst, NotMeasured) or isinstance(mean, NotMeasured):
        yield Text(f"{summary.backend}: nothing was measured{_help(summary)}.", style="bold")
        return
    name, least = worst
    parts = [f"{figure(one)}x in {dtype}" for dtype, one in summary.means.items()]
    by_dtype = f": {', '.join(parts)}" if len(parts) > 1 else ""
    if summary.cells > 1:
        found = (
            f"{summary.backend} is {figure(mean)}x as fast as eager (geometric mean of "
            f"{counted(summary.measured, 'cell')}{by_dtype}); least, {figure(least)}x, at "
            f"{clean(name)}"
        )
    else:
        found = f"{summary.backend} is {figure(mean)}x as fast as eager at {clean(name)}"
    ratio, share = summary.largest_error_ratio, summary.largest_share_of_limit
    of_eager = f"at most {figure(ratio)}x of eager's, " if isinstance(ratio, float) else ""
    of_limit = shown(share) if isinstance(share, float) else "an unknown part"
    error = "error of outputs and gradients" if summary.training else "output error"
    sentence = f"{found}; {error} {of_eager}{of_limit} of what the numerical rule allows; "
    if summary.copied_bytes:
        sentence += (
            f"+{size(summary.copied_bytes)} of packed weights beside {size(summary.weight_bytes)}"
        )
    else:
        sentence += "no copy of the weights"
    if summary.unmeasured:
        missing = f"{len(summary.unmeasured)} of {summary.cells} cells not measured"
        sentence += f"; {missing}{_help(summary)}"
    yield Text(sentence + ".", style="bold")


def _help(summary: Summary) -> str:
    """What to add to the command, if that may help."""
    return f"; on this machine {summary.remedy} may help" if summary.remedy else ""
