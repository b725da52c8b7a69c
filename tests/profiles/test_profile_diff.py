"""`tw.diff`: modules find their counterpart whatever fusion and wrapping did to the tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.block_profiles import Call, block_calls, block_places, blocks, fused_blocks, make
from tests.support.block_profiles import on_device as with_device
from tests.support.made_profiles import make_faults, tensor
from tests.support.made_traces import TRACES

from torchweld.core.errors import TorchweldError
from torchweld.core.module_paths import grouped_paths, joined, normal_path
from torchweld.core.not_measured import NotMeasured
from torchweld.profiles.accounting.profile_diff import NOTHING, Amount, Change, Diff, diff
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import UNTOLD, Profile, Tensor
from torchweld.profiles.recording.trace_profile import read_trace
from torchweld.profiles.step_faults import StepFaults
from torchweld.report import diff_sections
from torchweld.report.text_style import to_text


def change_at(found: Diff, path: str) -> Change:
    (change,) = [change for change in found.changes if change.path == path]
    return change


def text_of(found: Diff, **options: Any) -> str:
    return to_text(diff_sections(found, **options))


def total(amounts: list[Amount]) -> Amount:
    return sum(amounts, start=NOTHING)


def renamed(profile: Profile, prefix: str, wrapper: str) -> Profile:
    """The same model inside a module `wrapper` that calls it `prefix`."""
    root, *others = profile.modules
    modules = (
        replace(root, kind=wrapper, self_forward_us=0.0, self_backward_us=0.0),
        replace(root, path=prefix, parent=0),
        *(
            replace(module, path=f"{prefix}.{module.path}", parent=module.parent + 1)
            for module in others
        ),
    )
    ops = tuple(replace(op, module=op.module + 1) for op in profile.ops)
    return replace(profile, modules=modules, ops=ops)


# ---- alignment ----


def test_fused_children_are_compared_at_the_module_that_fused_them() -> None:
    found = diff(blocks(4), fused_blocks(4))
    mlp = change_at(found, "layers.*.mlp")
    assert (mlp.modules, mlp.own) == (4, False)
    assert mlp.kinds == ("Mlp", "FusedMLP")
    assert (mlp.before.launches, mlp.after.launches) == (12, 4)
    # For each MLP: gelu reads what the first product wrote, the second what gelu wrote.
    assert mlp.before.round_trips - mlp.after.round_trips == 4 * 2
    assert mlp.before.time_us == pytest.approx(4 * 279)
    assert mlp.after.time_us == pytest.approx(4 * 91)
    assert found.changes[0] == mlp
    assert found.only_a == ("layers.*.mlp.up", "layers.*.mlp.act", "layers.*.mlp.down")
    assert found.only_b == ()


def test_a_value_that_goes_round_counts_once_whoever_wrote_it() -> None:
    """Torch runs it so: each product finds its bias copied into its result."""
    places = [("", "Net"), ("mlp", "Mlp")]
    x, hidden, active, out = (tensor(8, n, storage=n) for n in (63, 255, 254, 62))

    def product(given: Tensor, result: Tensor) -> Call:
        bias = tensor(result.shape[-1])
        made = (result.storage or 0, result.nbytes)
        copied = Call(name="aten::copy_", path="mlp", inputs=(result, bias))
        weight = tensor(given.shape[-1], result.shape[-1])
        return Call(
            name="aten::addmm",
            path="mlp",
            us=50.0,
            inputs=(bias, given, weight),
            makes=made,
            inside=(copied,),
        )

    gelu = Call(name="aten::gelu", path="mlp", inputs=(hidden,), makes=(254, active.nbytes))
    before = make(places, [product(x, hidden), gelu, product(active, out)])
    fused = Call(name="torchweld::chain", path="mlp", inputs=(x,), makes=(62, out.nbytes))
    found = change_at(diff(before, make(places, [fused])), "mlp")
    assert (found.before.round_trips, found.after.round_trips) == (2, 0)
    assert (found.before.launches, found.after.launches) == (3, 1)


def test_nothing_is_lost_or_counted_twice() -> None:
    a, b = blocks(4, training=True), fused_blocks(4)
    found = diff(a, b)
    for side, profile in (("before", a), ("after", b)):
        explained = account(profile)
        whole = total([getattr(change, side) for change in found.changes])
        assert whole == getattr(found.step, side)
        assert whole.time_us == pytest.approx(profile.modules[0].total_us)
        assert whole.launches == explained.modules[0].launches
        assert whole.round_trip_bytes == explained.modules[0].round_trip_bytes


def test_the_same_profile_has_no_change() -> None:
    found = diff(blocks(), blocks())
    assert all(change.before == change.after for change in found.changes)
    assert found.speedup == 1
    assert (found.only_a, found.only_b, found.not_comparable) == ((), (), ())
    assert "nothing changed" in text_of(found)


@pytest.mark.parametrize("prefix", ["module", "_orig_mod", "inner.model"])
def test_a_wrapper_around_the_model_does_not_matter(prefix: str) -> None:
    plain = diff(blocks(), fused_blocks())
    for found in (
        diff(blocks(), renamed(fused_blocks(), prefix, "Wrapper")),
        diff(renamed(blocks(), prefix, "Wrapper"), fused_blocks()),
    ):
        assert [(c.path, c.before, c.after) for c in found.changes] == [
            (c.path, c.before, c.after) for c in plain.changes
        ]
        assert found.only_a == plain.only_a


def test_compiled_layers_keep_their_place() -> None:
    places = [
        (path.replace("layers.1", "layers.1._orig_mod"), *rest) for path, *rest in block_places(2)
    ]
    calls = [
        replace(call, path=call.path.replace("layers.1", "layers.1._orig_mod"))
        for call in block_calls(2)
    ]
    moved = [replace(c, inside=tuple(replace(i, path=c.path) for i in c.inside)) for c in calls]
    found = diff(blocks(2), make(places, moved))
    assert all(change.before == change.after for change in found.changes)
    assert (found.only_a, found.only_b) == ((), ())


def test_a_compiled_model_is_compared_as_a_whole() -> None:
    compiled = make([("", "Net")], [Call(name="graph_0_cpp_fused_gelu_0", us=100.0)])
    found = diff(blocks(2), compiled)
    (change,) = found.changes
    assert change.path == ""
    assert change.before.launches == 11
    assert change.after.launches == 1
    assert found.only_a == ("layers", "head")


def test_children_that_no_longer_run_count_as_gone() -> None:
    kept = [p if not p[0].endswith("mlp") else (p[0], "FusedMLP") for p in block_places(4)]
    calls = [
        replace(call, path=call.path.removesuffix(".up"), name="torchweld::mlp", inside=())
        if call.path.endswith(".up")
        else call
        for call in block_calls(4)
        if not call.path.endswith((".act", ".down"))
    ]
    found = diff(blocks(4), make(kept, calls))
    mlp = change_at(found, "layers.*.mlp")
    assert (mlp.before.launches, mlp.after.launches) == (12, 4)


def test_renamed_children_meet_in_their_parent() -> None:
    def moved(path: str) -> str:
        return path.replace(".up", ".fc1").replace(".down", ".fc2")

    places = [(moved(path), *rest) for path, *rest in block_places(2)]
    calls = [
        replace(
            c, path=moved(c.path), inside=tuple(replace(i, path=moved(i.path)) for i in c.inside)
        )
        for c in block_calls(2)
    ]
    found = diff(blocks(2), make(places, calls))
    mlp = change_at(found, "layers.*.mlp")
    assert mlp.own  # `act` is compared on a line of its own
    assert mlp.before == mlp.after
    assert found.only_a == ("layers.*.mlp.up", "layers.*.mlp.down")
    assert found.only_b == ("layers.*.mlp.fc1", "layers.*.mlp.fc2")


def test_another_class_at_the_same_place_is_compared() -> None:
    places = [p if not p[0].endswith("norm") else (p[0], "RMSNorm") for p in block_places(3)]
    found = diff(blocks(3), make(places, block_calls(3)))
    assert change_at(found, "layers.*.norm").kinds == ("LayerNorm", "RMSNorm")
    assert "LayerNorm → RMSNorm" in text_of(found)


def test_layers_that_changed_differently_are_not_one_line() -> None:
    a, half = blocks(6), fused_blocks(6)
    full = blocks(6)
    keep = {i for i, m in enumerate(full.modules) if m.path.startswith(("layers.0.", "layers.4."))}
    places = [(m.path, m.kind, m.extra) for i, m in enumerate(full.modules) if i in keep]
    others = [
        (m.path, m.kind, m.extra)
        for m in half.modules
        if not m.path.startswith(("layers.0.", "layers.4."))
    ]
    calls = [
        call
        for i in range(6)
        for call in (block_calls(6) if i in (0, 4) else _fused_calls(6))
        if call.path.startswith(f"layers.{i}.") or call.path == f"layers.{i}"
    ]
    found = diff(a, make([*others, *places], calls))
    assert change_at(found, "layers.[1-3,5].mlp").modules == 4
    assert change_at(found, "layers.[0,4].mlp.up").modules == 2
    assert found.only_a[0] == "layers.[1-3,5].mlp.up"


def _fused_calls(layers: int) -> list[Call]:
    profile = fused_blocks(layers)
    return [
        Call(name=op.name, path=profile.modules[op.module].path, us=op.self_us)
        for op in profile.ops
    ]


def test_paths_that_differ_in_numbers_share_a_name() -> None:
    assert grouped_paths(["a.0.b", "a.1.b", "c"]) == {"a.*.b": ["a.0.b", "a.1.b"], "c": ["c"]}
    assert list(grouped_paths(["s.1.l.0", "s.1.l.1"])) == ["s.1.l.*"]
    assert joined(["a.0", "a.1", "a.2", "a.7"], ["a.5"]) == "a.[0-2,7]"
    assert normal_path("a._orig_mod.b") == "a.b"


# ---- whether times may be compared ----


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cpu": "Other CPU"}, "CPU: Example CPU against Other CPU"),
        ({"threads": 8}, "threads: 1 against 8"),
        ({"torch": "8.8"}, "torch: 9.9 against 8.8"),
        ({"inputs": "8x64"}, "inputs: unknown against 8x64"),
        ({"training": True}, "inference against training"),
        ({"fingerprint": "g"}, "different builds"),
        ({"source": "trace"}, "one is a live profile, the other a trace"),
    ],
)
def test_times_of_different_set_ups_are_not_compared(change: dict[str, Any], reason: str) -> None:
    other = fused_blocks()
    found = diff(blocks(), replace(other, about=replace(other.about, **change)))
    assert len(found.not_comparable) == 1
    assert reason in found.not_comparable[0]
    assert found.speedup is None
    text = text_of(found)
    assert reason in " ".join(text.split())
    assert "3 → 1" in text
    for figure in ("saved", "speed", "3.07x", "2.38x", "1116"):
        assert figure not in text
    assert "3.07x" in text_of(found, force=True)


def test_counts_decide_the_order_where_times_do_not_count() -> None:
    other = make(
        block_places(2),
        [*block_calls(2), *[Call(name="aten::add", path="head", us=0.1) for _ in range(9)]],
        about_inputs="8x64",
    )
    found = diff(blocks(2), other)
    assert found.changes[0].path == "head"


# ---- order, steps, devices, files ----


def test_what_changed_most_comes_first_whichever_way() -> None:
    slower = [
        replace(call, us=call.us + 500) if call.path == "layers.1.norm" else call
        for call in block_calls(2)
    ]
    found = diff(blocks(2), make(block_places(2), slower))
    changed = [abs(change.saved_us) for change in found.changes]
    assert changed == sorted(changed, reverse=True)
    assert found.changes[0].saved_us == pytest.approx(-500)
    assert found.speedup is not None
    assert found.speedup < 1


def test_a_trace_of_several_steps_counts_as_one() -> None:
    twice = make(block_places(2), [*block_calls(2), *block_calls(2)], live=False, about_steps=2)
    found = diff(blocks(2, live=False), twice)
    assert found.step.before.launches == found.step.after.launches
    assert found.step_us[1] == pytest.approx(found.step_us[0], rel=0.02)
    assert found.step.after.time_us == pytest.approx(found.step.before.time_us, rel=0.02)
    assert "b covers 2 steps" in found.notes[0]


@pytest.mark.parametrize(
    ("before", "after", "notes"),
    [
        (make_faults(25_336), make_faults(12), ("page faults per step: 25,336 → 12",)),
        (make_faults(12), make_faults(3), ()),
        (make_faults(25_336), UNTOLD, ()),
    ],
)
def test_page_faults_that_came_or_went_are_noted(
    before: StepFaults, after: StepFaults | NotMeasured, notes: tuple[str, ...]
) -> None:
    one, two = replace(blocks(2), faults=before), replace(fused_blocks(2), faults=after)
    assert diff(one, two).notes == notes


@pytest.mark.parametrize(
    ("name", "launches", "device_us"),
    [("a100_training_step", 1575, 413_947 / 5), ("mi250_toy_training", 16, 149.0)],
)
def test_kernels_of_a_trace_are_divided_by_the_steps_that_they_come_from(
    name: str, launches: int, device_us: float
) -> None:
    trace = read_trace(TRACES / f"{name}.json.gz")
    step = diff(trace, trace).step.before
    assert step.launches == launches
    assert step.device_us == pytest.approx(device_us, rel=0.005)
    assert step.time_us == pytest.approx(trace.modules[0].total_us / trace.about.steps, rel=0.05)


def test_kernels_are_counted_where_there_is_a_device() -> None:
    a, b = with_device(blocks(2, live=False)), with_device(fused_blocks(2, live=False))
    found = diff(a, b)
    assert found.on_device
    mlp = change_at(found, "layers.*.mlp")
    assert (mlp.before.launches, mlp.after.launches) == (6, 2)
    assert mlp.saved_device_us == pytest.approx(20.0)
    assert "kernels" in text_of(found)
    assert diff(a, blocks(2, live=False)).not_comparable == ("device: Example GPU against none",)


def test_a_diff_saves_and_loads(tmp_path: Any) -> None:
    found = diff(blocks(training=True), fused_blocks())
    found.save(tmp_path / "diff.json")
    assert Diff.load(tmp_path / "diff.json") == found
    with pytest.raises(TorchweldError, match=r"nothing\.json cannot be read"):
        Diff.load(tmp_path / "nothing.json")


@pytest.mark.parametrize("text", ["{", "[]", '{"torchweld_diff": 1}', '{"a": 1}'])
def test_a_damaged_diff_is_refused(text: str) -> None:
    with pytest.raises(TorchweldError, match="diff"):
        Diff.from_json(text)


def test_the_text_names_the_change_as_people_would() -> None:
    text = text_of(diff(blocks(4), fused_blocks(4)))
    first, *lines = text.splitlines()
    assert first.startswith("Net: a step takes 1.30 ms → 546 µs, 2.38x; 21 ops that do work → 13")
    row = next(line for line in lines if "layers.*.mlp " in line).split()
    assert row == [
        *("layers.*.mlp", "Mlp", "→", "FusedMLP", "4", "x", "1116", "364", "752", "3.07x"),
        *("3", "→", "1", "−2", "−32.8", "kB"),
    ]
    assert "ran only in a" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_names_cannot_control_the_terminal() -> None:
    name = "x\x1b[31m\n[b]"
    found = diff(
        make([("", name), (name, name)], [Call(name="aten::mm", path=name)]),
        make([("", name), (name, "B")], [Call(name="aten::mm", path=name, us=99.0)]),
    )
    text = text_of(found)
    assert "\x1b" not in text
    assert "x\\x1b[31m\\n[b]" in text
