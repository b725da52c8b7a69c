"""`tw.diagnose`: what wastes a step's time, why, what to do, and the most that could be won.

In: a `Profile`. Out: `Finding`s, largest possible gain first. Nothing is measured here: every rule
is a pure function from an `Evidence` (a profile and its account) to drafts of findings. Its
docstring says what it reads and why its bound is a bound. `combined_bound` adds several findings
up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchweld.core.argument_checks import check_kind
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import listed
from torchweld.findings.evidence import Evidence
from torchweld.findings.finding import Draft, Finding, bound_of, union
from torchweld.findings.fusible_ops import blocks_of, linears_of, runs_of
from torchweld.findings.rules_device import device_copies, device_idle
from torchweld.findings.rules_epilogue import between_products
from torchweld.findings.rules_fusion import mlp_blocks, pointwise_chains, shared_inputs
from torchweld.findings.rules_host import (
    cold_start,
    guard_cost,
    layout_copies,
    metadata_storm,
    overhead_bound,
    recompilation,
)
from torchweld.findings.rules_memory import page_faults
from torchweld.findings.rules_products import few_rows, slow_half
from torchweld.findings.weld_bounds import weld
from torchweld.profiles.accounting.cpu_pricing import is_priced, without_peaks
from torchweld.profiles.accounting.time_account import Account, account, peaks_hold
from torchweld.profiles.attributing.op_kinds import hides_kernels
from torchweld.profiles.profile import Profile

__all__ = ["RULES", "Finding", "combined_bound", "diagnose", "welding_bound"]

Rule = Callable[[Evidence], list[Draft]]

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
    between_products,
    layout_copies,
    page_faults,
)

# Rules whose bound is a roofline.
PRICED: tuple[Rule, ...] = (pointwise_chains, mlp_blocks, few_rows, shared_inputs, slow_half)
# Products that may or may not be Linears: the profile does not tell.
BATCHED = ("aten::bmm", "aten::baddbmm")
# Gains under this share of the step are not reported: profiling is not that precise.
LEAST_SHARE = 0.01


def diagnose(profile: Profile, accounted: Account | None = None) -> tuple[Finding, ...]:
    """The findings of a profile, ranked by the most that each could win.

    `accounted` is the profile's account, if it was made already. Rules that need the machine's
    peaks find nothing in a profile without them; its notices say so. Empty if the step was not
    measured: gains follow from times.
    """
    check_kind("diagnose", "profile", profile, Profile, "what tw.profile or tw.read_trace returns")
    if accounted is not None:
        check_kind("diagnose", "accounted", accounted, Account, "what tw.account returns")
    if isinstance(profile.step_us, NotMeasured):
        return ()
    case = _case(profile, accounted)
    steps = profile.accounted_steps
    found = [draft.finding(us / steps, case.step_us / steps) for draft, us in _drafts(case)]
    return tuple(sorted(found, key=lambda finding: (-finding.saved_us, -finding.once_us)))


def combined_bound(
    findings: Sequence[Finding], profile: Profile, accounted: Account | None = None
) -> float | NotMeasured:
    """The most that all these findings together could win: a speed-up of the step.

    No microsecond counts twice, whichever findings claim it. The findings must come from this
    profile; their claims are computed again.
    """
    if isinstance(profile.step_us, NotMeasured):
        return profile.step_us
    case = _case(profile, accounted)
    drafts = {(draft.rule, draft.title): draft for draft, _ in _drafts(case)}
    chosen = []
    for finding in findings:
        draft = drafts.get((finding.rule, finding.title))
        if draft is None:
            raise TorchweldError(
                f"the finding {finding.title!r} is not from this profile, which has "
                f"{', '.join(repr(title) for _, title in drafts) or 'none'}; give findings that "
                "tw.diagnose made of the same profile"
            )
        chosen.append(draft)
    return bound_of(case.settled_us(union(draft.claims for draft in chosen)), case.step_us)


def welding_bound(profile: Profile, accounted: Account | None = None) -> float | NotMeasured:
    """The most that welding every MLP and every Linear could win: a speed-up of the step.

    Unlike the findings it counts Linears that are near their roofline already. `NotMeasured` if the
    profile does not tell how long they take or how fast they could be: no bound is not a bound of
    1.
    """
    if isinstance(profile.step_us, NotMeasured):
        return profile.step_us
    if not is_priced(profile):
        return NotMeasured(without_peaks(profile))
    case = _case(profile, accounted)
    if not case.ops or case.step_us <= 0:
        return NotMeasured("no op was recorded")
    if (why := _hidden(case)) is not None:
        return why
    drafts = [draft for rule in (mlp_blocks, shared_inputs, slow_half) for draft in rule(case)]
    linears = linears_of(case)
    claims = union(
        [weld(case, [[i] for i in sorted(linears)]).claims, *(draft.claims for draft in drafts)]
    )
    # However many Linears become one block, each block is still called once.
    in_blocks = {i for block in blocks_of(case, runs_of(case), linears) for i in block.ops}
    calls = max(1, len(linears.keys() - in_blocks)) if linears else 0
    most_us = case.step_us - calls * case.cheapest_call_us - case.around_us
    return bound_of(min(case.settled_us(claims), max(most_us, 0.0)), case.step_us)


def _hidden(case: Evidence) -> NotMeasured | None:
    """A reason if Linears may have taken time that the bound does not count."""
    if not peaks_hold(case.account):
        return NotMeasured("ops were faster than the peaks that are known of this machine")
    hidden = [i for i, work in enumerate(case.works) if work is not None and _hides(case, i)]
    if case.time_us(hidden) * case.scale < LEAST_SHARE * case.step_us:
        return None
    names = sorted({case.ops[i].name.removeprefix("aten::") for i in hidden})
    return NotMeasured(f"it is not known how fast {listed(names, 3)} could be")


def _hides(case: Evidence, i: int) -> bool:
    """Whether an op may be or hold a Linear whose least time is not known."""
    op = case.ops[i]
    if op.name in BATCHED:  # of an einsum if it reads a weight; that of attention does not
        return any(value.producer < 0 for value, _ in case.flow.reads[i])
    if case.is_priced(i):
        return False
    ours = op.name.startswith("aten::") and not hides_kernels(op.name)
    return case.about(i).kind == "product" if ours else case.about(i).kind in ("fused", "unknown")


def _case(profile: Profile, accounted: Account | None) -> Evidence:
    return Evidence(profile, accounted if accounted is not None else account(profile))


def _drafts(case: Evidence) -> list[tuple[Draft, float]]:
    """What the rules found, with the µs that each could save at most, of all steps together."""
    if not case.ops or case.step_us <= 0:
        return []
    found = []
    trusted = case.on_device or peaks_hold(case.account)
    for rule in RULES:
        if rule in PRICED and not trusted:  # with peaks that are too low, it would not be a bound
            continue
        for draft in rule(case):
            saved_us = case.settled_us(draft.claims)
            if draft.always or saved_us >= LEAST_SHARE * case.step_us:
                found.append((draft, saved_us))
    return found
