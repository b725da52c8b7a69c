"""`tw.diagnose`: what wastes a step's time, why, what to do, and the most that could be won.

In: a `Profile`. Out: `Finding`s, those that could win most first. Every rule is a pure function
from a `Case` (a profile and its account) to drafts of findings; its docstring says what it reads
and why its bound is one. `combined_bound` adds several findings up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchweld.arguments import check_kind
from torchweld.diagnosis.calls import replacing_call_us
from torchweld.diagnosis.case import Case
from torchweld.diagnosis.chains import blocks_of, linears_of, runs_of
from torchweld.diagnosis.findings import Draft, Finding, bound_of, union
from torchweld.diagnosis.rules_device import device_copies, device_idle
from torchweld.diagnosis.rules_fusion import mlp_blocks, pointwise_chains, shared_inputs
from torchweld.diagnosis.rules_host import (
    cold_start,
    guard_cost,
    layout_copies,
    metadata_storm,
    overhead_bound,
    recompilation,
)
from torchweld.diagnosis.rules_products import few_rows, slow_half
from torchweld.diagnosis.welding import weld
from torchweld.errors import TorchweldError
from torchweld.profiler.account import Account, account
from torchweld.profiler.profile import Profile

__all__ = ["RULES", "Finding", "combined_bound", "diagnose", "welding_bound"]

Rule = Callable[[Case], list[Draft]]

RULES: tuple[Rule, ...] = (
    overhead_bound,
    pointwise_chains,
    mlp_blocks,
    few_rows,
    shared_inputs,
    slow_half,
    cold_start,
    recompilation,
    guard_cost,
    metadata_storm,
    device_idle,
    device_copies,
    layout_copies,
)

# What could win less than this share of the step is below what profiling it can tell.
LEAST_SHARE = 0.01


def diagnose(profile: Profile, accounted: Account | None = None) -> tuple[Finding, ...]:
    """The findings of a profile, ranked by the most that each could win.

    `accounted` is the profile's account, if it was made already. Rules that need the machine's
    peaks find nothing in a profile without them; its notices say so.
    """
    check_kind("diagnose", "profile", profile, Profile, "what tw.profile or tw.read_trace returns")
    if accounted is not None:
        check_kind("diagnose", "accounted", accounted, Account, "what tw.account returns")
    case = _case(profile, accounted)
    steps = profile.accounted_steps
    found = [draft.finding(us / steps, case.step_us / steps) for draft, us in _drafts(case)]
    return tuple(sorted(found, key=lambda finding: (-finding.saved_us, -finding.once_us)))


def combined_bound(
    findings: Sequence[Finding], profile: Profile, accounted: Account | None = None
) -> float:
    """The most that all these findings together could win: a speed-up of the step.

    No microsecond counts twice, whichever findings claim it. The findings must be of this profile;
    what they claim is found again from it.
    """
    case = _case(profile, accounted)
    drafts = {(draft.rule, draft.title): draft for draft, _ in _drafts(case)}
    chosen = []
    for finding in findings:
        draft = drafts.get((finding.rule, finding.title))
        if draft is None:
            raise TorchweldError(
                f"the finding {finding.title!r} is none of this profile, which has "
                f"{', '.join(repr(title) for _, title in drafts) or 'none'}; give findings that "
                "tw.diagnose made of the same profile"
            )
        chosen.append(draft)
    return bound_of(case.settled_us(union(draft.claims for draft in chosen)), case.step_us)


def welding_bound(profile: Profile, accounted: Account | None = None) -> float:
    """The most that welding every MLP and every Linear could win: a speed-up of the step.

    Unlike the findings it counts Linears that are near their roofline already.
    """
    case = _case(profile, accounted)
    if not case.ops or case.step_us <= 0:
        return 1.0
    drafts = [draft for rule in (mlp_blocks, shared_inputs, slow_half) for draft in rule(case)]
    linears = linears_of(case)
    claims = union(
        [weld(case, [[i] for i in sorted(linears)]).claims, *(draft.claims for draft in drafts)]
    )
    # However many Linears become one block, one call is left of each.
    in_blocks = {i for block in blocks_of(case, runs_of(case), linears) for i in block.ops}
    calls = max(1, len(linears.keys() - in_blocks)) if linears else 0
    most_us = case.step_us - calls * case.cheapest_call_us - case.around_us
    return bound_of(min(case.settled_us(claims), max(most_us, 0.0)), case.step_us)


def _case(profile: Profile, accounted: Account | None) -> Case:
    accounted = accounted if accounted is not None else account(profile)
    return Case(profile, accounted, replacing_call_us(profile))


def _drafts(case: Case) -> list[tuple[Draft, float]]:
    """What the rules found, with the µs that each could save at most, of all steps together."""
    if not case.ops or case.step_us <= 0:
        return []
    found = []
    for rule in RULES:
        for draft in rule(case):
            saved_us = case.settled_us(draft.claims)
            if draft.always or saved_us >= LEAST_SHARE * case.step_us:
                found.append((draft, saved_us))
    return found
