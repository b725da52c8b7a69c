"""Tries every choice for the blocks of a model: verifies it, then times it against the original.

In: a model and its blocks. Out: `TunedBlocks`. Blocks that are alike are tried together, one after
the other, each with its own weights, as the model calls them. So the weights of one block leave the
cache before its next turn if they do so in the model. All choices are timed in the same rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.ops import backends
from torchweld.ops.backends.backend import device_of
from torchweld.plans.alike_blocks import AlikeBlocks, AlikeKey, alike_blocks
from torchweld.plans.block_calls import tensors_of
from torchweld.plans.choice_timing import LEAST_BUDGET_S, Timed, time_choices
from torchweld.plans.choice_verifying import has_failed, verify_choice
from torchweld.plans.known_speeds import KnownSpeed, SpeedTable, table_here
from torchweld.plans.measurement_cache import MeasurementCache
from torchweld.plans.plan import SETTLED, Planned, PlannedGroup, Trial, Tuning, decided
from torchweld.plans.plan_options import PlanOptions
from torchweld.plans.time_budget import TimeBudget
from torchweld.welds.found_blocks import Block
from torchweld.welds.weld_decisions import Choice, Decision

# A copy of the weights must be worth its memory: this much faster than the best choice without one,
# unless the copy is so small that nobody notices.
COPY_GAIN = 1.05
# Memory kept for a backward must be worth it too: saving has to be this much faster than keeping
# the input alone.
SAVING_GAIN = 1.02
SMALL_COPY_BYTES = 256 << 10


def choices_for(
    training: bool,
    with_compile: bool,
    packing: bool,
    weights: Iterable[Tensor],
    recompute: bool | None = None,
) -> tuple[Choice, ...]:
    """What is tried, apart from leaving the block as it is: in the order of BACKENDS, copies first.

    Only backends for the devices that the weights are on; if there is none, all of them, so that
    the plan has their reasons. `recompute`: only choices that do so, or that do not.
    """
    use = "training" if training else "inference"
    tried = [
        Choice(backend=backend.name, packed=mode.packs, recompute=mode.recomputes)
        for backend in backends.BACKENDS
        for mode in sorted(backend.abilities.modes, key=lambda mode: not mode.packs)
        if use in mode.planned
        if with_compile or not backend.abilities.compiles
        if packing or not mode.packs
        if recompute is None or mode.recomputes is recompute
    ]
    devices = {device_of(weight).type for weight in weights}
    return tuple(c for c in tried if c.abilities.runs_on(devices)) or tuple(tried)


@dataclass(frozen=True, kw_only=True)
class BlockRounds:
    """The rounds behind one trial, which a plan is too small to hold."""

    name: str  # of alike blocks, with their rows
    choice: Choice
    timed: Timed


@dataclass(frozen=True, kw_only=True)
class TunedBlocks:
    """Every block, and every group of blocks, with what was tried and chosen for it.

    table:  if nothing was timed, the table that decided, or why there is none
    rounds: of the choices that were timed now
    """

    planned: tuple[Planned, ...]
    training: bool
    groups: tuple[PlannedGroup, ...] = ()
    table: str | None = None
    rounds: tuple[BlockRounds, ...] = ()

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
    """Tries all choices for all blocks, and leaves the model unwelded.

    The time is shared equally; what some alike blocks do not use is left to the others.
    Times that were measured before are taken from `memory`.
    """
    training = options.training
    choices = choices_for(
        training, options.with_compile, options.packing, model.parameters(), options.recompute
    )
    table = None if options.measure else table_here()
    alike = alike_blocks(model, blocks, training)
    found: list[Tuning] = []
    rounds: dict[int, dict[Choice, Timed]] = {}
    for i, one in enumerate(alike):
        options.say(f"tuning {one.name}", 0.1 + 0.25 * i / len(alike))
        share_s = (budget.blocks_end_s - time.perf_counter()) / (len(alike) - i)
        if options.force:
            found.append(_forced(model, one, choices))
        elif table is not None:
            found.append(_by_table(model, one, choices, table))
        else:
            tuning, rounds[i] = _timed(model, one, choices, share_s, memory)
            found.append(tuning)
    # Blocks that could not be measured in their share of the time have another turn.
    pending = [i for i, one in enumerate(found) if options.timing and one.unmeasured]
    for done, i in enumerate(pending):
        options.say(f"tuning {alike[i].name}", 0.35 + 0.25 * done / len(pending))
        share_s = (budget.blocks_end_s - time.perf_counter()) / (len(pending) - done)
        if share_s > LEAST_BUDGET_S:
            found[i], rounds[i] = _timed(model, alike[i], choices, share_s, memory)
    tunings: dict[str, list[Tuning]] = {block.path: [] for block in blocks}
    for one, tuning in zip(alike, found, strict=True):
        for block, call in zip(one.blocks, one.calls, strict=True):
            tunings[block.path].append(replace(tuning, count=call.count))
    return TunedBlocks(
        planned=tuple(Planned(block=b, tunings=tuple(tunings[b.path])) for b in blocks),
        training=training,
        table=_source(table),
        rounds=tuple(
            BlockRounds(name=alike[i].name, choice=choice, timed=timed)
            for i, ways in rounds.items()
            for choice, timed in ways.items()
            if timed.log_ratios
        ),
    )


def _source(table: SpeedTable | NotMeasured | None) -> str | None:
    """What a plan says of the table that decided."""
    if table is None:
        return None
    return table.reason if isinstance(table, NotMeasured) else table.source


# ---- alike blocks ----


def _timed(
    model: nn.Module,
    one: AlikeBlocks,
    choices: Sequence[Choice],
    budget_s: float,
    memory: MeasurementCache,
) -> tuple[Tuning, dict[Choice, Timed]]:
    """The tuning, and the rounds that were timed for it."""
    about = (one.key, len(one.blocks), tuple(choices))
    kept = memory.recall(about, Tuning)
    if kept is not None:
        return _verified_again(model, one, kept), {}
    begun_s = time.perf_counter()
    trials = {choice: _verified(model, one, choice) for choice in choices}
    left_s = budget_s - (time.perf_counter() - begun_s)
    good = [choice for choice, trial in trials.items() if trial.verified]
    if any(tensor.is_meta for tensor in tensors_of(model, one.blocks[0])):
        good = []
    if not good:
        return choose(one.key.rows, list(trials.values())), {}
    timed = time_choices(model, one.blocks, one.calls[0], good, one.key.training, left_s)
    for choice, found in timed.items():
        trials[choice] = replace(
            with_times(trials[choice], found, timed.values()),
            over_saving=over_saving_of(choice, timed),
        )
    tuning = choose(one.key.rows, list(trials.values()))
    keep_settled(memory, about, tuning)
    return tuning, timed


def keep_settled(memory: MeasurementCache, about: object, tuning: Tuning) -> None:
    """Keeps a tuning for later plans, unless more time could settle what it left open."""
    settled = tuning.chosen is not None or all(t.verdict in SETTLED for t in tuning.trials)
    if settled and not any(map(has_failed, tuning.trials)):
        memory.keep(about, tuning)


def _verified(model: nn.Module, one: AlikeBlocks, choice: Choice) -> Trial:
    """The first block is verified for all of them."""
    return verify_choice(model, one.blocks[0], one.calls[0], choice, one.key.training)


def _forced(model: nn.Module, one: AlikeBlocks, choices: Sequence[Choice]) -> Tuning:
    """The first choice that verifies; times nothing."""
    trials: list[Trial] = []
    for choice in choices:
        trials.append(_verified(model, one, choice))
        if trials[-1].verified:
            return tuning_of(one.key.rows, trials, choice, "forced")
    return tuning_of(one.key.rows, trials)


def tuning_of(
    rows: int, trials: Iterable[Trial], chosen: Choice | None = None, reason: str = ""
) -> Tuning:
    kept = tuple(
        trial if trial.choice == chosen or not trial.verified else replace(trial, errors=())
        for trial in trials
    )
    return Tuning(rows=rows, count=1, trials=kept, chosen=chosen, reason=reason or _why_none(kept))


def _by_table(
    model: nn.Module, one: AlikeBlocks, choices: Sequence[Choice], table: SpeedTable | NotMeasured
) -> Tuning:
    """The fastest choice that verifies and that a table knows to be faster; times nothing."""
    key = one.key
    speeds: dict[Choice, float] = {}
    trials: dict[Choice, Trial] = {}
    for choice in choices:
        known = _known(key, choice, table)
        trial = _verified(model, one, choice)
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
    reason = "" if best is None else trials[best].reason
    return tuning_of(key.rows, trials.values(), best, reason)


def _known(
    key: AlikeKey, choice: Choice, table: SpeedTable | NotMeasured
) -> KnownSpeed | NotMeasured:
    if isinstance(table, NotMeasured):
        return table
    if not choice.abilities.in_speed_tables:
        return NotMeasured("tables of speeds only have the compiled kernels")
    if not key.contiguous:
        return NotMeasured("tables of speeds only have contiguous inputs")
    return table.known(
        key.form, key.shapes, key.dtype, key.rows, choice.packed, training=key.training
    )


def _verified_again(model: nn.Module, one: AlikeBlocks, kept: Tuning) -> Tuning:
    """Times that were measured before. The choice is verified on the weights of now."""
    trials = {trial.choice: trial for trial in kept.trials}
    while kept.chosen is not None:
        fresh = _verified(model, one, kept.chosen)
        if fresh.verified:
            trials[kept.chosen] = with_numbers(trials[kept.chosen], fresh)
            break
        trials[kept.chosen] = fresh
        chosen = choose(one.key.rows, list(trials.values()))
        kept = replace(chosen, remembered=kept.remembered)
    return replace(kept, trials=tuple(trials.values()))


def with_times(verified: Trial, timed: Timed, everything: Iterable[Timed]) -> Trial:
    """A verified trial with its times. `everything`: all choices that were timed beside it."""
    return replace(
        verified,
        verdict=timed.verdict,
        speed=timed.speed,
        copied_bytes=timed.copied_bytes or verified.copied_bytes,
        copy_gain=copy_gain_of(timed, everything),
        saved_bytes=timed.saved_bytes,
        original_saved_bytes=timed.original_saved_bytes,
    )


def with_numbers(timed: Trial, verified: Trial) -> Trial:
    """The times of one trial with the errors of another."""
    return replace(timed, error_ratio=verified.error_ratio, errors=verified.errors)


def choose(rows: int, trials: Sequence[Trial], over: str = "the original's speed") -> Tuning:
    """The fastest that is verified and beyond noise.

    A copy, and hidden values that are kept for a backward, only if they are worth their memory.
    over: what the trials were timed against, in words
    """
    good = [
        (trial.speed.speedup, trial)
        for trial in trials
        if trial.verified and trial.verdict == "faster" and isinstance(trial.speed, Speed)
    ]
    if not good:
        return tuning_of(rows, trials)
    speedup, best = max(good, key=lambda pair: pair[0])
    lean = [pair for pair in good if not pair[1].copied_bytes]
    lean_speedup, leanest = max(lean, key=lambda pair: pair[0], default=(speedup, best))
    gain = best.copy_gain if isinstance(best.copy_gain, float) else speedup / lean_speedup
    small = best.copied_bytes <= SMALL_COPY_BYTES
    if leanest is not best and not small and gain < COPY_GAIN:
        why = f"{lean_speedup:.2f} times {over}; a copy gains too little"
        return tuning_of(rows, trials, leanest.choice, why)
    for other_speedup, other in good:
        ratio = other.over_saving
        if not isinstance(ratio, float):
            ratio = other_speedup / speedup
        if other.choice.recompute and not best.choice.recompute and SAVING_GAIN * ratio >= 1.0:
            why = f"{other_speedup:.2f} times {over}; keeping more than the input gains too little"
            return tuning_of(rows, trials, other.choice, why)
    return tuning_of(rows, trials, best.choice, f"{speedup:.2f} times {over}")


def _why_none(trials: Sequence[Trial]) -> str:
    return "; ".join(
        f"{trial.choice.backend} {trial.choice.mode}: {trial.verdict}"
        + (f" ({trial.reason})" if trial.reason else "")
        for trial in trials
    )


def copy_gain_of(own: Timed, everything: Iterable[Timed]) -> float | NotMeasured:
    """The speed over the best choice without a copy, round by round: both had the same noise."""
    if not own.copied_bytes:
        return NotMeasured("it keeps no copy")
    lean = [
        (timed.speed.speedup, timed.log_ratios)
        for timed in everything
        if isinstance(timed.speed, Speed) and not timed.copied_bytes
    ]
    if not lean or not isinstance(own.speed, Speed):
        return NotMeasured("no choice without a copy was timed")
    _, ratios = max(lean)
    return _paired(own.log_ratios, ratios)


def over_saving_of(choice: Choice, timed: Mapping[Choice, Timed]) -> float | NotMeasured:
    """The speed of a choice that recomputes over the best that saves, round by round."""
    if not choice.recompute:
        return NotMeasured("it computes nothing again")
    saving = [
        (other.speed.speedup, other.log_ratios)
        for one, other in timed.items()
        if isinstance(other.speed, Speed) and not one.recompute
    ]
    if not saving or not isinstance(timed[choice].speed, Speed):
        return NotMeasured("no choice that keeps hidden values was timed beside it")
    _, ratios = max(saving)
    return _paired(timed[choice].log_ratios, ratios)


def _paired(own: Sequence[float], other: Sequence[float]) -> float | NotMeasured:
    """How many times as fast, from the log-ratios of the same rounds."""
    if not own or len(own) != len(other):
        return NotMeasured("they were timed in other rounds")
    return math.exp(statistics.median(a - b for a, b in zip(own, other, strict=True)))
