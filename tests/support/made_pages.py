"""A report page made by hand: every section, before and after, with names meant to do harm.

`made_page()` is a transformer of four blocks whose MLPs were welded. Its figures follow from a few
tables here, so they are the same on every machine. `large_flame` has as many frames as asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from torchweld.bench.kernel_counts import KernelRow
from torchweld.core.not_measured import NotMeasured
from torchweld.findings.finding import Finding
from torchweld.pages.page_records import (
    FRAME_KINDS,
    AliveBytes,
    BlockRow,
    CrossoverMap,
    Curve,
    CurvePlot,
    CurvePoint,
    DeviceView,
    ErrorRow,
    Fate,
    Flame,
    FlameDiff,
    FrameKind,
    HistoryPlot,
    HistoryPoint,
    Lane,
    LaunchedRow,
    MapCell,
    MemoryView,
    ModuleRow,
    Page,
    PageSide,
    Roof,
    RoofPoint,
    Strip,
    Timeline,
)
from torchweld.profiles.accounting.device_products import CallRow, HostTimes, ProductRow
from torchweld.profiles.accounting.time_splits import Split
from torchweld.profiles.attributing.gemm_names import GemmName
from torchweld.profiles.profile import About

HOSTILE = "<script>alert(1)</script>"
HOSTILE_KIND = "</script><!--<img src=x onerror=alert(2)>"
BUSY = NotMeasured("its threads waited for a core for 31 % of the time")
DEPTH = 4


@dataclass
class Node:
    """A frame with the frames inside it; `path` is set for modules."""

    name: str
    kind: FrameKind
    own_us: float = 0.0
    inside: list[Node] = field(default_factory=list)
    path: str | None = None
    module_kind: str = ""

    @property
    def time_us(self) -> float:
        return self.own_us + sum(one.time_us for one in self.inside)


def op(name: str, us: float, kernel: str = "") -> Node:
    return Node(name, "op", us * 0.2 if kernel else us, kernel_frames(kernel, us * 0.8))


def kernel_frames(name: str, us: float) -> list[Node]:
    return [Node(name, "kernel", us)] if name else []


def linear(path: str, name: str, us: float, training: bool = True) -> Node:
    backward = Node("backward", "phase", 0.0, [op("aten::mm", us * 1.9, "sgemm_nn")])
    inside = [op("aten::addmm", us, "sgemm_nt")] + ([backward] if training else [])
    return Node(name, "module", us * 0.06, inside, path, "Linear")


def mlp(path: str, scale: float, welded: bool) -> Node:
    if welded:
        chain = op("torchweld::chain", 620 * scale, "chain_packed_avx512")
        backward = Node(
            "backward", "phase", 0.0, [op("torchweld::chain_backward", 1310 * scale, "chain_back")]
        )
        return Node("mlp", "module", 14.0, [chain, backward], path, "MLP")
    act = Node("act", "module", 4.0, [op("aten::gelu", 190 * scale)], f"{path}.act", "GELU")
    act.inside.append(Node("backward", "phase", 0.0, [op("aten::gelu_backward", 260 * scale)]))
    inside = [linear(f"{path}.up", "up", 470 * scale), act]
    inside.append(linear(f"{path}.down", "down", 450 * scale))
    return Node("mlp", "module", 22.0, inside, path, "MLP")


def attention(path: str, scale: float) -> Node:
    inside = [
        linear(f"{path}.c_attn", "c_attn", 320 * scale),
        op("aten::scaled_dot_product_attention", 210 * scale, "flash_attention"),
        linear(f"{path}.c_proj", "c_proj", 120 * scale),
    ]
    return Node("attn", "module", 31.0, inside, path, "CausalSelfAttention")


def norm(path: str, name: str) -> Node:
    inside = [op("aten::native_layer_norm", 38.0)]
    return Node(name, "module", 5.0, inside, path, "LayerNorm")


def block(number: int, welded: bool) -> Node:
    path, scale = f"h.{number}", 1 + 0.04 * number
    inside = [
        norm(f"{path}.ln_1", "ln_1"),
        attention(f"{path}.attn", scale),
        norm(f"{path}.ln_2", "ln_2"),
        mlp(f"{path}.mlp", scale, welded and number != DEPTH - 1),
        op("aten::add", 34.0),
    ]
    return Node(str(number), "module", 12.0, inside, path, "Block")


def made_tree(welded: bool) -> Node:
    """The step as frames; its last block is never welded."""
    blocks = [block(number, welded) for number in range(DEPTH)]
    inside = [
        Node("wte", "module", 3.0, [op("aten::embedding", 61.0)], "wte", "Embedding"),
        Node("h", "module", 0.0, blocks, "h", "ModuleList"),
        norm("ln_f", "ln_f"),
        Node(
            HOSTILE,
            "module",
            4.0,
            [op("aten::linear", 512.0, HOSTILE_KIND)],
            HOSTILE,
            HOSTILE_KIND,
        ),
        Node("smaller ones", "rest", 17.0),
    ]
    return Node("GPT", "module", 140.0, inside, "", "GPT")


def walk(node: Node, parent: int, found: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
    here = len(found)
    found.append((node, parent))
    for one in node.inside:
        walk(one, here, found)
    return found


def flame_of(tree: Node, modules: tuple[ModuleRow, ...]) -> Flame:
    frames = walk(tree, -1, [])
    names = sorted({node.name for node, _ in frames})
    index = {row.path: i for i, row in enumerate(modules)}
    owner: list[int] = []
    for node, parent in frames:
        inherited = owner[parent] if parent >= 0 else -1
        owner.append(inherited if node.path is None else index[node.path])
    return Flame(
        total_us=tree.time_us,
        names=tuple(names),
        name=tuple(names.index(node.name) for node, _ in frames),
        parent=tuple(parent for _, parent in frames),
        own_us=tuple(node.own_us for node, _ in frames),
        kind=tuple(FRAME_KINDS.index(node.kind) for node, _ in frames),
        calls=tuple(1 if node.kind in ("op", "kernel") else 0 for node, _ in frames),
        module=tuple(owner),
        merged=3,
    )


def rows_of(eager: Node, tree: Node, welded: bool) -> tuple[ModuleRow, ...]:
    """Modules of the eager tree with the times of `tree`, in which parts of a weld have none."""
    times = {node.path: node for node, _ in walk(tree, -1, []) if node.path is not None}
    rows: list[ModuleRow] = []
    numbers: dict[int, int] = {-1: -1}
    for frame, (node, parent) in enumerate(walk(eager, -1, [])):
        while parent not in numbers:
            parent = walk(eager, -1, [])[parent][1]
        if node.path is None:
            continue
        numbers[frame] = len(rows)
        rows.append(row_of(node, times.get(node.path), numbers[parent], welded))
    return tuple(rows)


def fate_of(node: Node, timed: Node | None, welded: bool) -> tuple[Fate, str]:
    path = node.path or ""
    if not welded or node.module_kind not in ("MLP", "Linear", "GELU", HOSTILE_KIND):
        return "", ""
    if timed is None:
        return "part", f"inside {path.rpartition('.')[0]}"
    if node.module_kind == "MLP":
        last = path == f"h.{DEPTH - 1}.mlp"
        return ("left", "not faster here: 0.97x") if last else ("welded", "cpu packed")
    if path.endswith("c_attn"):
        return "not measured", BUSY.reason
    return "left", f"{node.name} is called with <unknown> keywords"


def row_of(node: Node, timed: Node | None, parent: int, welded: bool) -> ModuleRow:
    fate, why = fate_of(node, timed, welded)
    time_us = timed.time_us if timed is not None else 0.0
    frames = walk(timed, -1, []) if timed is not None else []
    inner = [one for one, _ in frames if one.kind in ("op", "kernel", "phase")]
    backward_us = sum(one.time_us for one in inner if one.kind == "phase")
    launches = sum(one.kind == "op" for one in inner)
    flops = int(node.time_us * 90_000)
    return ModuleRow(
        path=node.path or "",
        kind=node.module_kind,
        extra="768, 3072" if node.name in ("up", "down") else "",
        parent=parent,
        calls=1 if time_us else 0,
        forward_us=time_us - backward_us,
        backward_us=backward_us,
        time_us=time_us,
        own_us=timed.own_us if timed is not None else 0.0,
        launches=launches,
        flops=flops,
        moved_bytes=int(node.time_us * 4_000),
        round_trip_bytes=0 if welded and fate == "welded" else int(node.time_us * 900),
        roofline_us=time_us * (0.81 if fate == "welded" else 0.55),
        bound="compute" if flops > 40_000_000 else "bandwidth",
        split=split_of(time_us, welded and fate == "welded") if time_us else BUSY,
        fate=fate,
        why=why,
    )


def split_of(us: float, welded: bool) -> Split:
    shares = (0.7, 0.11, 0.02, 0.01, 0.05, 0.09) if welded else (0.46, 0.1, 0.08, 0.14, 0.09, 0.11)
    parts = [us * share for share in shares]
    return Split(
        arithmetic_us=parts[0],
        traffic_us=parts[1],
        launch_us=parts[2],
        round_trip_us=parts[3],
        host_us=parts[4],
        slow_us=parts[5],
        unexplained_us=us - sum(parts),
    )


def diff_of(before: Node, after: Node) -> FlameDiff:
    """Both trees as one: what is in one of them alone is gone or new."""
    rows: list[tuple[str, int, float, float, int, Literal["both", "new", "gone", "welded"]]] = []

    def add(old: Node | None, new: Node | None, parent: int) -> None:
        some = new or old
        assert some is not None
        here = len(rows)
        state: Literal["both", "new", "gone", "welded"] = "both"
        if old is None or new is None:
            state = "new" if old is None else "gone"
        elif new.path is not None and any(one.name == "torchweld::chain" for one in new.inside):
            state = "welded"
        times = (old.time_us if old else 0.0, new.time_us if new else 0.0)
        rows.append((some.name, parent, *times, FRAME_KINDS.index(some.kind), state))
        news = list(new.inside) if new else []
        for one in old.inside if old else []:
            same = next((n for n in news if (n.name, n.kind) == (one.name, one.kind)), None)
            if same is not None:
                news.remove(same)
            add(one, same, here)
        for one in news:
            add(None, one, here)

    add(before, after, -1)
    names = sorted({row[0] for row in rows})
    return FlameDiff(
        names=tuple(names),
        name=tuple(names.index(row[0]) for row in rows),
        parent=tuple(row[1] for row in rows),
        before_us=tuple(row[2] for row in rows),
        after_us=tuple(row[3] for row in rows),
        kind=tuple(row[4] for row in rows),
        state=tuple(row[5] for row in rows),
    )


def timeline_of(tree: Node, modules: tuple[ModuleRow, ...]) -> Timeline:
    """Frames one after the other on a host thread; kernels on a device stream as well."""
    names = sorted({node.name for node, _ in walk(tree, -1, [])})
    index = {row.path: i for i, row in enumerate(modules)}
    spans: list[tuple[float, float, int, int, int]] = []
    kernels: list[tuple[float, float, int, int, int]] = []

    def add(node: Node, start: float, depth: int, module: int) -> None:
        module = module if node.path is None else index[node.path]
        span = (start, node.time_us, names.index(node.name), depth, module)
        if node.kind == "kernel":
            kernels.append((start + 40.0, span[1], span[2], 0, module))
        else:
            spans.append(span)
        at = start + node.own_us / 2
        for one in node.inside:
            add(one, at, depth + 1, module)
            at += one.time_us

    add(tree, 0.0, 0, -1)
    return Timeline(
        end_us=tree.time_us + 60.0,
        names=tuple(names),
        lanes=(lane_of("python 1", False, spans), lane_of("stream 7", True, kernels)),
        note="Backward ops are drawn inside the module whose forward made them.",
    )


def lane_of(name: str, device: bool, spans: list[tuple[float, float, int, int, int]]) -> Lane:
    spans = sorted(spans)
    return Lane(
        name=name,
        device=device,
        start_us=tuple(span[0] for span in spans),
        duration_us=tuple(span[1] for span in spans),
        name_index=tuple(span[2] for span in spans),
        depth=tuple(span[3] for span in spans),
        module=tuple(span[4] for span in spans),
        merged=12 if device else 0,
    )


def points_of(tree: Node, welded: bool) -> tuple[RoofPoint, ...]:
    sums: dict[str, tuple[float, int]] = {}
    for node, _ in walk(tree, -1, []):
        if node.kind == "op":
            us, calls = sums.get(node.name, (0.0, 0))
            sums[node.name] = (us + node.time_us, calls + 1)
    found = []
    for number, (name, (us, calls)) in enumerate(sorted(sums.items())):
        heavy = "mm" in name or "linear" in name or "chain" in name or "attention" in name
        flops = int(us * (61_000 if "chain" in name else 43_000)) if heavy else int(us * 900)
        moved = int(us * (2_600 if heavy else 9_000) * (1 + 0.13 * number))
        found.append(
            RoofPoint(
                name=name,
                block=False,
                phase="backward" if "backward" in name or name == "aten::mm" else "forward",
                calls=calls,
                time_us=us,
                flops=flops,
                moved_bytes=moved,
                of_roofline=0.8 if "chain" in name else 0.55 if heavy else None,
                bound="compute" if heavy else "bandwidth",
            )
        )
    for number in range(DEPTH):
        us = next(n.time_us for n, _ in walk(tree, -1, []) if n.path == f"h.{number}.mlp")
        flops = int(55_000 * (1 + 0.04 * number) * 4_000)
        found.append(
            RoofPoint(
                name=f"h.{number}.mlp",
                block=True,
                phase="",
                calls=1,
                time_us=us,
                flops=flops,
                moved_bytes=9_000_000 if welded and number < DEPTH - 1 else 17_000_000,
                of_roofline=0.79 if welded and number < DEPTH - 1 else 0.52,
                bound="compute",
            )
        )
    return tuple(found)


def memory_of(end_us: float, peak: int) -> MemoryView:
    count = 48
    course = [
        int(peak * (1 - abs(2 * i / (count - 1) - 1)) * (0.85 + 0.1 * (i % 3 == 0)))
        for i in range(count)
    ]
    course[24] = peak
    alive = [
        AliveBytes(bytes=peak // 3, count=8, module="h.2.mlp", op="aten::gelu", phase="forward"),
        AliveBytes(bytes=peak // 4, count=6, module="h.1.attn", op="aten::addmm", phase="forward"),
        AliveBytes(bytes=peak // 9, count=1, module=HOSTILE, op="aten::linear", phase="backward"),
    ]
    return MemoryView(
        peak_bytes=peak,
        allocations=164,
        allocated_bytes=peak * 5,
        at_us=tuple(end_us * i / (count - 1) for i in range(count)),
        bytes=tuple(course),
        at_peak=tuple(alive),
    )


def findings_of(step_us: float) -> tuple[Finding, ...]:
    return (
        Finding(
            rule="round-trips",
            title="The MLPs write their hidden layer to memory and read it back",
            cause="Between up and down, gelu runs as an op of its own.",
            action="torchweld fuse welds the three into one kernel.",
            evidence=(
                "h.*.mlp moves 4.7 MB between ops that a fused kernel keeps in L2",
                "aten::gelu reaches 9.1 of 11.2 GB/s, so it is bound by memory",
            ),
            waste="round trips through memory",
            saved_us=step_us * 0.14,
            bound=1 / (1 - 0.14),
            modules=("h.*.mlp",),
        ),
        Finding(
            rule="launch-bound",
            title=f"{HOSTILE} starts many small ops",
            cause="Each takes less time than it takes to start it.",
            action="Use a larger batch.",
            evidence=("64 ops of 4.1 µs each", "starting one costs 2.9 µs here"),
            waste="starting ops",
            saved_us=step_us * 0.08,
            bound=1 / (1 - 0.08),
            modules=(HOSTILE, "h.3.mlp"),
        ),
        Finding(
            rule="cold-start",
            title="The first step packs weights",
            cause="A packed copy is made once per block.",
            action="Warm the model up before serving.",
            evidence=("3 blocks, 57 MB",),
            waste="packing weights",
            saved_us=0.0,
            bound=1.0,
            once_us=41_300.0,
        ),
    )


def made_side(name: str, welded: bool, device: bool) -> PageSide:
    eager, tree = made_tree(False), made_tree(welded)
    modules = rows_of(eager, tree, welded)
    flame = flame_of(tree, modules)
    return PageSide(
        name=name,
        about=About(
            source="live",
            what="GPT",
            training=True,
            inputs="8 x 128 tokens",
            torch="2.13.0",
            cpu="An Example CPU",
            threads=2,
        ),
        step_us=tree.time_us,
        account=split_of(tree.time_us, welded),
        explained=0.96,
        modules=modules,
        flame=flame,
        device_flame=flame_of(made_tree(welded), modules) if device else None,
        timeline=timeline_of(tree, modules),
        roofs=(
            Roof(name="float32", gflops=118.0),
            Roof(name="L2", gbps=92.0),
            Roof(name="memory", gbps=11.4),
        ),
        points=points_of(tree, welded),
        device=device_of_made(tree.time_us) if device else None,
        memory=memory_of(tree.time_us, 21_400_000 if welded else 34_800_000),
        findings=findings_of(tree.time_us) if not welded else (),
        faults_per_step=812.0 if not welded else BUSY,
        notices=("One of 20 rounds was disturbed and left out.",) if not welded else (),
    )


def device_of_made(step_us: float) -> DeviceView:
    """A name that tells all, one that tells a part, and one that is no name of a product."""
    told = GemmName(
        maker="cuBLAS", tile=(128, 128, 64), layout="nn", dtype="bfloat16", tensor_cores=True
    )
    partly = GemmName(maker="Triton", dtype="float32", tensor_cores=False)
    rows = [("ampere_bf16_gemm", told, 48), ("triton_mm", partly, 12), (HOSTILE, None, 3)]
    products = [
        ProductRow(name=name, gemm=gemm, count=count, us=step_us * count / 120)
        for name, gemm, count in rows
    ]
    calls = [
        ("cudaLaunchKernel", 210, 0.09),
        ("cudaStreamSynchronize", 1, 0.04),
        (HOSTILE, 2, 0.01),
    ]
    return DeviceView(
        name="NVIDIA A100-SXM4-40GB",
        host=HostTimes(
            ops=190,
            ops_us=step_us * 0.8,
            launch_us=step_us * 0.09,
            occupancy_us=0.0,
            waiting_us=step_us * 0.04,
            calls=tuple(
                CallRow(name=name, count=count, us=step_us * part) for name, count, part in calls
            ),
        ),
        launches=212,
        occupancy_queries=0,
        kernels=212,
        launched_us=step_us * 0.7,
        compute_us=step_us * 0.66,
        non_compute_us=step_us * 0.02,
        idle_us=step_us * 0.32,
        products=tuple(products),
        cores="76 % of the products' time on tensor cores, 19 % not, 4.8 % not told by names",
    )


def launches_of() -> tuple[LaunchedRow, ...]:
    """One side as expected, one that differs, one that nobody saw."""
    gemm = KernelRow(name="ampere_bf16_gemm", category="gemm", count=3, us=410.0)
    pointwise = KernelRow(name=HOSTILE, category="pointwise", count=2, us=64.0)
    unseen = NotMeasured("torch.profiler recorded no kernel")
    cell = "GeGLU 64×128"
    return (
        LaunchedRow(
            cell=cell, side="eager", kernels=5, kinds="3 gemm, 2 pointwise", kernel_us=474.0,
            launch_us=31.0, host_us=88.0, call_us=520.0, verdict="as expected",
            rows=(gemm, pointwise),
        ),
        LaunchedRow(
            cell=cell, side="cublas natural", kernels=3, kinds="3 gemm", kernel_us=410.0,
            launch_us=19.0, host_us=None, call_us=455.0, verdict="differs", rows=(gemm,),
        ),
        LaunchedRow(
            cell=cell, side="liger", kernels=unseen, kinds="", kernel_us=unseen,
            launch_us=unseen, host_us=unseen, call_us=500.0, verdict="",
        ),
    )  # fmt: skip


ROWS = (1, 4, 16, 64, 256, 1024)


def curve_of(name: str, top: float, random: Random) -> Curve:
    points = []
    for number, rows in enumerate(ROWS):
        speed = 1 + (top - 1) * math.exp(-0.35 * number) + 0.02 * random.random()
        missing = name == "compile" and rows == 4
        verdict = "faster" if speed > 1.05 else "no difference"
        points.append(
            CurvePoint(
                x=rows,
                speedup=BUSY if missing else speed,
                interval=None if missing else (speed * 0.96, speed * 1.05),
                verdict="not measured" if missing else verdict,
            )
        )
    return Curve(name=name, points=tuple(points))


def curves_of() -> tuple[CurvePlot, ...]:
    random = Random(3)
    made = []
    for title, source in (("gelu 768→3072→768", "bench"), ("h.0.mlp", "plan")):
        curves = (
            curve_of("cpu packed", 2.1, random),
            curve_of("cpu natural", 1.5, random),
            curve_of("compile", 1.16, random),
        )
        assert source in ("bench", "plan")
        made.append(
            CurvePlot(title=title, source="bench" if source == "bench" else "plan", curves=curves)
        )
    return tuple(made)


def map_of() -> CrossoverMap:
    rows = ("gelu 768→3072→768", "silu gated 1024→2816→1024", "linear 768→2304")
    cells = []
    for r in range(len(rows)):
        for c in range(len(ROWS)):
            if (r, c) == (2, 5):
                cells.append(MapCell(row=r, column=c, best="", speedup=BUSY))
                continue
            speed = 1.9 - 0.17 * c - 0.21 * r
            best = "cpu packed" if speed > 1.02 else "compile" if speed < 0.9 else "eager"
            cells.append(MapCell(row=r, column=c, best=best, speedup=speed))
    return CrossoverMap(
        title="float32, 2 threads, inference",
        rows=rows,
        columns=tuple(str(rows_) for rows_ in ROWS),
        cells=tuple(cells),
    )


def history_of() -> HistoryPlot:
    random = Random(5)
    points = []
    for run in range(1, 15):
        speed = 1.5 + 0.02 * run + 0.05 * random.random() - (0.4 if run == 9 else 0)
        kind = "gate" if run % 3 == 0 else "fuse"
        points.append(
            HistoryPoint(
                run=run,
                name="gpt",
                kind=kind,
                created=f"2026-03-{run + 1:02d}T10:12:00+00:00",
                commit=f"{run:07x}",
                speedup=BUSY if run == 5 else speed,
                interval=None if run == 5 else (speed - 0.05, speed + 0.06),
                verdict="" if kind != "gate" else "fail" if run == 9 else "pass",
            )
        )
    return HistoryPlot(title="gpt, training, float32", points=tuple(points))


def errors_of() -> tuple[ErrorRow, ...]:
    rows = []
    tensors = ("output", "gradient of up.weight", "gradient of down.weight", "gradient of input")
    for number in range(DEPTH):
        for at, tensor in enumerate(tensors):
            eager = 1.1e-6 * (1 + at) * (1 + 0.1 * number)
            fused = eager * (0.7 + 0.25 * at)
            rows.append(
                ErrorRow(
                    block=f"h.{number}.mlp",
                    tensor=tensor,
                    eager=eager,
                    fused=fused,
                    of_allowed=fused / (2 * eager),
                    ok=True,
                )
            )
    rows.append(
        ErrorRow(
            block=HOSTILE,
            tensor="output",
            eager=BUSY,
            fused=math.nan,
            of_allowed=math.inf,
            ok=False,
        )
    )
    return tuple(rows)


def strips_of() -> tuple[Strip, ...]:
    random = Random(7)
    made = []
    for name, speed in (("whole model", 1.63), ("h.0.mlp, 1024 rows", 1.94), ("h.3.mlp", 0.97)):
        ratios = tuple(speed * random.gauss(1, 0.03) for _ in range(40))
        made.append(
            Strip(
                name=name,
                ratios=ratios,
                control=tuple(random.gauss(1, 0.02) for _ in range(40)),
                speedup=speed,
                interval=(speed * 0.985, speed * 1.014),
                verdict="faster" if speed > 1 else "slower",
            )
        )
    return tuple(made)


def blocks_of() -> tuple[BlockRow, ...]:
    rows = [
        BlockRow(
            path=f"h.{number}.mlp",
            what="gelu 768→3072→768",
            outcome="welded",
            serves="cpu packed",
            reason="",
            speedup=1.9 + 0.02 * number,
            interval=(1.85, 1.99),
        )
        for number in range(DEPTH - 1)
    ]
    rows.append(
        BlockRow(
            path=f"h.{DEPTH - 1}.mlp",
            what="gelu 768→3072→768",
            outcome="not faster",
            serves="",
            reason="0.97x of eager, 0.94 to 0.99",
            speedup=0.97,
            interval=(0.94, 0.99),
        )
    )
    rows.append(
        BlockRow(
            path=HOSTILE,
            what=HOSTILE_KIND,
            outcome="refused",
            serves="",
            reason="it is called with <unknown> keywords",
        )
    )
    return tuple(rows)


def made_page() -> Page:
    """Every section, before and after, the device's lanes too."""
    before, after = made_side("before", False, True), made_side("after", True, True)
    assert isinstance(before.step_us, float)
    assert isinstance(after.step_us, float)
    return Page(
        title=f"GPT, fused {HOSTILE}",
        verdict=f"A training step of GPT takes {after.step_us / 1e3:.1f} ms instead of "
        f"{before.step_us / 1e3:.1f} ms: {before.step_us / after.step_us:.2f}x as fast.",
        sides=(before, after),
        diff=diff_of(made_tree(False), made_tree(True)),
        blocks=blocks_of(),
        curves=curves_of(),
        maps=(map_of(),),
        launched=launches_of(),
        history=(history_of(),),
        errors=errors_of(),
        strips=strips_of(),
        environment=(
            ("torch", "2.13.0"),
            ("CPU", "An Example CPU, avx512"),
            ("threads", "2"),
            ("host", HOSTILE),
        ),
        command="torchweld fuse gpt --training --report report.html",
        notes=("Times are means over 20 rounds.",),
    )


def unmeasured_page() -> Page:
    """One profile on a busy machine: counts, and no time."""
    tree = made_tree(False)
    side = made_side("", False, False)
    return Page(
        title="GPT",
        verdict=f"Not measured: {BUSY.reason}.",
        sides=(
            PageSide(
                name="",
                about=side.about,
                step_us=BUSY,
                account=BUSY,
                explained=BUSY,
                modules=rows_of(tree, tree, False),
            ),
        ),
    )


def large_flame(frames: int) -> Flame:
    """A flame of so many frames, each inside one of those before it."""
    random = Random(11)
    parents = [-1, *(random.randrange(max(0, i // 3 - 40), i) for i in range(1, frames))]
    own = [0.0, *(random.expovariate(1.0) * 3 for _ in range(1, frames))]
    names = tuple(f"aten::op_{i}" for i in range(200))
    return Flame(
        total_us=sum(own),
        names=names,
        name=tuple(i % 200 for i in range(frames)),
        parent=tuple(parents),
        own_us=tuple(own),
        kind=tuple(0 if i < frames // 4 else 1 for i in range(frames)),
        calls=tuple(1 for _ in range(frames)),
        module=tuple(-1 for _ in range(frames)),
    )
