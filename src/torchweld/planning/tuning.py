"""Tries every way to run the blocks of a model: verified, then timed against the original.

Blocks that compute the same on weights of the same shape are tried together, one after the other
with the weights of each, as the model calls them: so the weights of one have left the cache when
its turn comes again, if they do so in the model. All ways are timed in the same rounds.
In: a model, its blocks. Out: `Planned`s.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchweld.blocks import LayerForm, parse_spec, split_tensors
from torchweld.decisions import Choice
from torchweld.discovery.found import Block, Call
from torchweld.kernels import BACKENDS
from torchweld.kernels.base import Block as Form
from torchweld.planning.memory import Memory
from torchweld.planning.plan import Planned, Trial, Tuning
from torchweld.planning.timing import LEAST_BUDGET_S, Timed, input_like, time_choices
from torchweld.verification import Judgement, check_block

INFERENCE_CHOICES = (
    Choice(backend="cpu", packed=True),
    Choice(backend="cpu"),
    Choice(backend="torch"),
)
TRAINING_CHOICES = (Choice(backend="cpu"),)
COMPILED = Choice(backend="compile")
# A block is verified on this many rows and columns at most: they are alike, and float64 is slow
# and large.
MOST_VERIFIED_ROWS = 32
MOST_VERIFIED_COLUMNS = 4096
# A copy of the weights has to be worth its memory: so much faster than the best way without, unless
# it is so small that nobody would notice.
COPY_GAIN = 1.05
SMALL_COPY_BYTES = 256 << 10

# What need not be tried again.
SETTLED = ("faster", "slower", "same", "behind", "cannot serve")

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Key:
    """What blocks have in common that are tried together."""

    form: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    rows: int
    contiguous: bool
    training: bool


@dataclass(kw_only=True)
class Group:
    """Blocks of one key, with a call of each."""

    key: Key
    blocks: list[Block]
    calls: list[Call]

    @property
    def name(self) -> str:
        return f"{self.blocks[0].path or 'the model'} × {len(self.blocks)}, {self.key.rows} rows"


def choices_for(training: bool, with_compile: bool, packing: bool) -> tuple[Choice, ...]:
    """What is tried, apart from leaving the block as it is."""
    ways = TRAINING_CHOICES if training else INFERENCE_CHOICES
    choices = tuple(choice for choice in ways if packing or not choice.packed)
    return (*choices, COMPILED) if with_compile else choices


def tune(
    model: nn.Module,
    blocks: Sequence[Block],
    *,
    training: bool,
    force: bool,
    choices: Sequence[Choice],
    deadline_s: float,
    memory: Memory,
    progress: Progress,
) -> list[Planned]:
    """Every block with what was tried and chosen for it; the model is left unwelded.

    Each group has its share of the time until `deadline_s`, by `time.perf_counter`; what one does
    not use is left to the others. What was measured before is taken from `memory`.
    """
    groups = group(model, blocks, training)
    found: dict[int, Tuning] = {}
    # What could not be measured in its share of the time has another turn in what is left.
    for turn in range(1 if force else 2):
        pending = [i for i in range(len(groups)) if turn == 0 or found[i].unmeasured]
        for done, i in enumerate(pending):
            progress(groups[i].name, (done + turn * len(groups)) / (2 * len(groups)))
            share_s = (deadline_s - time.perf_counter()) / (len(pending) - done)
            if turn == 0 or share_s > LEAST_BUDGET_S:
                found[i] = _tune_group(model, groups[i], choices, force, share_s, memory)
    tunings: dict[str, list[Tuning]] = {block.path: [] for block in blocks}
    for i, one in enumerate(groups):
        for block, call in zip(one.blocks, one.calls, strict=True):
            tunings[block.path].append(replace(found[i], count=call.count))
    return [Planned(block=block, tunings=tuple(tunings[block.path])) for block in blocks]


def group(model: nn.Module, blocks: Sequence[Block], training: bool) -> list[Group]:
    """Blocks by key, in the order of the model."""
    found: dict[Key, Group] = {}
    for block in blocks:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_of(model, block))
        by_rows: dict[tuple[int, bool], list[Call]] = {}
        for call in block.calls:
            if call.rows > 0:
                by_rows.setdefault((call.rows, call.contiguous), []).append(call)
        for (rows, contiguous), calls in by_rows.items():
            key = Key(block.form, shapes, block.dtype, rows, contiguous, training)
            one = found.setdefault(key, Group(key=key, blocks=[], calls=[]))
            one.blocks.append(block)
            one.calls.append(replace(calls[0], count=sum(call.count for call in calls)))
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
    force: bool,
    budget_s: float,
    memory: Memory,
) -> Tuning:
    if force:
        return _forced(model, one, choices)
    about = (one.key, len(one.blocks), tuple(choices))
    kept = memory.recall(about, Tuning)
    if kept is not None:
        return _verified_again(model, one, kept)
    begun_s = time.perf_counter()
    trials = {choice: verify_choice(model, one, choice) for choice in choices}
    left_s = budget_s - (time.perf_counter() - begun_s)
    good = [choice for choice, trial in trials.items() if trial.verified]
    if any(tensor.is_meta for tensor in tensors_of(model, one.blocks[0])):
        good = []
    modules = [module_of(model, block) for block in one.blocks]
    timed = time_choices(model, modules, one.blocks, one.calls, good, one.key.training, left_s)
    for choice, found in timed.items():
        trials[choice] = replace(
            _measured(trials[choice], found), copy_gain=_copy_gain(found, timed.values())
        )
    tuning = choose(one.key.rows, list(trials.values()))
    if tuning.chosen is not None or all(t.verdict in SETTLED for t in tuning.trials):
        memory.keep(about, tuning)
    return tuning


def _forced(model: nn.Module, one: Group, choices: Sequence[Choice]) -> Tuning:
    """The first that verifies; times nothing."""
    trials = []
    for choice in choices:
        trials.append(verify_choice(model, one, choice))
        if trials[-1].verified:
            break
    chosen = trials[-1].choice if trials and trials[-1].verified else None
    return Tuning(
        rows=one.key.rows,
        count=1,
        trials=tuple(trials),
        chosen=chosen,
        reason=_why_none(trials) if chosen is None else "forced",
    )


def _verified_again(model: nn.Module, one: Group, kept: Tuning) -> Tuning:
    """Times that were measured before; what is chosen by them is verified on the weights of now."""
    trials = {trial.choice: trial for trial in kept.trials}
    while kept.chosen is not None:
        fresh = verify_choice(model, one, kept.chosen)
        if fresh.verified:
            trials[kept.chosen] = replace(trials[kept.chosen], error_ratio=fresh.error_ratio)
            break
        trials[kept.chosen] = fresh
        kept = choose(one.key.rows, list(trials.values()))
    return replace(kept, trials=tuple(trials.values()), remembered=True)


def choose(rows: int, trials: Sequence[Trial]) -> Tuning:
    """The fastest that is verified and beyond noise; a copy only where it is worth its memory."""
    good = [trial for trial in trials if trial.verified and trial.verdict == "faster"]
    best = max(good, key=lambda trial: trial.speedup, default=None)
    reason = _why_none(trials)
    if best is not None:
        reason = f"{best.speedup:.2f} times the original's speed"
        lean = [trial for trial in good if not trial.copied_bytes]
        leanest = max(lean, key=lambda trial: trial.speedup, default=best)
        gain = best.copy_gain or best.speedup / leanest.speedup
        small = best.copied_bytes <= SMALL_COPY_BYTES
        if leanest is not best and not small and gain < COPY_GAIN:
            best = leanest
            reason = f"{best.speedup:.2f} times the original's speed; a copy gains too little"
    return Tuning(
        rows=rows,
        count=1,
        trials=tuple(trials),
        chosen=None if best is None else best.choice,
        reason=reason,
    )


def _why_none(trials: Sequence[Trial]) -> str:
    return "; ".join(
        f"{trial.choice.backend} {trial.choice.mode}: {trial.verdict}"
        + (f" ({trial.reason})" if trial.reason else "")
        for trial in trials
    )


def _copy_gain(own: Timed, everything: Iterable[Timed]) -> float:
    """Speed over the best way without a copy, round by round: both had the same noise."""
    lean = [t.comparison for t in everything if t.comparison and not t.copied_bytes]
    best = max(lean, key=lambda found: found.speedup, default=None)
    if best is None or own.comparison is None or not own.copied_bytes:
        return 0.0
    rounds = [own.comparison.log_ratios, best.log_ratios]
    if len(rounds[0]) != len(rounds[1]) or not rounds[0]:  # of other rounds: no pairs
        return 0.0
    return math.exp(statistics.median(a - b for a, b in zip(*rounds, strict=True)))


def _measured(trial: Trial, timed: Timed) -> Trial:
    found = timed.comparison
    if found is None:
        return replace(trial, verdict=timed.verdict, reason=timed.reason)
    measured = found.rounds > 0
    return replace(
        trial,
        verdict=found.verdict,
        reason="" if found.verdict in ("faster", "slower", "same") else found.reason,
        speedup=found.speedup if measured else 0.0,
        interval=found.interval if measured else (0.0, 0.0),
        original_us=found.baseline_us if measured else 0.0,
        copied_bytes=timed.copied_bytes,
    )


# ---- the numbers ----


def verify_choice(model: nn.Module, one: Group, choice: Choice) -> Trial:
    """Whether the choice gives right numbers, by the numerical rule; nothing is timed."""
    block, call, training = one.blocks[0], one.calls[0], one.key.training
    tensors = [tensor.detach() for tensor in tensors_of(model, block)]
    forms = parse_spec(block.form)
    form = Form.of("chain", forms, tensors)
    backend = next(backend for backend in BACKENDS if backend.name == choice.backend)
    dtype = getattr(torch, call.dtype)
    device = torch.device("cpu") if tensors[0].is_meta else tensors[0].device
    reasons = [
        *backend.unavailable(),
        *backend.unsupported_reasons(form, [call.shape], dtype, device, choice.mode),
    ]
    if reasons:
        reason = "; ".join(dict.fromkeys(reasons))
        return Trial(choice=choice, verified=False, verdict="cannot serve", reason=reason)
    if tensors[0].is_meta:
        reason = "the weights are on meta: no numbers, no times"
        return Trial(choice=choice, verified=False, verdict="not measured", reason=reason)
    x = input_like(call, rows=max(1, min(call.rows, MOST_VERIFIED_ROWS))).to(device)
    columns = None if training else _some_columns(forms[-1], block.out_features)
    grads = None
    if training:
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(*x.shape[:-1], block.out_features, generator=generator).to(x)]

    def judged(tensors: Sequence[Tensor]) -> dict[str, Judgement]:
        def candidate(x: Tensor, given: Sequence[Tensor]) -> Tensor:
            if training and choice.backend == "cpu":
                y = torch.ops.torchweld.chain(x, list(given), block.form)
            else:
                y = backend.build(form, given if training else tensors, choice.mode)(x)
            assert isinstance(y, Tensor)
            return y if columns is None else y[..., columns]

        few = tensors if columns is None else _narrowed(forms, tensors, columns)
        return check_block(candidate, x, few, forms, grads=grads)

    found = judged(tensors)
    if not all(judgement.meaningful for judgement in found.values()):
        # Weights that are zero, as an adapter's are at first: random ones say more.
        found = {k: v for k, v in found.items() if not v.within} or judged(_random_like(tensors))
    wrong = [f"{what}: {j.reason}" for what, j in found.items() if not j.within]
    ratio = max(max(j.row_ratio, j.rms_ratio) for j in found.values())
    return Trial(
        choice=choice,
        verified=not wrong,
        verdict="wrong" if wrong else "not measured",
        reason="; ".join(wrong),
        error_ratio=min(ratio, 1e30),
    )


def _random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(t.shape, generator=generator) / max(t.shape[-1], 1) ** 0.5).to(t)
        for t in tensors
    ]


def _some_columns(form: LayerForm, count: int) -> slice | None:
    """Of a wide last layer, a part: in float64 a language model's head is as large as the model."""
    if form.gate != "none" or count <= MOST_VERIFIED_COLUMNS:
        return None
    step = -(-count // MOST_VERIFIED_COLUMNS)
    return slice(count - 1 - (count - 1) // step * step, None, step)  # the last one is among them


def _narrowed(
    forms: Sequence[LayerForm], tensors: Sequence[Tensor], columns: slice
) -> list[Tensor]:
    """The tensors with these columns of the last layer alone."""
    *earlier, (form, (weight, *bias)) = split_tensors(forms, tensors)
    narrow = weight[:, columns] if form.transposed else weight[columns]
    return [t for _, own in earlier for t in own] + [narrow, *(b[columns] for b in bias)]
