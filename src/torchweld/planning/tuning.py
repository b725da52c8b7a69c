"""Tries every way to run the blocks of a model: verified, then timed against the original.

Blocks that compute the same on weights of the same shape are tried together, one after the other
with the weights of each, as the model calls them: so the weights of one have left the cache when
its turn comes again, if they do so in the model. In: a model, its blocks. Out: `Planned`s.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchweld.blocks import parse_spec
from torchweld.decisions import Choice, Decision
from torchweld.discovery.found import Block, Call
from torchweld.errors import TorchweldError
from torchweld.hardware import hardware
from torchweld.kernels import BACKENDS
from torchweld.kernels.base import Block as Form
from torchweld.measuring import Comparison, compare
from torchweld.planning.plan import Planned, Trial, Tuning
from torchweld.swap import undo, weld
from torchweld.verification import check_block

INFERENCE_CHOICES = (
    Choice(backend="cpu", packed=True),
    Choice(backend="cpu"),
    Choice(backend="torch"),
)
TRAINING_CHOICES = (Choice(backend="cpu"),)
# More instances than this say nothing new, and would only take time.
MOST_INSTANCES = 16
# A block is verified on this many rows at most: rows are alike, and float64 is slow.
MOST_VERIFIED_ROWS = 32
LEAST_BUDGET_S, MOST_BUDGET_S = 0.25, 3.0

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Key:
    """What blocks have in common that are tried together."""

    form: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    rows: int
    contiguous: bool


@dataclass(kw_only=True)
class Group:
    """Blocks of one key, with a call of each."""

    key: Key
    blocks: list[Block]
    calls: list[Call]

    @property
    def name(self) -> str:
        return f"{self.blocks[0].path or 'the model'} × {len(self.blocks)}, {self.key.rows} rows"


def tune(
    model: nn.Module,
    blocks: Sequence[Block],
    *,
    training: bool,
    force: bool,
    budget_s: float,
    progress: Progress,
) -> list[Planned]:
    """Every block with what was tried and chosen for it; the model is left unwelded."""
    groups = group(model, blocks)
    choices = TRAINING_CHOICES if training else INFERENCE_CHOICES
    deadline_s = time.perf_counter() + budget_s
    tunings: dict[str, list[Tuning]] = {block.path: [] for block in blocks}
    for done, one in enumerate(groups):
        progress(one.name, done / len(groups))
        left_s = deadline_s - time.perf_counter()
        each_s = left_s / ((len(groups) - done) * len(choices))
        tuning = _tune_group(model, one, choices, training, force, each_s)
        for block, call in zip(one.blocks, one.calls, strict=True):
            tunings[block.path].append(
                Tuning(
                    rows=tuning.rows,
                    count=call.count,
                    trials=tuning.trials,
                    chosen=tuning.chosen,
                    reason=tuning.reason,
                )
            )
    return [Planned(block=block, tunings=tuple(tunings[block.path])) for block in blocks]


def group(model: nn.Module, blocks: Sequence[Block]) -> list[Group]:
    """Blocks by key, in the order of the model."""
    found: dict[Key, Group] = {}
    for block in blocks:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_of(model, block))
        by_rows: dict[tuple[int, bool], list[Call]] = {}
        for call in block.calls:
            if call.rows > 0:
                by_rows.setdefault((call.rows, call.contiguous), []).append(call)
        for (rows, contiguous), calls in by_rows.items():
            key = Key(block.form, shapes, block.dtype, rows, contiguous)
            one = found.setdefault(key, Group(key=key, blocks=[], calls=[]))
            if block not in one.blocks:
                one.blocks.append(block)
                one.calls.append(calls[0])
    return list(found.values())


def module_of(model: nn.Module, block: Block) -> nn.Module:
    return model.get_submodule(block.path)


def tensors_of(model: nn.Module, block: Block) -> list[Tensor]:
    """The block's tensors, in the op's order."""
    module = module_of(model, block)
    found = []
    for name in block.tensors:
        path, _, attribute = name.rpartition(".")
        found.append(getattr(module.get_submodule(path), attribute))
    return found


# ---- one group ----


def _tune_group(
    model: nn.Module,
    one: Group,
    choices: Sequence[Choice],
    training: bool,
    force: bool,
    each_s: float,
) -> Tuning:
    trials = []
    for choice in choices:
        trial = verify_choice(model, one, choice, training)
        if trial.verified and not force:
            if each_s < LEAST_BUDGET_S / 4:
                trial = replace(trial, reason="the time allowed was over")
            else:
                timed = _timed(model, one, choice, training, each_s)
                trial = replace(timed, error_ratio=trial.error_ratio)
        trials.append(trial)
        if force and trial.verified:
            break
    return _choose(one.key.rows, trials, force)


def _choose(rows: int, trials: Sequence[Trial], force: bool) -> Tuning:
    if force:
        good = [trial for trial in trials if trial.verified]
    else:
        good = [trial for trial in trials if trial.verified and trial.verdict == "faster"]
    best = max(good, key=lambda trial: trial.speedup, default=None)
    if best is not None:
        reason = "forced" if force else f"{best.speedup:.2f} times the original's speed"
    else:
        reason = "; ".join(
            f"{trial.choice.backend} {trial.choice.mode}: {trial.verdict}"
            + (f" ({trial.reason})" if trial.reason else "")
            for trial in trials
        )
    return Tuning(
        rows=rows,
        count=1,
        trials=tuple(trials),
        chosen=None if best is None else best.choice,
        reason=reason,
    )


def verify_choice(model: nn.Module, one: Group, choice: Choice, training: bool) -> Trial:
    """Whether the choice gives right numbers, by the numerical rule; nothing is timed."""
    block, call = one.blocks[0], one.calls[0]
    tensors = [tensor.detach() for tensor in tensors_of(model, block)]
    forms = parse_spec(block.form)
    form = Form.of("chain", forms, tensors)
    backend = next(backend for backend in BACKENDS if backend.name == choice.backend)
    x = _input_like(call, rows=min(call.rows, MOST_VERIFIED_ROWS))
    reasons = [
        *backend.unavailable(),
        *backend.unsupported_reasons(form, [call.shape], x.dtype, x.device, choice.mode),
    ]
    if reasons:
        return Trial(
            choice=choice, verified=False, verdict="cannot serve", reason="; ".join(reasons)
        )

    def candidate(x: Tensor, given: Sequence[Tensor]) -> Tensor:
        if training:
            y = torch.ops.torchweld.chain(x, list(given), block.form)
        else:
            y = backend.build(form, given, choice.mode)(x)
        assert isinstance(y, Tensor)
        return y

    grads = None
    if training:
        grads = [torch.randn(*x.shape[:-1], block.out_features, dtype=x.dtype)]
    judged = check_block(candidate, x, tensors, forms, grads=grads)
    ratio = _finite(max(max(j.row_ratio, j.rms_ratio) for j in judged.values()))
    wrong = [f"{what}: {j.reason}" for what, j in judged.items() if not j.ok]
    return Trial(
        choice=choice,
        verified=not wrong,
        verdict="wrong" if wrong else "not measured",
        reason="; ".join(wrong),
        error_ratio=ratio,
    )


def _finite(value: float) -> float:
    return value if value < 1e30 else 1e30


def _input_like(call: Call, rows: int | None = None) -> Tensor:
    """Random numbers in the shape, type and layout of a recorded x."""
    shape = call.shape if rows is None else (rows, call.shape[-1])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(getattr(torch, call.dtype))
    if call.contiguous or x.dim() < 2:
        return x
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


class Instances:
    """Modules as one side of a comparison: `show` makes them what is to be timed, before the clock.

    A block is called as the model calls it, with its hooks and `__call__`, on its own weights.
    """

    def __init__(self, calls: Sequence[Callable[[], object]], show: Callable[[], None]) -> None:
        self._calls, self._show = calls, show

    def time(self, calls: int) -> float:
        self._show()
        sequence = itertools.islice(itertools.cycle(self._calls), calls * len(self._calls))
        begun = time.perf_counter()
        for call in sequence:
            call()
        return time.perf_counter() - begun


class Switch:
    """Turns the welded classes of some modules off and on, without touching anything else."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._classes: list[tuple[type, type]] = []

    def note_original(self) -> None:
        self._original = [type(module) for module in self._modules]

    def note_welded(self) -> None:
        welded = [type(module) for module in self._modules]
        self._classes = list(zip(self._original, welded, strict=True))

    def off(self) -> None:
        for module, (original, _) in zip(self._modules, self._classes, strict=True):
            object.__setattr__(module, "__class__", original)

    def on(self) -> None:
        for module, (_, welded) in zip(self._modules, self._classes, strict=True):
            object.__setattr__(module, "__class__", welded)


def _timed(model: nn.Module, one: Group, choice: Choice, training: bool, each_s: float) -> Trial:
    blocks, calls = one.blocks[:MOST_INSTANCES], one.calls[:MOST_INSTANCES]
    modules = [module_of(model, block) for block in blocks]
    switch = Switch(modules)
    switch.note_original()
    rows = one.key.rows
    decisions = [
        Decision(block=block, by_rows=((rows, rows, choice),), training=training)
        for block in blocks
    ]
    try:
        weld(model, decisions)
    except TorchweldError as error:
        return Trial(
            choice=choice, verified=False, verdict="cannot serve", reason=str(error).strip()
        )
    try:
        switch.note_welded()
        runs = [
            _caller(module, block, _input_like(call), training)
            for module, block, call in zip(modules, blocks, calls, strict=True)
        ]
        found = compare(
            Instances(runs, switch.off),
            Instances(runs, switch.on),
            names=("original", f"{choice.backend} {choice.mode}"),
            budget_s=min(max(each_s, LEAST_BUDGET_S), MOST_BUDGET_S),
            cold=_cold(model, modules),
        )
        switch.on()
        copied = sum(joint_bytes(module) for module in modules) // len(modules)
    finally:
        switch.on()
        undo(model, [block.path for block in blocks])
    return _trial(choice, found, len(runs), copied)


def joint_bytes(module: nn.Module) -> int:
    """Bytes of the packed copy that a welded module keeps."""
    from torchweld.swap import stats

    return sum(one.copied_bytes for one in stats(module).values())


def _cold(model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Whether the caches have to be emptied to be as they are in the model.

    Not if the weights that are timed in turn push each other out, or if all of the model stays in.
    """
    cache = hardware().caches.l3_bytes or hardware().caches.l2_bytes or 0
    timed = sum(p.nbytes for module in modules for p in module.parameters())
    everything = sum(p.nbytes for p in model.parameters())
    return timed < 2 * cache < everything


def _caller(module: nn.Module, block: Block, x: Tensor, training: bool) -> Callable[[], object]:
    first = next(iter(inspect.signature(module.forward).parameters), None)
    args, kwargs = ((x,), {}) if first in (block.argument, "args") else ((), {block.argument: x})

    def infer() -> object:
        with torch.no_grad():
            return module(*args, **kwargs)

    def train() -> object:
        y = module(*args, **kwargs)
        y.backward(torch.ones_like(y))
        return y

    if training:
        x.requires_grad_()
    return train if training else infer


def _trial(choice: Choice, found: Comparison, instances: int, copied: int) -> Trial:
    measured = found.rounds > 0
    return Trial(
        choice=choice,
        verified=True,
        verdict=found.verdict,
        reason="" if found.verdict in ("faster", "slower", "same") else found.reason,
        speedup=found.speedup if measured else 0.0,
        interval=found.interval if measured else (0.0, 0.0),
        original_us=found.baseline_us / instances if measured else 0.0,
        copied_bytes=copied,
    )
