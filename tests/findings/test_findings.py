"""The diagnosis as a whole: ranking, bounds, what overlaps, what is saved."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.made_profiles import Builder, make_faults, make_timing, new_storage, tensor
from tests.support.measured import measured

import torchweld as tw
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import from_plain, to_plain
from torchweld.findings import RULES, Finding, combined_bound, diagnose, welding_bound
from torchweld.findings.evidence import MARGIN, Evidence
from torchweld.findings.finding import Slice, bound_of, union
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import UNTOLD, Profile, Tensor

# With the builder's peaks: 100,000 operations and 10,000 bytes a µs; the smallest op takes 1 µs.


def mlp_profile(rows: int = 8, product_us: float = 100.0, act_us: float = 20.0) -> Profile:
    """One block 64 → 128 → 64 and a softmax, all in modules of their own."""
    made = Builder()
    fc1, act, fc2 = (made.module(path, python_us=2.0) for path in ("fc1", "act", "fc2"))
    hidden, activated, out = (new_storage() for _ in range(3))
    x, w1, w2 = tensor(rows, 64), tensor(64, 128), tensor(128, 64)
    h = tensor(rows, 128, storage=hidden)
    g = tensor(rows, 128, storage=activated)
    made.op("aten::mm", product_us, module=fc1, inputs=(x, w1), makes=(hidden, h.nbytes))
    made.op("aten::gelu", act_us, module=act, inputs=(h,), makes=(activated, g.nbytes))
    made.op("aten::mm", product_us, module=fc2, inputs=(g, w2), makes=(out, rows * 256))
    y = tensor(rows, 64, storage=out)
    made.op("aten::_softmax", 30.0, inputs=(y,), makes=y.nbytes)
    return made.build()


def by_rule(found: tuple[Finding, ...]) -> dict[str, Finding]:
    assert len({finding.rule for finding in found}) == len(found)
    return {finding.rule: finding for finding in found}


def test_findings_are_ranked_by_what_they_could_win() -> None:
    found = diagnose(mlp_profile())
    assert [finding.rule for finding in found] == ["mlp-block", "few-rows"]
    assert found[0].saved_us > found[1].saved_us
    for finding in found:
        step_us = measured(mlp_profile().step_us)
        assert finding.bound == pytest.approx(step_us / (step_us - finding.saved_us))


def test_what_is_saved_is_that_of_one_step_where_a_trace_has_several() -> None:
    one = mlp_profile()
    four = replace(one, about=replace(one.about, steps=4))
    for once, often in zip(diagnose(one), diagnose(four), strict=True):
        assert often.saved_us == pytest.approx(once.saved_us / 4)
        assert often.bound == pytest.approx(once.bound)
    assert combined_bound(diagnose(four), four) == pytest.approx(combined_bound(diagnose(one), one))


def test_what_the_step_does_around_the_model_is_not_promised() -> None:
    made = Builder()
    fc = made.module("fc", python_us=2.0)
    inputs = (tensor(8, 64), tensor(64, 128))
    made.op("aten::mm", 50.0, module=fc, inputs=inputs, makes=8 * 128 * 4)
    made.places[0].python_us = 40.0
    profile = made.build()

    def left_us(around_us: float) -> float:
        timing = make_timing(measured(profile.step_us), around_us=around_us)
        bound = measured(welding_bound(replace(profile, timing=timing)))
        return measured(profile.step_us) / bound

    assert left_us(7.0) - left_us(0.0) == pytest.approx((1 - MARGIN) * 7.0)


def test_the_bound_is_what_one_op_needs_by_the_peaks() -> None:
    profile = mlp_profile()
    finding = by_rule(diagnose(profile))["mlp-block"]
    # Both weights, x and y move; the arithmetic hides behind that.
    least_us = (2 * 64 * 128 * 4 + 2 * 8 * 64 * 4) / 10_000
    now_us = 100 + 20 + 100 + 3 * 2.0
    start_us, call_us = 1.0, 2.0
    assert finding.saved_us == pytest.approx(now_us - least_us - start_us - call_us)


def test_what_findings_share_is_counted_once() -> None:
    profile = mlp_profile()
    found = diagnose(profile)
    block = by_rule(found)["mlp-block"]
    # All that the two Linears could win is in the block.
    together = measured(combined_bound(found, profile))
    assert together == pytest.approx(block.bound)
    assert together < bound_of(
        sum(finding.saved_us for finding in found), measured(profile.step_us)
    )
    assert combined_bound((), profile) == 1.0
    assert combined_bound([found[1]], profile) == pytest.approx(found[1].bound)


def test_a_finding_of_another_profile_is_refused() -> None:
    found = diagnose(mlp_profile())
    other = Builder()
    other.op("aten::_softmax", 30.0, inputs=(tensor(8, 64),), makes=2048)
    with pytest.raises(TorchweldError, match=r"not from this profile.*same profile"):
        combined_bound(found, other.build())


def test_findings_survive_a_file() -> None:
    profile = mlp_profile()
    found = diagnose(profile)
    text = json.dumps([to_plain(finding) for finding in found])
    loaded = tuple(from_plain(Finding, item) for item in json.loads(text))
    assert loaded == found
    assert combined_bound(loaded, profile) == combined_bound(found, profile)


def test_the_sentence_states_bound_share_and_waste() -> None:
    finding = Finding(
        rule="r",
        title="t",
        cause="c",
        action="a",
        evidence=(),
        waste="avoidable traffic",
        saved_us=15.0,
        bound=bound_of(15.0, 100.0),
    )
    assert finding.sentence == "at most 1.18x: 15 % of the step is avoidable traffic"
    everything = replace(finding, bound=bound_of(100.0, 100.0))
    assert everything.sentence.startswith("more than 1000x: nearly all of the step")
    once = replace(finding, saved_us=0.0, bound=1.0, once_us=2e6)
    assert once.sentence == "2.00 s once, nothing in later steps: avoidable traffic"


def test_without_peaks_no_rule_that_needs_them_finds_anything() -> None:
    profile = replace(mlp_profile(), peaks=None)
    assert diagnose(profile) == ()
    assert account(profile).notices  # which is where it is said


def test_what_wins_next_to_nothing_is_no_finding() -> None:
    profile = mlp_profile()
    assert diagnose(profile)
    assert diagnose(replace(profile, step_us=1000 * measured(profile.step_us))) == ()


def test_nothing_is_found_in_an_empty_profile() -> None:
    assert diagnose(Builder().build(step_us=10.0)) == ()


def test_a_tenth_may_belong_to_the_other_side_in_a_corrected_profile() -> None:
    """Times of a live profile are right to within a tenth; a bound counts that in."""
    exact = mlp_profile()
    corrected = replace(exact, timing=make_timing(measured(exact.step_us)))
    for rule, finding in by_rule(diagnose(exact)).items():
        left_us = measured(exact.step_us) - finding.saved_us
        more_us = by_rule(diagnose(corrected))[rule].saved_us - finding.saved_us
        assert more_us == pytest.approx(MARGIN * min(finding.saved_us, left_us))


def test_claims_are_shares_of_the_step_on_the_clock() -> None:
    """Recorded steps that were slower than timed ones do not make a bound that exceeds the step."""
    profile = replace(mlp_profile(), timing=make_timing(1.0))
    slower = replace(profile, step_us=0.25 * measured(profile.step_us))
    for rule, finding in by_rule(diagnose(profile)).items():
        assert by_rule(diagnose(slower))[rule].bound == pytest.approx(finding.bound)


def test_every_rule_says_what_it_reads_and_why_its_bound_is_one() -> None:
    assert len(RULES) == 15
    for rule in RULES:
        text = rule.__doc__ or ""
        assert "Reads" in text, rule
        assert "bound" in text or "claimed" in text, rule


def test_diagnose_is_public() -> None:
    assert tw.diagnose is diagnose


# ---- what holds for every profile ----

NAMES = (
    "aten::mm",
    "aten::gelu",
    "aten::mul",
    "aten::add_",
    "aten::_softmax",
    "aten::t",
    "aten::clone",
    "aten::bernoulli_",
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Ops on square tensors that read each other's results at random."""
    made = Builder(op_cost_us=draw(st.sampled_from((0.0, 1.0))))
    modules = [0, *(made.module(f"m.{i}", python_us=draw(times)) for i in range(2))]
    sides = st.sampled_from((4, 32, 200))
    values: list[Tensor] = [tensor(n, n) for n in (4, 32, 200)]
    for _ in range(draw(st.integers(1, 12))):
        name, side = draw(st.sampled_from(NAMES)), draw(sides)
        fitting = [value for value in values if value.shape == (side, side)]
        first, second = (draw(st.sampled_from(fitting)) for _ in range(2))
        strides = draw(st.sampled_from((None, (side, 1), (1, side))))
        result = tensor(side, side)
        makes = not name.endswith(("_", "::t"))
        made.op(
            name,
            draw(times),
            module=draw(st.sampled_from(modules)),
            inputs=(replace(first, strides=strides), *([second] if name != "aten::gelu" else [])),
            makes=(result.storage or 0, result.nbytes) if makes else None,
            phase=draw(st.sampled_from(("forward", "forward", "backward"))),
        )
        if makes:
            values.append(result)
    faults = make_faults(draw(st.integers(0, 2000)), system_us=draw(times))
    return replace(made.build(), faults=faults if draw(st.booleans()) else UNTOLD)


times = st.floats(0.0, 500.0)


@given(profiles())
def test_no_finding_claims_more_than_there_is(profile: Profile) -> None:
    found = account(profile)
    case = Evidence(profile, found)
    every = []
    for rule in RULES:
        for draft in rule(case):
            every.append(draft.claims)
            by_op: dict[int, float] = {}
            for (of, number, part), us in draft.claims.items():
                assert us > 0
                if of == "op":
                    assert us <= getattr(found.ops[number].split, part) + 1e-6
                    by_op[number] = by_op.get(number, 0.0) + us
            for number, us in by_op.items():
                assert us <= max(0.0, measured(found.ops[number].split).total_us) + 1e-6
            # Whatever is done, arithmetic at the peak is left.
            assert not [s for s in draft.claims if s.part == "arithmetic_us"]
            assert case.settled_us(draft.claims) <= case.step_us + 1e-6
    together = case.settled_us(union(every))
    assert together <= case.step_us + 1e-6
    assert all(together >= case.settled_us(claims) - 1e-6 for claims in every)


@given(profiles())
def test_bounds_are_ordered_and_the_combined_one_covers_each(profile: Profile) -> None:
    found = diagnose(profile)
    assert list(found) == sorted(found, key=lambda finding: -finding.saved_us)
    together = measured(combined_bound(found, profile))
    for finding in found:
        assert 1.0 <= finding.bound <= together * (1 + 1e-9)


def test_union_takes_the_larger_of_two_claims_on_one_slice() -> None:
    one, other = Slice("op", 1, "slow_us"), Slice("op", 2, "slow_us")
    assert union([{one: 3.0, other: 1.0}, {one: 2.0}]) == {one: 3.0, other: 1.0}


# ---- the bound on welding ----


def test_welding_is_bounded_only_where_linears_can_be_priced() -> None:
    """Without peaks there is no bound: 1.0 would say that nothing can be won."""
    profile = mlp_profile()
    bound = welding_bound(profile)
    assert isinstance(bound, float)
    assert bound > 1.5
    unpriced = welding_bound(replace(profile, peaks=None))
    assert isinstance(unpriced, NotMeasured)
    assert "torchweld info --measure" in unpriced.reason
    elsewhere = replace(profile, about=replace(profile.about, threads=77))
    assert isinstance(welding_bound(elsewhere), NotMeasured)


@pytest.mark.parametrize(
    ("name", "hides"),
    [
        ("## Call CompiledFxGraph abc", True),
        ("mylib::gated_mlp", True),
        ("aten::bmm", True),  # an einsum with a weight
        ("aten::relu", False),
        ("aten::sort", False),
    ],
)
def test_welding_is_not_bounded_where_linears_may_be_hidden(name: str, hides: bool) -> None:
    made = Builder()
    made.op("aten::mm", 50.0, inputs=(tensor(8, 64), tensor(64, 128)), makes=8 * 128 * 4)
    made.op(name, 50.0, inputs=(tensor(1, 8, 64), tensor(1, 64, 64)), makes=8 * 64 * 4)
    assert isinstance(welding_bound(made.build()), NotMeasured) == hides


def test_a_model_without_linears_gains_nothing_by_welding() -> None:
    made = Builder()
    made.op("aten::relu", 50.0, inputs=(tensor(8, 64),), makes=8 * 64 * 4)
    assert welding_bound(made.build()) == 1.0
    assert isinstance(welding_bound(Builder().build()), NotMeasured)
