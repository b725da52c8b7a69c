"""What tests of the op share: choosing kernels, seeing which one ran, blocks of random tensors."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchweld import ops
from torchweld.core.activations import ACTIVATIONS
from torchweld.core.blocks import GATES, LayerForm, format_spec
from torchweld.machine.cpu_identity import identify
from torchweld.numerics.numerical_rule import Judgement

ISAS = (
    [name for name, (built, supported) in ops.compiled.isas().items() if built and supported]
    if ops.compiled is not None
    else []
)
# One of each activation with eager's parameters, and those that have any with others.
ACTIVATION_TEXTS = [*ACTIVATIONS, "leaky_relu:0.3", "elu:0.7", "softplus:2.0,5.0"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

NOT_PACKED = {"natural", "repacked"}
MULTIPLIES_BF16 = "avx512_bf16" in identify()[0].flags


def left_to_torch(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether a call is big enough for torch's own bf16 products to win, on CPUs that have them."""
    rows = x.numel() // max(x.shape[-1], 1)
    weights = sum(t.numel() for t in tensors if t.dim() == 2)
    return (
        x.dtype == torch.bfloat16
        and ops.compiled.isa() == "avx512"
        and MULTIPLIES_BF16
        and rows >= 8
        and 2 * weights * rows >= 25e6
    )


def not_packed(x: Tensor, tensors: Sequence[Tensor]) -> set[str]:
    """How weights that are not packed are read."""
    return {"composed"} if left_to_torch(x, tensors) else NOT_PACKED


def last_run() -> dict[str, Any]:
    run: dict[str, Any] = ops.compiled.last_run()
    return run


@contextmanager
def kernel_runs(*weights: str, calls: int = 1) -> Iterator[None]:
    """What happens inside runs our kernel exactly `calls` times in this thread, the last time on
    weights of one of the kinds given (of any, if none is given)."""
    before = last_run()["calls"]
    yield
    run = last_run()
    assert run["calls"] - before == calls, f"{run['calls'] - before} kernel calls, not {calls}"
    assert not weights or run["weights"] in weights, f"{run} is not of {weights}"
    assert calls == 0 or run["isa"] == ("" if run["weights"] == "composed" else ops.compiled.isa())


@contextmanager
def using_isa(name: str) -> Iterator[None]:
    before = ops.compiled.isa()
    ops.compiled.choose_isa(name)
    try:
        yield
    finally:
        ops.compiled.choose_isa(before)


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chain(x: Tensor, tensors: Sequence[Tensor], spec: str) -> Tensor:
    y: Tensor = torch.ops.torchweld.chain(x, list(tensors), spec)
    return y


def packed_chain(x: Tensor, tensors: Sequence[Tensor], spec: str) -> Tensor:
    packed = torch.ops.torchweld.pack(list(tensors), spec)
    y: Tensor = torch.ops.torchweld.chain_packed(x, packed, spec)
    return y


def group(x: Tensor, tensors: Sequence[Tensor], spec: str) -> list[Tensor]:
    ys: list[Tensor] = torch.ops.torchweld.group(x, list(tensors), spec)
    return ys


def packed_group(x: Tensor, tensors: Sequence[Tensor], spec: str) -> list[Tensor]:
    packed = torch.ops.torchweld.pack(list(tensors), spec)
    ys: list[Tensor] = torch.ops.torchweld.group_packed(x, packed, spec)
    return ys


def shapes_of(form: LayerForm, K: int, N: int) -> list[tuple[int, ...]]:
    """Shapes of a layer's tensors, in the op's order; N counts what comes out."""
    outputs = N if form.gate in ("none", "separate") else 2 * N
    weight = (K, outputs) if form.transposed else (outputs, K)
    own: list[tuple[int, ...]] = [weight, (outputs,)] if form.bias else [weight]
    return own * form.weights


def fixed(*shape: int, seed: int = 0) -> Tensor:
    """A random tensor for the top of a module: the same at every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_tensors(
    sizes: Sequence[int], forms: Sequence[LayerForm], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Contiguous tensors of a chain, of the size at which values neither grow nor vanish."""
    return [
        (torch.randn(shape) / (K**0.5 if len(shape) == 2 else 2)).to(dtype)
        for form, K, N in zip(forms, sizes, sizes[1:], strict=False)
        for shape in shapes_of(form, K, N)
    ]


def tensors_for(forms: Sequence[LayerForm], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A small chain's, 5 features to 3, that want gradients."""
    sizes = (5, *([4, 6, 3][: len(forms) - 1]), 3)
    return [t.requires_grad_() for t in random_tensors(sizes, forms, dtype)]


def group_tensors(forms: Sequence[LayerForm], K: int, dtype: torch.dtype) -> list[Tensor]:
    """A group's, of 3, 4, … outputs, that want gradients."""
    return [
        t.requires_grad_()
        for i, form in enumerate(forms)
        for t in random_tensors((K, 3 + i), [form], dtype)
    ]


# One chain of each gate form and layout, biases here and there: what a grid of tests goes through.
CHAINS: list[tuple[LayerForm, ...]] = [
    *(
        (
            LayerForm(activation="silu", gate=gate, bias=bias, transposed=transposed),
            LayerForm(bias=True),
        )
        for gate, bias, transposed in zip(
            GATES, (True, False, True, False, True), (False, False, True, False, True), strict=True
        )
    ),
    (LayerForm(bias=True),),
    (LayerForm(activation="gelu", bias=True), LayerForm(activation="tanh"), LayerForm(bias=True)),
]
CHAIN_IDS = [format_spec(forms) for forms in CHAINS]


def all_within(judgements: dict[str, Judgement]) -> None:
    wrong = {name: found.reason for name, found in judgements.items() if not found.within}
    assert not wrong, wrong


def all_ok(judgements: dict[str, Judgement]) -> None:
    wrong = {name: found.reason for name, found in judgements.items() if not found.ok}
    assert not wrong, wrong


def run_python(
    code: str, *args: str, env: dict[str, str] | None = None, seconds: float = 120
) -> str:
    """`code` in a fresh interpreter; a hang or a non-zero exit fails. Returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=env,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def at_once(bodies: Sequence[Callable[[], None]], seconds: float = 60) -> None:
    """Each in a thread of its own, started together; the first failure is raised here."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(bodies))

    def run(body: Callable[[], None]) -> None:
        try:
            start.wait()
            body()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]
