"""Which backend serves: every reason collected, one decision, and messages one can act on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from tests.support.backend_samples import CPU, chain_of
from torch import Tensor

from torchweld.core.blocks import parse_spec
from torchweld.core.errors import BlockError, BuildError, TorchweldError, UnsupportedError
from torchweld.machine import kernel_build
from torchweld.ops.backends import (
    BACKENDS,
    Abilities,
    Backend,
    BackendMode,
    Form,
    Runner,
    reference_backend,
    select,
)
from torchweld.ops.backends.cpu_backend import CpuBackend

BLOCK = Form(kind="chain", forms=parse_spec("gelu/b;identity/b"), sizes=((8, 16), (16, 4)))
SHAPES = [(3, 8)]
ANYTHING = Abilities(
    devices=None,
    modes=(BackendMode(name="plain"), BackendMode(name="other")),
    needs="nothing",
    trains=True,
    deterministic=True,
)


@dataclass(frozen=True)
class Fake:
    """A backend with reasons of our choice."""

    name: str
    reasons: tuple[str, ...] = ()
    abilities: Abilities = ANYTHING

    def unavailable(self) -> list[str]:
        return []

    def unsupported_reasons(
        self,
        block: Form,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        mode: str | None = None,
    ) -> list[str]:
        return [*self.reasons, *(["no other mode"] if mode == "other" else [])]

    def build(self, block: Form, tensors: Sequence[Tensor], mode: str | None = None) -> Runner:
        return reference_backend.ReferenceRunner(block, tensors)


def test_the_order_of_preference() -> None:
    assert [backend.name for backend in BACKENDS] == [
        "cpu",
        *("cublas", "triton", "triton-narrow", "cuda"),
        *("torch", "reference", "compile"),
    ]


def test_the_first_that_can_is_taken_and_the_others_reasons_are_kept() -> None:
    backends: list[Backend] = [Fake("a", ("too old", "too wide")), Fake("b"), Fake("c", ("slow",))]
    choice = select(BLOCK, SHAPES, torch.float32, CPU, backends=backends)
    assert choice.backend.name == "b"
    assert [str(refusal) for refusal in choice.passed_over] == ["a: too old; too wide"]


def test_a_request_by_name_is_met_or_raises_with_every_reason() -> None:
    backends: list[Backend] = [Fake("a", ("too old", "too wide")), Fake("b"), Fake("c")]
    chosen = select(BLOCK, SHAPES, torch.float32, CPU, name="c", backends=backends)
    assert (chosen.backend.name, chosen.passed_over) == ("c", ())
    with pytest.raises(UnsupportedError) as raised:
        select(BLOCK, SHAPES, torch.float32, CPU, name="a", backends=backends)
    assert str(raised.value).splitlines() == [
        "backend a cannot run chain 8→16→4 (gelu/b;identity/b):",
        "  - too old",
        "  - too wide",
        "these can: b, c",
    ]


def test_a_mode_is_asked_about_too() -> None:
    backends: list[Backend] = [Fake("a"), Fake("b")]
    with pytest.raises(UnsupportedError, match="backend b in mode other cannot run") as raised:
        select(BLOCK, SHAPES, torch.float32, CPU, name="b", mode="other", backends=backends)
    assert "no other mode" in str(raised.value)
    with pytest.raises(UnsupportedError, match=r"without a backend.*a \(plain, other\)"):
        select(BLOCK, SHAPES, torch.float32, CPU, mode="other", backends=backends)


def test_none_that_can_is_an_error_with_all_reasons() -> None:
    with pytest.raises(UnsupportedError) as raised:
        select(
            BLOCK, SHAPES, torch.float32, CPU, backends=[Fake("a", ("old",)), Fake("b", ("new",))]
        )
    assert "a: old" in str(raised.value)
    assert "b: new" in str(raised.value)


def test_unknown_names_are_met_with_the_nearest() -> None:
    with pytest.raises(
        TorchweldError, match=r"'torhc'; did you mean 'torch'\?.*cpu, cublas, .*torch, ref"
    ):
        select(BLOCK, SHAPES, torch.float32, CPU, name="torhc")
    with pytest.raises(TorchweldError, match=r"mode of backend torch 'mkl'; did you mean 'mkldnn'"):
        select(BLOCK, SHAPES, torch.float32, CPU, name="torch", mode="mkl")


def test_shapes_that_do_not_fit_the_block_are_nobodys_reason() -> None:
    with pytest.raises(BlockError, match=r"\[3, 9\]; expected 8 features"):
        select(BLOCK, [(3, 8), (3, 9)], torch.float32, CPU)


@pytest.mark.skipif(kernel_build.build_problem() is not None, reason="needs the compiled kernels")
def test_the_compiled_kernels_serve_the_cpu_and_torch_the_rest() -> None:
    assert select(BLOCK, SHAPES, torch.bfloat16, CPU).backend.name == "cpu"
    elsewhere = select(BLOCK, SHAPES, torch.float32, torch.device("cuda"))
    assert elsewhere.backend.name == "torch"
    assert "the tensors are on cuda" in str(elsewhere.passed_over[0])


def test_without_kernels_torch_serves_and_the_problem_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_build, "build_problem", lambda: "there is no compiler; get one")
    choice = select(BLOCK, SHAPES, torch.float32, CPU)
    assert choice.backend.name == "torch"
    own, *of_gpus = choice.passed_over
    assert str(own) == "cpu: there is no compiler; get one"
    assert own.runs_there
    for other in of_gpus:
        assert "it runs on cuda; the tensors are on cpu" in str(other)
        assert not other.runs_there
    with pytest.raises(UnsupportedError, match="there is no compiler; get one"):
        select(BLOCK, SHAPES, torch.float32, CPU, name="cpu")


def test_a_compiled_part_that_does_not_load_is_a_reason_not_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> str:
        raise BuildError("TORCHWELD_ISA=abacus is not one of these")

    monkeypatch.setattr(kernel_build, "build_problem", lambda: None)
    monkeypatch.setattr(kernel_build, "isa_in_use", fail)
    assert CpuBackend().unavailable() == ["TORCHWELD_ISA=abacus is not one of these"]


def test_all_reasons_are_given_at_once() -> None:
    reasons = CpuBackend().unsupported_reasons(
        BLOCK, SHAPES, torch.complex64, torch.device("cuda", 1)
    )
    assert any("cuda:1" in reason for reason in reasons)
    assert any("complex64 is not one of float32, bfloat16" in reason for reason in reasons)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_integers_are_refused_by_all(backend: Backend) -> None:
    assert backend.unsupported_reasons(BLOCK, SHAPES, torch.int64, CPU)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_build_checks_its_tensors(backend: Backend) -> None:
    if backend.unavailable():
        pytest.skip(backend.unavailable()[0])
    block, tensors = chain_of("gelu/b;identity/b", (8, 16, 4))
    other, _ = chain_of("gelu/b;identity/b", (8, 12, 4))
    with pytest.raises(BlockError, match=r"8→16→4 .*8→12→4"):
        backend.build(other, tensors)
    mixed = [tensors[0], *(t.double() for t in tensors[1:])]
    with pytest.raises(BlockError, match=r"float32 on cpu, torch\.float64 on cpu"):
        backend.build(block, mixed)
    with pytest.raises(TorchweldError, match="unknown mode of backend"):
        backend.build(block, tensors, "quick")


@pytest.mark.parametrize(
    ("spec", "kind", "shapes", "message"),
    [
        (
            "gelu;identity",
            "chain",
            [(16, 8), (4, 12)],
            "layer 1 takes 12 features, but layer 0 .*16",
        ),
        ("gelu;identity", "group", [(16, 8), (4, 12)], "layer 1 takes 12 features, but x has 8"),
        ("gelu", "chain", [(16, 8, 1)], r"shape \[16, 8, 1\]; expected two dimensions"),
        ("gelu", "chain", [(0, 8)], "at least 1"),
        ("gelu/b", "chain", [(16, 8), (8,)], r"bias has shape \[8\]; expected \[16\]"),
        ("gelu/first", "chain", [(15, 8)], "15 outputs; gate and up need an even number"),
        ("gelu/separate", "chain", [(16, 8), (8, 8)], "gate and up weights have shapes"),
        ("gelu", "chain", [(16, 8), (8, 8)], "asks for 1 tensors, 2 were given"),
    ],
)
def test_tensors_that_make_no_block(
    spec: str, kind: str, shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(BlockError, match=message):
        Form.of(kind, parse_spec(spec), [torch.empty(shape) for shape in shapes])  # type: ignore[arg-type]


def test_sizes_are_in_and_out_whatever_the_layout() -> None:
    tensors = [torch.empty(8, 32), torch.empty(32), torch.empty(16, 4)]
    block = Form.of("chain", parse_spec("silu/b/t/first;identity/t"), tensors)
    assert (block.K, block.sizes) == (8, ((8, 16), (16, 4)))
    assert str(block) == "chain 8→16→4 (silu/b/t/first;identity/t)"
