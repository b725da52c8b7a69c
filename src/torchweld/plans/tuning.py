"""Tries every way to run the blocks of a model: verified, then timed against the original.

Blocks that compute the same on weights of the same shape are tried together, one after the other
with the weights of each, as the model calls them: so the weights of one have left the cache when
its turn comes again, if they do so in the model. All ways are timed in the same rounds.
In: a model, its blocks. Out: `TunedBlocks`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchweld.core.blocks import LayerForm, parse_spec, split_tensors
from torchweld.core.not_measured import NotMeasured
from torchweld.core.speeds import Speed
from torchweld.numerics.rule import Judgement, check_block
from torchweld.ops import backends
from torchweld.ops.backends.backend import Form, device_of
from torchweld.plans.block_calls import input_like, tensors_of
from torchweld.plans.known_speeds import KnownSpeed, SpeedTable, table_here
from torchweld.plans.measurement_cache import MeasurementCache
from torchweld.plans.plan import (
    SETTLED,
    UNASKED,
    Planned,
    PlannedGroup,
    Trial,
    Tuning,
    Verdict,
    decided,
)
from torchweld.plans.plan_options import PlanOptions
from torchweld.plans.time_budget import TimeBudget
from torchweld.plans.way_timing import LEAST_BUDGET_S, Timed, time_choices
from torchweld.welds.decisions import Choice, Decision
from torchweld.welds.found_blocks import Block, Call

# A block is verified on this many rows and columns at most: they are alike, and float64 is slow
# and large.
MOST_VERIFIED_ROWS = 32
MOST_VERIFIED_COLUMNS = 4096
# A copy of the weights has to be worth its memory: so much faster than the best way without, unless
# it is so small that nobody would notice.
COPY_GAIN = 1.05
SMALL_COPY_BYTES = 256 << 10


@dataclass(frozen=True)
class Key:
    """What blocks have in common that are tried together."""

    form: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    rows: int
    contiguous: bool
    training: bool


@dataclass(kw_only=True)
class Group:
    """Blocks of one key, with a call of each."""

    key: Key
    blocks: list[Block]
    calls: list[Call]

    @property
    def name(self) -> str:
        return f"{self.blocks[0].path or 'the model'} × {len(self.blocks)}, {self.key.rows} rows"

    def verified(self, model: nn.Module, choice: Choice) -> Trial:
        """The choice, verified on the first block for all."""
        return verify_choice(model, self.blocks[0], self.calls[0], choice, self.key.training)


def choices_for(
    training: bool, with_compile: bool, packing: bool, weights: Iterable[Tensor]
) -> tuple[Choice, ...]:
    """What is tried, apart from leaving the block as it is: in the order of BACKENDS, copies first.

    Only backends for the devices that the weights are on; if there is none, all of them, so that
    the plan has their reasons.
    """
    use = "training" if training else "inference"
    tried = [
        Choice(backend=backend.name, packed=mode.packs)
        for backend in backends.BACKENDS
        for mode in sorted(backend.abilities.modes, key=lambda mode: not mode.packs)
        if use in mode.planned
        if with_compile or not backend.abilities.compiles
        if packing or not mode.packs
    ]
    devices = {device_of(weight).type for weight in weights}
    return tuple(c for c in tried if c.abilities.runs_on(devices)) or tuple(tried)


@dataclass(frozen=True, kw_only=True)
class TunedBlocks:
    """Every block, and every group of blocks, with what was tried and chosen for it.

    table: the table that decided, or why there is none, if times were not measured
    """

    planned: tuple[Planned, ...]
    training: bool
    groups: tuple[PlannedGroup, ...] = ()
    table: str | None = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return decided(self.planned, self.training, self.groups)


def tune(
    model: nn.Module,
    blocks: Sequence[Block],
    options: PlanOptions,
    budget: TimeBudget,
    memory: MeasurementCache,
) -> TunedBlocks:
    """Tries all choices for all blocks; the model is left unwelded.

    Each group has its share of the time; what one does not use is left to the others. What was
    measured before is taken from `memory`.
    """
    training = options.training
    choices = choices_for(training, options.with_compile, options.packing, model.parameters())
    table = None if options.measure else table_here()
    groups = group(model, blocks, training)
    found: list[Tuning] = []
    for i, one in enumerate(groups):
        options.say(f"tuning {one.name}", 0.1 + 0.25 * i / len(groups))
        share_s = (budget.blocks_end_s - time.perf_counter()) / (len(groups) - i)
        if options.force:
            found.append(_forced(model, one, choices))
        elif table is not None:
            found.append(_by_table(model, one, choices, table))
        else:
            found.append(_tune_group(model, one, choices, share_s, memory))
    # What could not be measured in its share of the time has another turn in what is left.
    pending = [i for i, one in enumerate(found) if options.timing and one.unmeasured]
    for done, i in enumerate(pending):
        options.say(f"tuning {groups[i].name}", 0.35 + 0.25 * done / len(pending))
        share_s = (budget.blocks_end_s - time.perf_counter()) / (len(pending) - done)
        if share_s > LEAST_BUDGET_S:
            found[i] = _tune_group(model, groups[i], choices, share_s, memory)
    tunings: dict[str, list[Tuning]] = {block.path: [] for block in blocks}
    for one, tuning in zip(groups, found, strict=True):
        for block, call in zip(one.blocks, one.calls, strict=True):
            tunings[block.path].append(replace(tuning, count=call.count))
    return TunedBlocks(
        planned=tuple(Planned(block=b, tunings=tuple(tunings[b.path])) for b in blocks),
        training=training,
        table=_source(table),
    )


def _source(table: SpeedTable | NotMeasured | None) -> str | None:
    """What a plan says of the table that decided."""
    if table is None:
        return None
    return table.reason if isinstance(table, NotMeasured) else table.source


def group(model: nn.Module, blocks: Sequence[Block], training: bool) -> list[Group]:
    """Blocks by key, in the order of the model."""
    found: dict[Key, Group] = {}
    for block in blocks:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_of(model, block))
        by_rows: dict[tuple[int, bool], list[Call]] = {}
        for call in block.calls:
            if call.rows > 0:
                by_rows.setdefault((call.rows, call.contiguous), []).append(call)
        for (rows, contiguous), calls in by_rows.items():
            key = Key(block.form, shapes, block.dtype, rows, contiguous, training)
            one = found.setdefault(key, Group(key=key, blocks=[], calls=[]))
            one.blocks.append(block)
            one.calls.append(replace(calls[0], count=sum(call.count for call in calls)))
    return list(found.values())


# ---- one group ----


def _tune_group(
    model: nn.Module,
    one: Group,
    choices: Sequence[Choice],
    budget_s: float,
    memory: MeasurementCache,
) -> Tuning:
    about = (one.key, len(one.blocks), tuple(choices))
    kept = memory.recall(about, Tuning)
    if kept is not None:
        return _verified_again(model, one, replace(kept.record, remembered=kept.at))
    begun_s = time.perf_counter()
    trials = {choice: one.verified(model, choice) for choice in choices}
    left_s = budget_s - (time.perf_counter() - begun_s)
    good = [choice for choice, trial in trials.items() if trial.verified]
    if any(tensor.is_meta for tensor in tensors_of(model, one.blocks[0])):
        good = []
    if not good:
        return choose(one.key.rows, list(trials.values()))
    timed = time_choices(model, one.blocks, one.calls[0], good, one.key.training, left_s)
    for choice, found in timed.items():
        trials[choice] = replace(
            trials[choice],
            verdict=found.verdict,
            speed=found.speed,
            copied_bytes=found.copied_bytes or trials[choice].copied_bytes,
            copy_gain=copy_gain_of(found, timed.values()),
        )
    tuning = choose(one.key.rows, list(trials.values()))
    if tuning.chosen is not None or all(t.verdict in SETTLED for t in tuning.trials):
        memory.keep(about, tuning)
    return tuning


def _forced(model: nn.Module, one: Group, choices: Sequence[Choice]) -> Tuning:
    """The first that verifies; times nothing."""
    trials = []
    for choice in choices:
        trials.append(one.verified(model, choice))
        if trials[-1].verified:
            break
    chosen = trials[-1].choice if trials and trials[-1].verified else None
    return Tuning(
        rows=one.key.rows,
        count=1,
        trials=tuple(trials),
        chosen=chosen,
        reason=why_none(trials) if chosen is None else "forced",
    )


def _by_table(
    model: nn.Module, one: Group, choices: Sequence[Choice], table: SpeedTable | NotMeasured
) -> Tuning:
    """The fastest that verifies among those that a table knows to be faster; times nothing."""
    key = one.key
    speeds: dict[Choice, float] = {}
    trials: dict[Choice, Trial] = {}
    for choice in choices:
        known = _known(key, choice, table)
        trial = one.verified(model, choice)
        if trial.verified and isinstance(known, KnownSpeed) and known.faster:
            speeds[choice] = known.speedup
            trial = replace(trial, verdict="known", speed=NotMeasured(known.words))
        elif trial.verified:
            why = known.reason if isinstance(known, NotMeasured) else known.words
            trial = replace(trial, verdict="not known", speed=NotMeasured(why))
        trials[choice] = trial
    best = max(speeds, key=speeds.__getitem__, default=None)
    lean = max((c for c in speeds if not c.packed), key=speeds.__getitem__, default=None)
    if best is not None and lean is not None and speeds[best] < COPY_GAIN * speeds[lean]:
        best = lean
    return Tuning(
        rows=key.rows,
        count=1,
        trials=tuple(trials.values()),
        chosen=best,
        reason=why_none(list(trials.values())) if best is None else trials[best].reason,
    )


def _known(key: Key, choice: Choice, table: SpeedTable | NotMeasured) -> KnownSpeed | NotMeasured:
    if isinstance(table, NotMeasured):
        return table
    if not choice.abilities.in_speed_tables:
        return NotMeasured("tables of speeds are about the compiled kernels alone")
    if not key.contiguous:
        return NotMeasured("tables of speeds are about contiguous inputs alone")
    return table.known(
        key.form, key.shapes, key.dtype, key.rows, choice.packed, training=key.training
    )


def _verified_again(model: nn.Module, one: Group, kept: Tuning) -> Tuning:
    """Times that were measured before; what is chosen by them is verified on the weights of now."""
    trials = {trial.choice: trial for trial in kept.trials}
    while kept.chosen is not None:
        fresh = one.verified(model, kept.chosen)
        if fresh.verified:
            trials[kept.chosen] = replace(trials[kept.chosen], error_ratio=fresh.error_ratio)
            break
        trials[kept.chosen] = fresh
        chosen = choose(one.key.rows, list(trials.values()))
        kept = replace(chosen, remembered=kept.remembered)
    return replace(kept, trials=tuple(trials.values()))


def choose(rows: int, trials: Sequence[Trial], over: str = "the original's speed") -> Tuning:
    """The fastest that is verified and beyond noise; a copy only where it is worth its memory.

    over: what was timed against, in words
    """
    good = [
        (trial.speed.speedup, trial)
        for trial in trials
        if trial.verified and trial.verdict == "faster" and isinstance(trial.speed, Speed)
    ]
    speedup, best = max(good, key=lambda pair: pair[0], default=(0.0, None))
    reason = why_none(trials)
    if best is not None:
        reason = f"{speedup:.2f} times {over}"
        lean = [pair for pair in good if not pair[1].copied_bytes]
        lean_speedup, leanest = max(lean, key=lambda pair: pair[0], default=(speedup, best))
        gain = speedup / lean_speedup
        if not isinstance(best.copy_gain, NotMeasured):
            gain = best.copy_gain
        small = best.copied_bytes <= SMALL_COPY_BYTES
        if leanest is not best and not small and gain < COPY_GAIN:
            best = leanest
            reason = f"{lean_speedup:.2f} times {over}; a copy gains too little"
    return Tuning(
        rows=rows,
        count=1,
        trials=tuple(trials),
        chosen=None if best is None else best.choice,
        reason=reason,
    )


def why_none(trials: Sequence[Trial]) -> str:
    return "; ".join(
        f"{trial.choice.backend} {trial.choice.mode}: {trial.verdict}"
        + (f" ({trial.reason})" if trial.reason else "")
        for trial in trials
    )


def copy_gain_of(own: Timed, everything: Iterable[Timed]) -> float | NotMeasured:
    """Speed over the best way without a copy, round by round: both had the same noise."""
    if not own.copied_bytes:
        return NotMeasured("it keeps no copy")
    lean = [
        (timed.speed.speedup, timed.log_ratios)
        for timed in everything
        if isinstance(timed.speed, Speed) and not timed.copied_bytes
    ]
    if not lean or not isinstance(own.speed, Speed):
        return NotMeasured("no way without a copy was timed")
    _, ratios = max(lean)
    if len(own.log_ratios) != len(ratios):
        return NotMeasured("the way without a copy was timed in other rounds")
    return math.exp(statistics.median(a - b for a, b in zip(own.log_ratios, ratios, strict=True)))


# ---- the numbers ----


def verify_choice(
    model: nn.Module, block: Block, call: Call, choice: Choice, training: bool
) -> Trial:
    """Whether the choice gives right numbers, by the numerical rule; nothing is timed."""
    tensors = [tensor.detach() for tensor in tensors_of(model, block)]
    forms = parse_spec(block.form)
    form = Form.of("chain", forms, tensors)
    backend = backends.backend_named(choice.backend)
    dtype, device = getattr(torch, call.dtype), device_of(tensors[0])
    reasons = backend.unsupported_reasons(form, [call.shape], dtype, device, choice.mode)
    if reasons:
        return unverified(choice, "cannot serve", "; ".join(reasons))
    if tensors[0].is_meta:
        return unverified(choice, "not measured", "the weights are on meta: no numbers, no times")
    x = input_like(call, rows=max(1, min(call.rows, MOST_VERIFIED_ROWS))).to(device)
    columns = None if training else _some_columns(forms[-1], block.out_features)
    grads = None
    if training:
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(*x.shape[:-1], block.out_features, generator=generator).to(x)]

    copied = 0

    def judged(tensors: Sequence[Tensor]) -> dict[str, Judgement]:
        def candidate(x: Tensor, given: Sequence[Tensor]) -> Tensor:
            nonlocal copied
            runner = backend.build(form, given if training else tensors, choice.mode)
            y = runner(x)
            copied = runner.copied_bytes
            assert isinstance(y, Tensor)
            return y if columns is None else y[..., columns]

        few = tensors if columns is None else _narrowed(forms, tensors, columns)
        return check_block(candidate, x, few, forms, grads=grads)

    trial = verified(choice, judged, tensors)
    return replace(trial, copied_bytes=copied)


def verified(
    choice: Choice,
    judged: Callable[[Sequence[Tensor]], dict[str, Judgement]],
    tensors: Sequence[Tensor],
) -> Trial:
    """What `judged` makes of the tensors, as a trial that is still to be timed."""
    found = judged(tensors)
    if not all(judgement.meaningful for judgement in found.values()):
        # Weights that are zero, as an adapter's are at first: random ones say more.
        found = {k: v for k, v in found.items() if not v.within} or judged(_random_like(tensors))
    wrong = [f"{what}: {j.reason}" for what, j in found.items() if not j.within]
    ratio = max(max(j.row_ratio, j.rms_ratio) for j in found.values())
    return Trial(
        choice=choice,
        verified=not wrong,
        verdict="wrong" if wrong else "not measured",
        speed=NotMeasured("; ".join(wrong)) if wrong else UNASKED,
        error_ratio=min(ratio, 1e30),
    )


def unverified(choice: Choice, verdict: Verdict, reason: str) -> Trial:
    why = NotMeasured(reason)
    return Trial(choice=choice, verified=False, verdict=verdict, speed=why, error_ratio=why)


def _random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(t.shape, generator=generator) / max(t.shape[-1], 1) ** 0.5).to(t)
        for t in tensors
    ]


def _some_columns(form: LayerForm, count: int) -> slice | None:
    """Of a wide last layer, a part: in float64 a language model's head is as large as the model."""
    if form.gate != "none" or count <= MOST_VERIFIED_COLUMNS:
        return None
    step = -(-count // MOST_VERIFIED_COLUMNS)
    return slice(count - 1 - (count - 1) // step * step, None, step)  # the last one is among them


def _narrowed(
    forms: Sequence[LayerForm], tensors: Sequence[Tensor], columns: slice
) -> list[Tensor]:
    """The tensors with these columns of the last layer alone."""
    *earlier, (form, (weight, *bias)) = split_tensors(forms, tensors)
    narrow = weight[:, columns] if form.transposed else weight[columns]
    return [t for _, own in earlier for t in own] + [narrow, *(b[columns] for b in bias)]
