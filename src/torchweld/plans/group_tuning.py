"""Tries the groups of a model: members that read the same input as one op, against one by one.

A group has to be faster than its members as they are planned, each welded or left as it is. It is
tried at few rows: at many, the time that a call costs is nothing beside its product.
In: `TunedBlocks`. Out: the same with groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn, ops

from torchweld.core.blocks import parse_spec
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import counted
from torchweld.numerics.numerical_rule import Judgement, check_block
from torchweld.ops.backends import backend_named
from torchweld.ops.backends.backend import Form, device_of
from torchweld.plans.block_calls import (
    block_call,
    input_like,
    module_of,
    set_up_of_tensors,
    tensors_of,
)
from torchweld.plans.choice_timing import (
    FIRST_TURNS,
    LEAST_BUDGET_S,
    Timed,
    comparison_budget,
    instances,
    none_timed,
    seconds_of,
    time_ways,
)
from torchweld.plans.choice_verifying import (
    MOST_VERIFIED_ROWS,
    failed,
    judged_trial,
    unverified,
)
from torchweld.plans.kernel_choice import (
    TunedBlocks,
    choices_for,
    choose,
    keep_settled,
    tuning_of,
    with_numbers,
    with_times,
)
from torchweld.plans.measurement_cache import MeasurementCache
from torchweld.plans.plan import Planned, PlannedGroup, Trial, Tuning
from torchweld.plans.plan_options import PlanOptions
from torchweld.plans.time_budget import TimeBudget
from torchweld.welds.found_blocks import Call
from torchweld.welds.weld_decisions import Choice, Decision, choice_at

# More rows are not tried. At 64, three products of 768 → 768 take a millisecond, and what a group
# saves is some microseconds.
MOST_ROWS = 64
OVER = "the speed of its members one by one"


@dataclass(frozen=True)
class GroupKey:
    """What groups have in common that are tried together.

    singles: how each member runs by itself at these rows; None: its own code
    """

    forms: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    device: str
    rows: int
    singles: tuple[Choice | None, ...]


@dataclass(kw_only=True)
class AlikeGroups:
    """Groups of one key, each as its members, with a call of each."""

    key: GroupKey
    groups: list[tuple[Planned, ...]]
    calls: list[Call]

    @property
    def name(self) -> str:
        count = f" × {len(self.groups)}" if len(self.groups) > 1 else ""
        return f"group {self.groups[0][0].block.group}{count}, {counted(self.key.rows, 'row')}"

    def copied_singly(self) -> int:
        """Bytes of the copies that the members of one group keep without it."""
        return sum(member.copied_bytes for member in self.groups[0])


def tune_groups(
    model: nn.Module,
    tuned: TunedBlocks,
    options: PlanOptions,
    budget: TimeBudget,
    memory: MeasurementCache,
) -> TunedBlocks:
    """Tries all groups; the model is left unwelded. Groups are for inference alone.

    Only packed copies are tried: a group without them could be stale (group_gathering.h).
    """
    alike = [] if options.training or not options.packing else _alike(model, tuned)
    choices = [
        choice
        for choice in choices_for(False, False, True, model.parameters())
        if choice.abilities.c_forward and choice.packed
    ]
    tunings: dict[str, list[Tuning]] = {}
    for i, one in enumerate(alike):
        options.say(f"tuning {one.name}", 0.6 + 0.05 * i / len(alike))
        share_s = (budget.groups_end_s - time.perf_counter()) / (len(alike) - i)
        if options.timing:
            tuning = _tune(model, one, choices, share_s, memory)
        else:
            tuning = _untimed(model, one, choices, forced=options.force)
        for members, call in zip(one.groups, one.calls, strict=True):
            tunings.setdefault(members[0].block.group, []).append(replace(tuning, count=call.count))
    groups = (PlannedGroup(name=name, tunings=tuple(own)) for name, own in tunings.items())
    return replace(tuned, groups=tuple(groups))


def _alike(model: nn.Module, tuned: TunedBlocks) -> list[AlikeGroups]:
    by_name: dict[str, list[Planned]] = {}
    for one in tuned.planned:
        if one.block.group:
            by_name.setdefault(one.block.group, []).append(one)
    found: dict[GroupKey, AlikeGroups] = {}
    for members in by_name.values():
        blocks = [member.block for member in members]
        tensors = [tensor for block in blocks for tensor in tensors_of(model, block)]
        by_rows: dict[int, list[Call]] = {}
        for call in blocks[0].calls:
            if 0 < call.rows <= MOST_ROWS and call.contiguous:
                by_rows.setdefault(call.rows, []).append(call)
        for rows, calls in by_rows.items():
            key = GroupKey(
                forms=tuple(block.form for block in blocks),
                shapes=tuple(tuple(tensor.shape) for tensor in tensors),
                dtype=blocks[0].dtype,
                device=set_up_of_tensors(tensors),
                rows=rows,
                singles=tuple(choice_at(member.by_rows(), rows) for member in members),
            )
            alike = found.setdefault(key, AlikeGroups(key=key, groups=[], calls=[]))
            alike.groups.append(tuple(members))
            alike.calls.append(replace(calls[0], count=sum(call.count for call in calls)))
    return list(found.values())


def _tune(
    model: nn.Module,
    one: AlikeGroups,
    choices: Sequence[Choice],
    budget_s: float,
    memory: MeasurementCache,
) -> Tuning:
    about = (one.key, len(one.groups), tuple(choices))
    kept = memory.recall(about, Tuning)
    if kept is not None and (again := _verified_again(model, one, kept)) is not None:
        return again
    begun_s = time.perf_counter()
    trials = {choice: verify_group(model, one, choice) for choice in choices}
    left_s = budget_s - (time.perf_counter() - begun_s)
    good = [choice for choice, trial in trials.items() if trial.verified]
    timed = _timed(model, one, good, left_s)
    for choice, found in timed.items():
        trials[choice] = with_times(trials[choice], found, timed.values())
    tuning = choose(one.key.rows, list(trials.values()), OVER)
    keep_settled(memory, about, tuning)
    return tuning


def _verified_again(model: nn.Module, one: AlikeGroups, kept: Tuning) -> Tuning | None:
    """Times that were measured before, with the errors of now; None if the choice is wrong now."""
    if kept.chosen is None:
        return kept
    fresh = verify_group(model, one, kept.chosen)
    if not fresh.verified:
        return None
    trials = (with_numbers(t, fresh) if t.choice == kept.chosen else t for t in kept.trials)
    return replace(kept, trials=tuple(trials))


def _untimed(
    model: nn.Module, one: AlikeGroups, choices: Sequence[Choice], *, forced: bool
) -> Tuning:
    """Verifies choices without timing. By force takes the first that verifies, otherwise none."""
    trials = [verify_group(model, one, choice) for choice in choices]
    if not forced:
        why = NotMeasured("tables of speeds are about single blocks alone")
        trials = [replace(t, verdict="not known", speed=why) if t.verified else t for t in trials]
    chosen = next((trial.choice for trial in trials if trial.verified and forced), None)
    return tuning_of(one.key.rows, trials, chosen, "" if chosen is None else "forced")


# ---- the numbers ----


def verify_group(model: nn.Module, one: AlikeGroups, choice: Choice) -> Trial:
    """Whether one op gives all members the right numbers, by the numerical rule."""
    try:
        return _verify_group(model, one, choice)
    except Exception as error:
        return failed(choice, error)


def _verify_group(model: nn.Module, one: AlikeGroups, choice: Choice) -> Trial:
    blocks = [member.block for member in one.groups[0]]
    spec = ";".join(one.key.forms)
    tensors = [t.detach() for block in blocks for t in tensors_of(model, block)]
    forms, call = parse_spec(spec), one.calls[0]
    form, device = Form.of("group", forms, tensors), device_of(tensors[0])
    reasons = backend_named(choice.backend).unsupported_reasons(
        form, [call.shape], tensors[0].dtype, device, choice.mode
    )
    if reasons:
        return unverified(choice, "cannot serve", "; ".join(reasons))
    if tensors[0].is_meta:
        return unverified(choice, "not measured", "the weights are on meta: no numbers, no times")
    x = input_like(call, rows=min(call.rows, MOST_VERIFIED_ROWS)).to(device)

    def candidate(x: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
        left = list(given)
        copies = [  # one per member, as welded members have them
            ops.torchweld.pack([left.pop(0) for _ in range(own.tensors)], text)
            for own, text in zip(forms, one.key.forms, strict=True)
        ]
        found: list[Tensor] = ops.torchweld.group_of_packed(x, copies, spec)
        return found

    def judged(tensors: Sequence[Tensor]) -> dict[str, Judgement]:
        return check_block(candidate, x, tensors, forms, group=True)

    return judged_trial(choice, judged, tensors)


# ---- the times ----


def _timed(
    model: nn.Module, one: AlikeGroups, choices: Sequence[Choice], budget_s: float
) -> dict[Choice, Timed]:
    """Each choice against the members one by one. Copies that those keep too do not count."""
    if not choices or any(p.is_meta for p in model.parameters()):
        return {}
    if budget_s < LEAST_BUDGET_S:
        return none_timed(choices, "no time was left for it")
    x = input_like(one.calls[0])
    call_s = seconds_of(_group_call(model, one.groups[0], x))
    budget = comparison_budget(call_s, len(choices), budget_s)
    if isinstance(budget, NotMeasured):
        return none_timed(choices, budget.reason)
    budget_s = budget
    groups = one.groups[: instances(call_s, len(one.groups), len(choices), budget_s)]
    singly = [pair for own in groups for pair in zip(own, one.key.singles, strict=True)]
    rows = one.key.rows
    baseline = [
        Decision(block=member.block, by_rows=((rows, rows, single),))
        for member, single in singly
        if single is not None
    ]
    ways = {
        choice: [
            Decision(
                block=member.block,
                by_rows=((rows, rows, single),),
                in_group=((rows, rows, choice),),
            )
            for member, single in singly
        ]
        for choice in choices
    }
    runs = [_group_call(model, own, x) for own in groups]
    try:
        found = time_ways(model, runs, baseline, ways, turns=FIRST_TURNS, budget_s=budget_s)
    except TorchweldError as error:
        return none_timed(choices, str(error).partition("\n")[0])
    copied = one.copied_singly()
    return {
        choice: replace(timed, copied_bytes=max(0, timed.copied_bytes - copied))
        for choice, timed in found.items()
    }


def _group_call(model: nn.Module, members: Sequence[Planned], x: Tensor) -> Callable[[], None]:
    """All members on the same x, one after the other."""
    calls = [block_call(module_of(model, m.block), m.block, x, False) for m in members]

    def run() -> None:
        for call in calls:
            call()

    return run
