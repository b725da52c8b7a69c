"""How much of the Linears of real models is welded, and whether the numbers stay the same.

    python benchmarks/model_coverage.py                   every transformers type, over an hour
    python benchmarks/model_coverage.py gpt2 llama bert   these
    python benchmarks/model_coverage.py --json coverage.json

A tiny instance of each model type, built from its configuration with random weights, is looked
through, planned by force and welded, for inference and for training. What a model computes is
counted without torchweld: a dispatch mode sees every aten op, and the FLOPs of `mm` and `addmm`
with a parameter of the model are its Linear FLOPs. Welded means that the op ran: the same count
again, welded, is what is left. Products with a 3-D weight (experts) are listed apart.

Each type has a process of its own, with a limit of time and memory. Exits 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
import zoo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchweld as tw
from torchweld.numerics.model_results import floating
from torchweld.welds.swapping import swap

SECONDS = 150
MEMORY_BYTES = 9 << 30
PRODUCTS = ("aten.mm", "aten.addmm")
STACKS = ("aten.bmm", "aten.baddbmm", "aten._grouped_mm")


# ---- what runs, counted without torchweld ----


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """FLOPs of products with a weight, and what modules consist of, seen op by op."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {t.untyped_storage().data_ptr() for t in model.parameters()}
        self.linear_flops = 0.0
        self.stack_flops = 0.0
        self.fused = 0
        self.products: list[int] = []  # outputs, by storage, of products with a weight, in order
        self.inputs: list[int] = []  # what each of them read
        self.kinds: list[str] = []  # every op, in order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        self.kinds.append(name)
        if name.startswith("torchweld."):
            self.fused += 1
        tensors = [a for a in args if isinstance(a, Tensor)]
        if name in PRODUCTS + STACKS and isinstance(y, Tensor) and len(tensors) >= 2:
            a, b = tensors[-2:]
            if any(t.untyped_storage().data_ptr() in self._weights for t in (a, b)):
                flops = 2.0 * a.numel() * b.shape[-1]
                if name in PRODUCTS:
                    self.linear_flops += flops
                    self.products.append(y.untyped_storage().data_ptr())
                    self.inputs.append(a.untyped_storage().data_ptr())
                else:
                    self.stack_flops += flops
        return y


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Besides products, an MLP has element-wise ops and ops that move no data.
ELEMENTWISE = _names(
    "add sub mul div pow tanh sigmoid relu gelu silu neg exp erf clamp clamp_min leaky_relu elu "
    "mish hardswish softplus square rsub abs threshold hardtanh maximum minimum where gt lt ge le "
    "add_ mul_ relu_ silu_ dropout native_dropout"
)
METADATA = _names(
    "view t transpose reshape _unsafe_view expand slice select split split_with_sizes chunk "
    "unsqueeze squeeze detach alias permute clone contiguous empty_like zeros_like _to_copy "
    "unbind lift_fresh is_pinned scalar_tensor full ones_like"
)


def mlp_modules(model: nn.Module, run: Any) -> list[str]:
    """Paths of the smallest modules that are an MLP of Linears.

    Two products or more, one after the other, nothing but element-wise ops around them, and one
    tensor as the result.
    """
    spans: list[tuple[str, int, int, int, int, bool]] = []
    count = Count(model)
    open_: list[tuple[int, int]] = []
    handles = []
    for path, module in model.named_modules():
        if path and sum(p.dim() == 2 for p in module.parameters()) >= 2:

            def enter(_m: nn.Module, _args: Any, _kw: Any) -> None:
                open_.append((len(count.kinds), len(count.products)))

            def leave(_m: nn.Module, _args: Any, result: Any, path: str = path) -> None:
                kinds, products = open_.pop()
                one = isinstance(result, Tensor)
                spans.append((path, kinds, len(count.kinds), products, len(count.products), one))

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with torch.no_grad(), count:
            run()
    finally:
        for handle in handles:
            handle.remove()
    found: dict[str, tuple[int, int]] = {}
    for path, k0, k1, p0, p1, one in spans:
        names = {name.removeprefix("aten.") for name in count.kinds[k0:k1]}
        plain = names <= ELEMENTWISE | METADATA | {"mm", "addmm"}
        chained = p1 - p0 >= 2 and count.inputs[p1 - 1] != count.inputs[p0]
        if one and plain and chained:
            found[path] = (p0, p1)
    return [path for path in found if not any(other.startswith(f"{path}.") for other in found)]


# ---- one type ----


@dataclass(kw_only=True)
class Coverage:
    """What became of one model type."""

    model_type: str
    problem: str = ""  # why it could not be built, or what went wrong
    blocks: int = 0
    chains: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    linear_flops: float = 0.0
    welded_flops: float = 0.0
    stack_flops: float = 0.0
    fused_calls: int = 0
    mlps: int = 0  # modules that are an MLP of Linears, counted without torchweld
    welded_mlps: int = 0
    missed_mlps: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    trained: str = ""  # "", or why gradients were not compared
    seconds: float = 0.0


def cover(model_type: str) -> Coverage:
    begun_s = time.perf_counter()
    try:
        built = zoo.build(model_type)
    except zoo.CannotBuildError as reason:
        return Coverage(model_type=model_type, problem=f"not built: {reason}")
    model, inputs = built.model, built.inputs
    found = Coverage(model_type=model_type)
    wrong: list[str] = []

    def run() -> Any:
        torch.manual_seed(0)
        with torch.no_grad():
            return model(**inputs)

    before = snapshot(model)
    eager = [t.clone() for t in floating(run())]
    mlps = mlp_modules(model, run)
    with Count(model) as plain:
        run()
    made = tw.plan(model, inputs, force=True)
    found.blocks = len(made.planned)
    found.chains = sum(one.block.layers > 1 for one in made.planned)
    found.refused = dict(Counter(refusal.reason for refusal in made.refused))
    unverified = [p.block.path for p in made.planned if not p.welded]
    tw.apply(model, made)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run()  # packs
        welded = floating(run())
        with Count(model) as left:
            run()
    wrong += [str(w.message) for w in said if "torchweld" in str(w.message)]
    found.linear_flops, found.stack_flops = plain.linear_flops, plain.stack_flops
    found.welded_flops = plain.linear_flops - left.linear_flops
    found.fused_calls = left.fused
    paths = {p for p in swap.welded_paths(model) if not swap.stats(model)[p].originals}
    done = [m for m in mlps if any(m == p or m.startswith(f"{p}.") for p in paths)]
    found.mlps, found.welded_mlps = len(mlps), len(done)
    found.missed_mlps = tuple(sorted(set(mlps) - set(done)))[:4]
    if snapshot(model, classes=False) != before[1:]:
        wrong.append("welding changed the state_dict")
    tw.undo(model)
    if snapshot(model) != before:
        wrong.append("undo does not restore the model")
    again = floating(run())
    if not all(
        torch.equal(
            a,
            b,
        )
        or _nan_equal(a, b)
        for a, b in zip(eager, again, strict=True)
    ):
        wrong.append("after undo the outputs differ")
    wrong += [f"not verified: {path}" for path in unverified]
    wrong += judged(model, made, inputs, eager, welded)
    try:
        wrong += train(model, inputs)
    except Exception as error:
        found.trained = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
    found.wrong = tuple(wrong)
    found.seconds = time.perf_counter() - begun_s
    return found


def _nan_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(1.25), b.nan_to_num(1.25))


def snapshot(model: nn.Module, classes: bool = True) -> tuple[Any, ...]:
    """Classes and attributes of every module; names and addresses of the whole state."""
    state = {k: (v.data_ptr(), tuple(v.shape)) for k, v in model.state_dict().items()}
    held = [(n, type(m), sorted(m.__dict__)) for n, m in model.named_modules()]
    names = [n for n, _ in model.named_modules()]
    return (held, names, state) if classes else (names, state)


def judged(
    model: nn.Module, made: Any, inputs: Any, eager: Sequence[Tensor], welded: Sequence[Tensor]
) -> list[str]:
    """What is wrong with the outputs, by the rule for whole models."""
    from torchweld.core.model_inputs import as_workloads
    from torchweld.numerics.model_check import compare_results, depth_of
    from torchweld.numerics.model_truth import truth_of

    truth = truth_of(model, as_workloads(inputs)[0], False)
    got = {f"output {i}": t for i, t in enumerate(welded)}
    expected = {f"output {i}": t for i, t in enumerate(eager)}
    compared = compare_results(got, expected, truth, depth_of(model))
    return [f"{one.name} {one.reason}" for one in compared if not one.ok]


def train(model: nn.Module, inputs: Any) -> list[str]:
    """Gradients welded and not, dropout off: what is wrong with them."""
    from torchweld.core.model_inputs import as_workloads
    from torchweld.core.model_state import put_back
    from torchweld.numerics.model_check import compare_results, depth_of
    from torchweld.numerics.model_results import results
    from torchweld.numerics.model_truth import truth_of

    workload = as_workloads(inputs)[0]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    made = tw.plan(model, inputs, training=True, force=True)
    with put_back(model, True):
        expected = results(model, workload, True)
        truth = truth_of(model, workload, True)
        again = results(model, workload, True)
        if any(not _nan_equal(expected[k], again[k]) for k in expected):
            raise RuntimeError("two runs of the original give different gradients")
        tw.apply(model, made)
        got = results(model, workload, True)
        ran = [p for p, s in swap.stats(model).items() if not s.originals]
        tw.undo(model)
    compared = compare_results(got, expected, truth, depth_of(model))
    wrong = [f"training: {one.name} {one.reason}" for one in compared if not one.ok]
    if made.decisions and not ran:
        wrong.append("training: nothing that was welded ran")
    return wrong


# ---- all of them ----


@contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def in_child(model_type: str) -> Coverage:
    """`cover` in a process of its own, which may run out of time or memory."""
    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        ours.close()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.alarm(SECONDS)
        try:
            with quiet():
                theirs.send(asdict(cover(model_type)))
        except BaseException as error:
            lines = traceback.format_exc().strip().splitlines()
            place = next((line.strip() for line in reversed(lines) if "File" in line), "")
            text = f"failed: {type(error).__name__}: {str(error)[:200]} ({place})"
            theirs.send(asdict(Coverage(model_type=model_type, problem=text)))
        os._exit(0)
    theirs.close()
    try:
        found = Coverage(**ours.recv())
    except EOFError:
        found = Coverage(model_type=model_type, problem="failed: out of time or memory")
    os.waitpid(child, 0)
    return found


FIGURES = (
    ("wrong outputs", "0"),
    ("whole MLPs welded, of types with one in a module", "≥ 90 %"),
    ("Linear FLOPs welded, over all types", "≥ 95 %"),
)


def summary(found: Sequence[Coverage]) -> tuple[str, bool]:
    """The figures as text, and whether all are kept."""
    ran = [one for one in found if not one.problem]
    failed = [one for one in found if one.problem.startswith("failed")]
    wrong = [one for one in ran if one.wrong]
    with_mlp = [one for one in ran if one.mlps]
    whole = [one for one in with_mlp if one.welded_mlps == one.mlps]
    shares = [one.welded_flops / one.linear_flops for one in ran if one.linear_flops]
    share = sum(shares) / len(shares) if shares else 0.0
    stacks = [one.model_type for one in ran if one.stack_flops]
    untrained = [one for one in ran if one.trained]
    values = (
        f"{len(wrong)} of {len(ran)} types",
        f"{len(whole)} of {len(with_mlp)} types",
        f"{100 * share:.1f} % (mean over {len(shares)} types)",
    )
    kept = (
        not wrong and not failed,
        len(whole) >= 0.9 * len(with_mlp),
        share >= 0.95,
    )
    lines = [f"{len(ran)} types ran, {len(found) - len(ran)} did not ({len(failed)} failed)"]
    for (what, goal), value, ok in zip(FIGURES, values, kept, strict=True):
        lines.append(f"  {what}: {value}; goal {goal}: {'kept' if ok else 'MISSED'}")
    lines.append(
        f"  weights of 3 dimensions (experts), listed apart: {', '.join(stacks) or 'none'}"
    )
    lines.append(f"  gradients not compared in {len(untrained)} types")
    lines += [f"  WRONG {one.model_type}: {'; '.join(one.wrong)[:300]}" for one in wrong]
    lines += [f"  {one.model_type}: {one.problem}" for one in failed]
    lines += [
        f"  MLPs missed in {one.model_type}: {one.mlps - one.welded_mlps} of {one.mlps}, "
        f"{', '.join(one.missed_mlps)}"
        for one in with_mlp
        if one not in whole
    ]
    for one in sorted(ran, key=lambda c: c.welded_flops / max(c.linear_flops, 1.0)):
        if one.linear_flops and one.welded_flops < 0.95 * one.linear_flops:
            why = "; ".join(f"{n} × {r}" for r, n in list(one.refused.items())[:3])
            lines.append(
                f"  {100 * one.welded_flops / one.linear_flops:.0f} % of {one.model_type}: {why}"
            )
    return "\n".join(lines), all(kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", help="model types; all if left out")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--show", type=Path, help="print what --json wrote, measure nothing")
    args = parser.parse_args()
    if args.show:
        found = [Coverage(**row) for row in json.loads(args.show.read_text())]
    else:
        os.environ["HF_HUB_OFFLINE"] = "1"
        with quiet():
            types = args.types or zoo.model_types()
        found = []
        for number, model_type in enumerate(types, 1):
            one = in_child(model_type)
            found.append(one)
            state = one.problem or (
                f"{one.blocks} blocks, {one.welded_mlps}/{one.mlps} MLPs, "
                f"{100 * one.welded_flops / max(one.linear_flops, 1.0):.0f} % of FLOPs"
                + (f", WRONG: {'; '.join(one.wrong)}" if one.wrong else "")
                + (f", not trained: {one.trained}" if one.trained else "")
            )
            print(f"[{number}/{len(types)}] {model_type}: {state[:400]}", flush=True)
            if args.json:
                args.json.write_text(json.dumps([asdict(c) for c in found]))
    text, kept = summary(found)
    print(text)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
