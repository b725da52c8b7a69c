"""Rules about ops that could be one: chains of element-wise ops, MLP blocks, shared inputs.

All three claim what `weld_bounds.py` finds: the time that the ops take above the least that one op
in their place could take, by the machine's peaks. Without peaks they find nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torchweld.core.number_text import counted, duration, size
from torchweld.findings.evidence import Evidence
from torchweld.findings.finding import Draft
from torchweld.findings.fusible_ops import (
    FusibleBlock,
    PointwiseRun,
    blocks_of,
    input_of,
    linears_of,
    runs_of,
)
from torchweld.findings.product_shapes import Factors
from torchweld.findings.rules_products import FEW_ROWS
from torchweld.findings.weld_bounds import Welds, price_of_byte, weld

# Places named in the evidence of one finding; the rest are counted.
PLACES_NAMED = 4
# With many rows a product alone is as fast as a merged one. Then merging is reported only if what
# it certainly saves (starts, reading x again) is this share of the products' time.
SHARED_SHARE = 0.02


def pointwise_chains(case: Evidence) -> list[Draft]:
    """Two or more element-wise ops in a row, each of which reads what the one before wrote.

    Reads the data flow. A result that anything else reads (a product, a residual further on) is
    counted as written, and an input as read once, so what has to move is not claimed. The backward
    ops of a chain go with it, since one op has one backward; chains that are found in the backward
    pass alone count for themselves. The bound is one pass over memory, or the arithmetic at the
    peak if that takes longer, and one start, forward and backward.
    """
    runs = [run for run in runs_of(case) if len(run.ops) > 1]
    forward = [run for run in runs if case.is_forward(run.ops[0])]
    done = weld(case, [run.ops for run in forward], with_backward=True).members
    runs = [run for run in runs if run in forward or not done.issuperset(run.ops)]
    if not runs:
        return []
    welds = weld(case, [run.ops for run in runs], with_backward=True)
    phases = Counter(case.ops[run.ops[0]].phase for run in runs)
    evidence = [
        _comparison(case, welds, "one op for each chain"),
        f"{size(_spared_bytes(case, welds))} per step move between them and nowhere else",
        *_places(case, [(run.ops, _names(case, run)) for run in runs], welds),
    ]
    if phases["backward"]:
        evidence.append(f"{phases['backward']:,} of them in the backward pass")
    if phases["optimizer"]:
        evidence.append(f"{phases['optimizer']:,} of them in the optimizer: fused=True is one op")
    return [
        Draft(
            rule="pointwise-chain",
            title=f"{counted(len(runs), 'chain')} of element-wise ops",
            cause="Each op reads from memory what the one before has just written there, and is "
            "started on its own.",
            action="Fuse each chain into one op: torch.compile the function that holds it, or use "
            "one that does it all (F.gelu for its formula, F.silu for x · sigmoid(x)); in-place "
            "variants spare memory, not time.",
            evidence=(*evidence, *_inferred(case)),
            waste="time above what one op for each chain needs",
            claims=welds.claims,
            modules=case.patterns(case.place(run.ops) for run in runs),
        )
    ]


def mlp_blocks(case: Evidence) -> list[Draft]:
    """Linear, element-wise ops, Linear, and so on; gated or not.

    Reads products joined by element-wise ops through what they write and read. In training the
    backward ops of the block's own nodes are included, since a fused block brings its own backward;
    adding gradients up in the parameters is not. The bound for a block is its arithmetic at the
    peak, or reading its input and weights and writing its output (and gradients) once, if that
    takes longer: the hidden values need not move. With one start, forward and backward.
    """
    linears = linears_of(case)
    blocks = [block for block in blocks_of(case, runs_of(case), linears) if block.between]
    if not blocks:
        return []
    welds = weld(case, [block.ops for block in blocks], with_backward=True)
    gated = sum(block.gated for block in blocks)
    described = [(block.ops, _describe(case, block, linears)) for block in blocks]
    evidence = (
        _comparison(case, welds, "one op for each block"),
        f"{size(_spared_bytes(case, welds))} per step are written and read back between the ops of "
        "a block",
        *_places(case, described, welds),
        *_inferred(case),
    )
    what = "MLP block" if gated < len(blocks) else "gated MLP block"
    return [
        Draft(
            rule="mlp-block",
            title=f"{counted(len(blocks), what)} as separate ops"
            + (f", {gated} of them gated" if 0 < gated < len(blocks) else ""),
            cause="Linear, activation and Linear are started one after the other, and pass the "
            "hidden values through memory.",
            action="Fuse each block into one op: tw.FusedMLP in place of the module, or tw.mlp in "
            "its forward.",
            evidence=evidence,
            waste="time above what one op for each block needs",
            claims=welds.claims,
            modules=case.patterns(case.place(block.ops) for block in blocks),
        )
    ]


def shared_inputs(case: Evidence) -> list[Draft]:
    """Linears that read the same x, one directly after the other: q, k, v; gate, up.

    Reads which value a product has as its x. If a trace does not name memory, that is unknown and
    nothing is found. Two count together only if no other product runs between them. The
    bound is one product of them all: its arithmetic at the peak, or x, all weights and all results
    moved once, and one start.
    """
    if case.flow.inferred:
        return []
    linears = linears_of(case)
    groups = [
        group
        for group in _neighbours(case, linears)
        if linears[group[0]].M <= FEW_ROWS or _is_worth_sharing(case, group, linears)
    ]
    if not groups:
        return []
    welds = weld(case, groups)
    described = [
        (
            group,
            f"{linears[group[0]].M} × {linears[group[0]].K} → "
            + " + ".join(str(linears[i].N) for i in group),
        )
        for group in groups
    ]
    products = sum(len(group) for group in groups)
    return [
        Draft(
            rule="shared-input",
            title=f"{products} Linears read the input of another beside them",
            cause="Each is a product of its own that reads the same rows again and, being "
            "narrower, uses the machine less well.",
            action="Run each group as one op: tw.linears(x, layers), or one Linear whose output is "
            "split.",
            evidence=(
                _comparison(case, welds, "one product for each group"),
                *_places(case, described, welds),
            ),
            waste="time above what one product for each group needs",
            claims=welds.claims,
            modules=case.patterns(case.place(group) for group in groups),
        )
    ]


def _neighbours(case: Evidence, linears: dict[int, Factors]) -> list[list[int]]:
    groups: list[list[int]] = []
    last = None
    for i in case.flow.order:
        if case.about(i).kind not in ("product", "attention", "convolution", "fused"):
            continue
        value = input_of(case, i, linears[i]) if i in linears else None
        key = (id(value), linears[i].x.shape, linears[i].x.strides) if i in linears else None
        if key is not None and key == last:
            groups[-1].append(i)
        else:
            groups.append([i])
        last = key
    return [group for group in groups if len(group) > 1]


def _is_worth_sharing(case: Evidence, group: Sequence[int], linears: dict[int, Factors]) -> bool:
    """Whether one start instead of several, and reading x once, saves a noticeable part."""
    alone = weld(case, [group])
    starts_us = sum(
        us for slice_, us in alone.claims.items() if slice_.part in ("launch_us", "host_us")
    )
    again_us = sum(price_of_byte(case, i) * linears[i].x.nbytes for i in group[1:])
    return starts_us + again_us > SHARED_SHARE * alone.now_us


# ---- words ----


def _spared_bytes(case: Evidence, welds: Welds) -> float:
    """Per step: a trace may hold several."""
    return welds.spared_bytes / case.profile.accounted_steps


def _comparison(case: Evidence, welds: Welds, what: str) -> str:
    started = counted(welds.launches, "kernel" if case.on_device else "op")
    return (
        f"{duration(case.scale * welds.now_us)} of {duration(case.step_us)} in {started}; {what} "
        f"needs {duration(welds.least_us)} at least"
    )


def _places(
    case: Evidence, described: Sequence[tuple[Sequence[int], str]], welds: Welds
) -> list[str]:
    """The places with what they have, the most costly first."""
    where: dict[str, list[int]] = {}
    times: Counter[str] = Counter()
    for (ops, words), each in zip(described, welds.each, strict=True):
        where.setdefault(words, []).append(case.place(ops))
        times[words] += case.scale * each.now_us  # type: ignore[assignment]  # µs, not a count
    found = []
    for words, now_us in times.most_common(PLACES_NAMED):
        paths = ", ".join(case.patterns(where[words])[:PLACES_NAMED])
        count = len(where[words])
        found.append(f"{paths}: {f'{count} × ' if count > 1 else ''}({words}), {duration(now_us)}")
    if len(times) > PLACES_NAMED:
        found.append(f"and {counted(len(times) - PLACES_NAMED, 'other kind')}")
    return found


def _inferred(case: Evidence) -> list[str]:
    if not case.flow.inferred:
        return []
    return ["the trace does not name memory, so ops were joined by order, size and type"]


def _names(case: Evidence, run: PointwiseRun) -> str:
    return " → ".join(_name(case, i) for i in run.ops[:8]) + (" → …" if len(run.ops) > 8 else "")


def _name(case: Evidence, i: int) -> str:
    return case.ops[i].name.rpartition("::")[2].rstrip("_")


def _describe(case: Evidence, block: FusibleBlock, linears: dict[int, Factors]) -> str:
    """8 × 768 → 3072 → 768, gelu, float32."""
    first = linears[block.products[0]]
    # Products of one input are one layer: the two halves of a gate.
    widths = {id(input_of(case, i, linears[i])): linears[i].N for i in block.products}
    kinds = list(dict.fromkeys(_name(case, i) for i in block.between))
    words = " ".join(kinds[:4]) + (" …" if len(kinds) > 4 else "")
    shape = " → ".join(map(str, (first.K, *widths.values())))
    gated = "gated, " if block.gated else ""
    return f"{first.M} × {shape}, {gated}{words}, {first.x.dtype or 'unknown type'}"
