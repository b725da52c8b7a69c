"""What a plan says of the machine it was made on, when it is applied on another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import torchweld as tw
from torchweld.core.errors import TorchweldError
from torchweld.machine import fingerprint
from torchweld.machine.fingerprint import Fingerprint, taken_here
from torchweld.plans import plan_fitting, planner
from torchweld.plans.plan import Plan
from torchweld.plans.plan_fitting import mismatches

X = torch.randn(3, 8)
HERE = Fingerprint(
    key="0123456789ab",
    cpu="AMD EPYC 9B14",
    isa="avx512",
    torch="2.9.0",
    threads=2,
    torchweld="0.1.0",
    kernels="aaaa",
)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (HERE, []),
        (replace(HERE, cpu="Intel Xeon"), ["made on Intel Xeon, this is AMD EPYC 9B14"]),
        (replace(HERE, isa="avx2"), ["made for avx2, avx512 here"]),
        (replace(HERE, threads=1), ["made with 1 thread, 2 here"]),
        (replace(HERE, threads=8), ["made with 8 threads, 2 here"]),
        (replace(HERE, torch="2.8.0"), ["made for torch 2.8.0, this is 2.9.0"]),
        (replace(HERE, kernels="bbbb"), ["made with other kernels (torchweld was rebuilt)"]),
        (
            replace(HERE, kernels="bbbb", torchweld="0.2.0"),
            ["made with other kernels (torchweld 0.2.0, this is 0.1.0)"],
        ),
        (replace(HERE, kernels=None, isa=None), ["made for no compiled kernels, avx512 here"]),
        (replace(HERE, commit="abc", versions={"openvino": "1"}), []),  # nothing of the key
        (
            replace(HERE, isa="avx2", threads=8),
            ["made for avx2, avx512 here", "made with 8 threads, 2 here"],
        ),
    ],
)
def test_what_changed_is_named(there: Fingerprint, words: list[str]) -> None:
    assert there.since(HERE) == words


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()


def test_a_plan_made_with_other_threads_says_so(tmp_path: Path) -> None:
    model = mlp()
    torch.set_num_threads(2)
    tw.plan(model, X, force=True).save(tmp_path / "plan.json")
    torch.set_num_threads(1)
    with pytest.raises(TorchweldError, match="not fit: it was made with 2 threads, 1 here; plan"):
        tw.apply(model, Plan.load(tmp_path / "plan.json"))


def made(**changed: object) -> Plan:
    """A plan as if it came from a machine that differs in these."""
    plan = tw.plan(mlp(), X, force=True)
    assert plan.made_on is not None
    there = replace(plan.made_on, key="elsewhere", **changed)  # type: ignore[arg-type]
    return replace(plan, fingerprint="elsewhere", torch=there.torch, made_on=there)


def test_a_plan_of_another_machine_names_both() -> None:
    (cpu, isa) = mismatches(mlp(), made(cpu="a toaster", isa="none"))
    assert cpu == f"it was made on a toaster, this is {taken_here().cpu}"
    assert isa.startswith("it was made for none, ")


def test_another_torch_is_said_once() -> None:
    (said,) = mismatches(mlp(), made(torch="1.0"))
    assert said == f"it was made for torch 1.0, this is {torch.__version__}"


def test_a_plan_without_the_words_says_what_can_be_said() -> None:
    said = ["it was made on another machine, or for other threads or kernels"]
    assert mismatches(mlp(), replace(made(threads=99), made_on=None)) == said
    # Nor where the words do not belong to the fingerprint, or explain nothing.
    assert mismatches(mlp(), replace(made(threads=99), fingerprint="another")) == said
    assert mismatches(mlp(), made()) == said


def test_a_plan_of_here_has_the_fingerprint_of_here() -> None:
    plan = tw.plan(mlp(), X, force=True)
    assert plan.made_on == taken_here()
    assert plan.made_on.key == plan.fingerprint == fingerprint.key_here()


A100 = "NVIDIA A100-SXM4-80GB (8.0), driver API 13000, Triton 3.7.1"


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        (None, None, []),
        (A100, A100, []),
        (None, A100, [f"made with the model on the CPU alone, it is on {A100}"]),
        (A100, None, [f"made with the model on {A100}, it is on the CPU alone"]),
        (
            A100,
            A100.replace("3.7.1", "3.9.0"),
            [f"made with the model on {A100}, it is on {A100.replace('3.7.1', '3.9.0')}"],
        ),
    ],
)
def test_another_gpu_is_named(there: str | None, here: str | None, words: list[str]) -> None:
    assert replace(HERE, gpu=there).since(replace(HERE, gpu=here)) == words


def test_a_key_depends_on_the_gpus_that_were_used() -> None:
    alone = fingerprint.key_here()
    one, two = fingerprint.key_here([A100]), fingerprint.key_here([A100, "NVIDIA H100"])
    assert len({alone, one, two, fingerprint.key_here(["NVIDIA H100"])}) == 4
    assert taken_here(gpus=[A100]).gpu == A100
    assert taken_here(gpus=[A100]).key == one
    assert taken_here().gpu is None


def test_a_plan_made_on_another_gpu_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan was made with is what counts, whatever the machine has."""
    on = [A100]
    monkeypatch.setattr(planner, "gpus_of", lambda model: tuple(on))
    monkeypatch.setattr(plan_fitting, "gpus_of", lambda model: tuple(on))
    plan = tw.plan(mlp(), X, force=True)
    assert plan.made_on is not None
    assert plan.made_on.gpu == A100
    assert mismatches(mlp(), plan) == []
    on[:] = ["NVIDIA H100"]
    said = f"it was made with the model on {A100}, it is on NVIDIA H100"
    assert mismatches(mlp(), plan) == [said]
    on.clear()
    said = f"it was made with the model on {A100}, it is on the CPU alone"
    assert mismatches(mlp(), plan) == [said]
    tw.apply(mlp(), plan, on_mismatch="skip")
