"""Rules about single products: few rows far below the roofline, 16-bit slower than 32-bit."""

from __future__ import annotations

from collections.abc import Sequence

from torchweld.core.number_text import counted, duration, figure
from torchweld.findings.evidence import Evidence
from torchweld.findings.finding import Draft, Slice
from torchweld.findings.fusible_ops import linears_of
from torchweld.findings.product_shapes import Factors, factors_of
from torchweld.findings.weld_bounds import weld
from torchweld.profiles.accounting.op_costs import arithmetic_dtype

# Up to here BLAS libraries were measured far from the roofline (8 rows of 768 → 3072: a sixth of
# it); from 128 rows on they reach most of it.
FEW_ROWS = 64
# A product that takes this many times its roofline is far from it. From 128 rows on the same
# library takes 1.1 to 1.3 times.
FAR = 2.0
# A 16-bit product is called slower than 32-bit only where no 32-bit product would be as slow: with
# many rows those take up to 1.4 times their roofline, with few up to 6.2 times.
FAR_OF_FLOAT32 = 3.0
FAR_OF_FLOAT32_FEW_ROWS = 8.0

HALF = ("bfloat16", "float16")
SHAPES_NAMED = 5


def few_rows(case: Evidence) -> list[Draft]:
    """Linears of at most 64 rows whose product takes twice its roofline or more.

    Reads the products of the forward, grouped by shape. Those whose time is mostly the start of an
    op are left to the rule about overhead. The bound for each is its own roofline and one start:
    the weight still has to be read and the arithmetic done.
    """
    linears = linears_of(case)
    shapes: dict[str, list[int]] = {}
    for i, factors in linears.items():
        if factors.M <= FEW_ROWS:
            shapes.setdefault(factors.shape, []).append(i)
    slow = sorted(i for members in shapes.values() if _are_far(case, members) for i in members)
    if not slow:
        return []
    welds = weld(case, [[i] for i in slow])
    return [
        Draft(
            rule="few-rows",
            title=f"{counted(len(slow), 'Linear')} of few rows far below the roofline",
            cause="The library's product is made for many rows. With few it keeps neither the "
            "memory nor the arithmetic of this machine busy.",
            action="Use kernels made for few rows (tw.FusedMLP, tw.mlp; a chain of one layer is a "
            "single Linear), or more rows at a time: batch requests.",
            evidence=(
                f"{duration(case.scale * welds.now_us)} of {duration(case.step_us)} in "
                f"{counted(len(slow), 'product')}; the roofline allows {duration(welds.least_us)}",
                *_shapes(case, slow, linears),
            ),
            waste="time above the roofline of these Linears",
            claims=welds.claims,
            modules=case.patterns(case.ops[i].module for i in slow),
        )
    ]


def _are_far(case: Evidence, members: Sequence[int]) -> bool:
    time_us = case.time_us(members)
    launch_us = sum(case.split(i).launch_us for i in members)
    roofline_us = sum(case.about(i).roofline_us for i in members)
    return 2 * launch_us <= time_us and time_us - launch_us >= FAR * roofline_us


def slow_half(case: Evidence) -> list[Draft]:
    """Products in bfloat16 or float16 on a CPU that would be faster in float32.

    Reads all products, backward too, and the CPU's measured float32 peak. The bound for each is a
    float32 product at its roofline: the same arithmetic at the float32 peak, twice the bytes, and
    everything around the product as it is.
    """
    threads, peaks = case.profile.about.threads, case.profile.peaks
    gflops = peaks.fma_gflops("float32", threads) if peaks is not None else None
    if peaks is None or gflops is None or case.on_device:
        return []
    claims: dict[Slice, float] = {}
    slow: dict[int, Factors] = {}
    now_us = wide_us = flops = 0.0
    for i, op in enumerate(case.ops):
        factors = factors_of(op) if case.is_priced(i) else None
        if factors is None or arithmetic_dtype(op) not in HALF:
            continue
        about = case.about(i)
        wide_bytes = 2 * (about.read_bytes + about.written_bytes)
        gbps = peaks.read_gbps(wide_bytes, threads)
        if gbps is None:
            return []
        least_us = max(about.flops / (1e3 * gflops), wide_bytes / (1e3 * gbps))
        working_us = case.split(i).total_us - case.split(i).launch_us
        few = min(factors.M, factors.K, factors.N) <= FEW_ROWS
        if working_us < (FAR_OF_FLOAT32_FEW_ROWS if few else FAR_OF_FLOAT32) * least_us:
            continue
        slow[i] = factors
        now_us += working_us
        wide_us += least_us
        flops += about.flops
        claims.update(_above(case, i, least_us))
    if not slow:
        return []
    dtype = " and ".join(sorted({arithmetic_dtype(case.ops[i]) for i in slow}))
    return [
        Draft(
            rule="slow-16-bit",
            title=f"{counted(len(slow), 'product')} in {dtype} slower than in float32",
            cause=f"This CPU does not multiply {dtype} natively, and the library's products in it "
            "are far below what float32 reaches.",
            action="Run in float32, or keep 16-bit weights and use kernels that widen them in "
            "registers (tw.FusedMLP).",
            evidence=(
                f"they reach {figure(1e-3 * flops / now_us)} GFLOP/s; the float32 peak of this "
                f"machine is {figure(gflops)}",
                f"they take {duration(now_us)}; float32 products at their roofline, with twice the "
                f"bytes, {duration(wide_us)}",
                *_shapes(case, list(slow), slow),
            ),
            waste=f"time that {dtype} products take above float32 at its roofline",
            claims=claims,
            modules=case.patterns(case.ops[i].module for i in slow),
        )
    ]


def _above(case: Evidence, i: int, least_us: float) -> dict[Slice, float]:
    """Claims on what the op takes above `least_us`: slowness first, arithmetic last."""
    split = case.split(i)
    left_us = split.total_us - split.launch_us - least_us
    found = {}
    for part in ("slow_us", "unexplained_us", "round_trip_us", "traffic_us", "arithmetic_us"):
        us = min(max(0.0, getattr(split, part)), left_us)
        if us > 0:
            found[Slice("op", i, part)] = us
            left_us -= us
    return found


def _shapes(case: Evidence, chosen: Sequence[int], factors: dict[int, Factors]) -> list[str]:
    """Shape by shape, the most costly first: how many, how far."""
    groups: dict[str, list[int]] = {}
    for i in chosen:
        groups.setdefault(factors[i].shape, []).append(i)
    ranked = sorted(groups, key=lambda shape: -case.time_us(groups[shape]))
    found = []
    for shape in ranked[:SHAPES_NAMED]:
        members = groups[shape]
        times = case.time_us(members) / sum(case.about(i).roofline_us for i in members)
        found.append(f"{len(members)} × ({shape}): {figure(times)} times the roofline")
    if len(ranked) > SHAPES_NAMED:
        found.append(f"and {counted(len(ranked) - SHAPES_NAMED, 'other shape')}")
    return found
