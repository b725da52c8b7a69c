"""What a report page shows, as plain data: `Page` and its parts.

Builders make it of profiles, plans, benches and kept runs; `page_html.py` puts it into one HTML
file, whose script only draws. So a page can be read back: it is its data. Long lists of equal
things are columns (one tuple for each field, all of one length), which keeps pages small.

`web/src/page_data.ts` says the same for the script; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchweld.bench.kernel_counts import KernelRow
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import Amount, Count, Index, Measured
from torchweld.core.record_format import RecordFormat
from torchweld.core.saved_records import SavedRecord
from torchweld.findings.finding import Finding
from torchweld.pages.page_problems import astray, not_before, uneven
from torchweld.profiles.accounting.device_products import HostTimes, ProductRow
from torchweld.profiles.accounting.time_splits import Split
from torchweld.profiles.profile import About
from torchweld.report.flame_stacks import FRAME_KINDS as FRAME_KINDS
from torchweld.report.flame_stacks import FrameKind as FrameKind

# What became of a module. "part": it lies inside a welded block. "": nothing to weld.
Fate = Literal["welded", "part", "left", "not measured", ""]


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """A module in the map and in the table. Times and counts include its children."""

    path: str  # "" for the root
    kind: str
    extra: str
    parent: Index
    calls: Count
    forward_us: float | NotMeasured
    backward_us: float | NotMeasured
    # What decides shares: on the host, or on the device if there is one.
    time_us: float | NotMeasured
    own_us: float | NotMeasured  # of it, in no child
    launches: Count
    flops: Count
    moved_bytes: Count
    round_trip_bytes: Count
    roofline_us: float
    bound: str
    split: Split | NotMeasured
    fate: Fate = ""
    why: str = ""  # why it was left or not measured; for a welded one what serves it


@dataclass(frozen=True, kw_only=True)
class Flame:
    """Frames as columns, each after the frame around it. Weights without what is inside.

    A frame's time is its own plus that of the frames inside; that of frame 0 is `total_us`.
    """

    total_us: float
    names: tuple[str, ...]
    name: tuple[Count, ...]  # index into `names`
    parent: tuple[Index, ...]
    own_us: tuple[float, ...]
    kind: tuple[Count, ...]  # index into FRAME_KINDS
    calls: tuple[Count, ...]  # ops and kernels that are this frame; 0 where that means nothing
    module: tuple[Index, ...]  # index into PageSide.modules
    merged: Count = 0  # frames too small to see that were added to "smaller ones", time kept
    note: str = ""  # what the frames add up to

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        yield from uneven(
            name=self.name,
            parent=self.parent,
            own_us=self.own_us,
            kind=self.kind,
            calls=self.calls,
            module=self.module,
        )
        yield from astray("name", self.name, len(self.names))
        yield from astray("kind", self.kind, len(FRAME_KINDS))
        yield from not_before("parent", self.parent)


@dataclass(frozen=True, kw_only=True)
class FlameDiff:
    """Both flames as one, aligned by module. Times include what is inside."""

    names: tuple[str, ...]
    name: tuple[Count, ...]
    parent: tuple[Index, ...]
    before_us: tuple[float, ...]
    after_us: tuple[float, ...]
    kind: tuple[Count, ...]
    # "both", "new", "gone" or "welded": a welded module, whose inside reads as one change.
    state: tuple[Literal["both", "new", "gone", "welded"], ...]

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        yield from uneven(
            name=self.name,
            parent=self.parent,
            before_us=self.before_us,
            after_us=self.after_us,
            kind=self.kind,
            state=self.state,
        )
        yield from astray("name", self.name, len(self.names))
        yield from astray("kind", self.kind, len(FRAME_KINDS))
        yield from not_before("parent", self.parent)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A host thread or a device stream: spans as columns, by start."""

    name: str
    device: bool
    start_us: tuple[float, ...]
    duration_us: tuple[float, ...]
    name_index: tuple[Count, ...]  # index into Timeline.names
    depth: tuple[Count, ...]
    module: tuple[Index, ...]
    merged: Count = 0  # neighbours too short to see that became one span, time kept

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        yield from uneven(
            start_us=self.start_us,
            duration_us=self.duration_us,
            name_index=self.name_index,
            depth=self.depth,
            module=self.module,
        )


@dataclass(frozen=True, kw_only=True)
class Timeline:
    end_us: float
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    note: str = ""  # whether times are as recorded, or laid out anew

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        for lane in self.lanes:
            yield from astray("name_index", lane.name_index, len(self.names))


@dataclass(frozen=True, kw_only=True)
class DeviceView:
    """What host and device did at the same time. Times in µs; the host's are under the profiler."""

    name: str
    host: HostTimes
    launches: Count
    occupancy_queries: Count
    kernels: Count  # and copies
    launched_us: float  # of them
    compute_us: float
    non_compute_us: float  # only copies or communication
    idle_us: float
    products: tuple[ProductRow, ...]  # the longest first
    cores: str  # how much of their time was on tensor cores, in words; "" without products


@dataclass(frozen=True, kw_only=True)
class Roof:
    """A line of the roofline plot: one of arithmetic, or one of memory."""

    name: str  # "float32", "L2", "memory"
    gflops: Amount | None = None
    gbps: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class RoofPoint:
    name: str  # an op, or the path of a block
    block: bool
    phase: str
    calls: Count
    time_us: float
    flops: Count
    moved_bytes: Count
    of_roofline: float | None
    bound: str


@dataclass(frozen=True, kw_only=True)
class AliveBytes:
    """Memory that is alive at the peak: allocations of one op in one module, summed."""

    bytes: Count
    count: Count
    module: str
    op: str
    phase: str


@dataclass(frozen=True, kw_only=True)
class MemoryView:
    """Bytes of tensors over the step, above its beginning."""

    peak_bytes: int
    allocations: Count
    allocated_bytes: Count
    at_us: tuple[float, ...]  # () where the recording has no course
    bytes: tuple[int, ...]  # from that time on
    at_peak: tuple[AliveBytes, ...]

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        yield from uneven(at_us=self.at_us, bytes=self.bytes)


@dataclass(frozen=True, kw_only=True)
class PageSide:
    """One profile, as far as it is shown."""

    name: str  # "before", "after", or "" for the only one
    about: About
    step_us: float | NotMeasured
    account: Split | NotMeasured
    explained: float | NotMeasured
    modules: tuple[ModuleRow, ...]
    flame: Flame | None = None  # of the host
    device_flame: Flame | None = None
    timeline: Timeline | None = None
    device: DeviceView | None = None
    roofs: tuple[Roof, ...] = ()
    points: tuple[RoofPoint, ...] = ()
    memory: MemoryView | None = None
    findings: tuple[Finding, ...] = ()
    faults_per_step: float | NotMeasured | None = None
    notices: tuple[str, ...] = ()

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        if not self.modules:
            yield "has no modules; the model itself comes first"
        count = len(self.modules)
        yield from not_before("modules.parent", (row.parent for row in self.modules))
        for flame in (self.flame, self.device_flame):
            yield from astray("flame.module", flame.module if flame is not None else (), count)
        for lane in self.timeline.lanes if self.timeline is not None else ():
            yield from astray("lane.module", lane.module, count)


@dataclass(frozen=True, kw_only=True)
class BlockRow:
    """A block that was found, or a module that was refused, and what became of it."""

    path: str
    what: str  # "gelu 768→3072→768", or the class of a refused module
    outcome: str  # plans.Outcome, or "refused"
    serves: str  # "cpu packed" where welded
    reason: str
    speedup: Measured | NotMeasured | None = None
    interval: tuple[Measured, Measured] | None = None


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    x: Count  # rows
    speedup: Measured | NotMeasured
    interval: tuple[Measured, Measured] | None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str  # "cpu packed", "compile"
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, kw_only=True)
class CurvePlot:
    """Speed over eager by rows, one curve per way to run one block."""

    title: str
    source: Literal["plan", "bench"]
    curves: tuple[Curve, ...]


@dataclass(frozen=True, kw_only=True)
class MapCell:
    row: Count  # index into CrossoverMap.rows
    column: Count
    best: str  # the fastest side; "" where nothing was measured
    speedup: Measured | NotMeasured  # ours over the best other


@dataclass(frozen=True, kw_only=True)
class CrossoverMap:
    """Who is fastest where: blocks down, numbers of rows across."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[MapCell, ...]

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        yield from astray("cells.row", (cell.row for cell in self.cells), len(self.rows))
        yield from astray("cells.column", (cell.column for cell in self.cells), len(self.columns))


@dataclass(frozen=True, kw_only=True)
class LaunchedRow:
    """What a call of one side of a bench launches on a GPU, and what it takes. Times in µs."""

    cell: str
    side: str
    kernels: Count | NotMeasured
    kinds: str  # "3 gemm, 2 pointwise"
    kernel_us: Amount | NotMeasured
    launch_us: Amount | NotMeasured
    host_us: Amount | NotMeasured | None
    call_us: Amount | NotMeasured
    # Against what is known beforehand; "" where nothing is.
    verdict: Literal["as expected", "differs", "not measured", ""]
    rows: tuple[KernelRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HistoryPoint:
    run: Count
    name: str
    kind: str  # "fuse", "bench", "gate"
    created: str
    commit: str
    speedup: Measured | NotMeasured
    interval: tuple[Measured, Measured] | None
    verdict: str  # of a gate: "pass", "fail", …; "" of others


@dataclass(frozen=True, kw_only=True)
class HistoryPlot:
    """One thing that was measured again and again, oldest first."""

    title: str
    points: tuple[HistoryPoint, ...]


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """Distance from the higher-precision reference, largest over rows, in units of what is allowed.

    1 is the bound of the numerical rule. `eager` and `fused` are absolute, or relative to the
    largest value where `tensor` says so.
    """

    block: str
    tensor: str  # "output", "gradient of up.weight"
    eager: Measured | NotMeasured
    fused: Measured | NotMeasured
    of_allowed: Measured | NotMeasured
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Raw rounds of one comparison: time before over time after, and the same against itself."""

    name: str
    ratios: tuple[Measured, ...]
    control: tuple[Measured, ...]
    speedup: Measured | NotMeasured
    interval: tuple[Measured, Measured] | None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Page(SavedRecord):
    """Everything on one page. What is empty has no section."""

    FORMAT = RecordFormat(
        what="report",
        version=2,
        remedy="make the report again, or use the torchweld that wrote it",
        # The first could not say that it was redacted.
        upgrades={1: dict},
    )

    title: str
    verdict: str
    sides: tuple[PageSide, ...] = ()  # one, or before and after
    diff: FlameDiff | None = None
    not_comparable: tuple[str, ...] = ()  # why times of before and after cannot be compared
    blocks: tuple[BlockRow, ...] = ()
    curves: tuple[CurvePlot, ...] = ()
    maps: tuple[CrossoverMap, ...] = ()
    launched: tuple[LaunchedRow, ...] = ()
    history: tuple[HistoryPlot, ...] = ()
    errors: tuple[ErrorRow, ...] = ()
    strips: tuple[Strip, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()  # name, value
    command: str = ""  # repeats it
    notes: tuple[str, ...] = ()
    redacted: bool = False  # names are stand-ins, which mean nothing on another page

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        if len(self.sides) > 2:
            yield f"has {len(self.sides)} sides; expected are one, or before and after"
