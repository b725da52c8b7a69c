"""Writes random forwards as source text, with steps that a user might take: one module per seed.

`generate(seed)` writes a module that computes a chain, with additions that forwards often have:
branches on attributes, arguments, shapes and modes, helpers, configs, tables, changes in place
through aliases, residuals. It also gives *steps*: calls on recorded and on other inputs, and
changes of things that the source reads. `judge(seed)` runs the steps twice, on a welded module and
on its unwelded twin, each in its own namespace.

    python -m tests.behaviours.random_forwards 17 2000-2100

replays seeds: it prints source and steps of a single seed, and of every seed with a problem.
"""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.behaviours.harness import difference, quiet
from tests.behaviours.random_pieces import K, Writer
from tests.support.helpers import fixed, last_run

import torchweld as tw
from torchweld.welds.swapping.swap import welded_paths

# A call -> the inputs to record on, so that the call is covered.
RECORDED = {
    "m(X)": ("X",),
    "m(torch.cat([X, X]))": ("X[:4]", "torch.cat([X, X])"),
    "m(X.view(2, 4, K))": ("X", "X.view(2, 4, K)"),
}
MASKED = {"m(X, mask=MASK)": ("tw.Inputs(X, mask=MASK)",)}
# Calls that may not be covered.
CALLS = (
    "m(X[:3])",
    "m(X)",
    "m(X[:5])",
    "m(X[:7])",
    "m(LONG[1:])",
    "m(TAGGED)",
    "m(X, mask=X)",
    "m(X, mask=MASK.double())",
    "m(X, mask=MASK[:3])",
    "m(X, mask=MASK[None])",
    "m(X, mask=3)",
    "m(X[:1])",
    "m(X[:0])",
    "m(X[0])",
    "m(X.view(2, 4, K))",
    "m(X.view(8, 1, K))",
    "m(torch.cat([X, X, X]))",
    "m(X[:5].view(5, 1, K))",
    "m(300.0 * X)",
    "m(HARD)",
    "m(TALL.t())",
    "m(WIDE[:, ::2])",
    "m(X.double())",
    "m(x=X)",
    "m(X, True)",
    "m(X, flag=True)",
    "m(X, flag=False)",
    "m(X, mask=MASK)",
    "m(X, mask=None)",
    "m(X, flag=True, mask=MASK)",
    "m(X.requires_grad_())",
)
MODES = ("torch.enable_grad()", "torch.inference_mode()", "torch.autocast('cpu', torch.bfloat16)")
UNCHANGED = 2  # first steps: covered calls before any change
NOT_WITH_GRADIENTS = ("out=", ".chunk(", ".unbind(")  # torch itself raises
GRADIENTS = "torch.autograd.grad(m(X).sum(), list(m.parameters()), allow_unused=True)"


@dataclass(frozen=True, kw_only=True)
class Forward:
    seed: int
    source: str
    inputs: tuple[str, ...]  # to record on, as expressions
    steps: tuple[str, ...]  # statements; a call sets `r`
    training: bool  # whether it is welded for training

    @property
    def has_source_file(self) -> bool:
        """Half of the modules look like code from a file, the others have no file."""
        return self.seed % 2 == 0

    def __str__(self) -> str:
        recorded = ", ".join(self.inputs) + (" in training" if self.training else "")
        return f"{self.source}\n# recorded on {recorded}\n" + "\n".join(self.steps)


@dataclass(kw_only=True)
class ForwardOutcome:
    welded: bool = False
    ran: bool = True  # whether the op ran in the first calls, which are covered
    problems: list[str] = field(default_factory=list)


# ---- generating ----


def generate(seed: int) -> Forward:
    rng = random.Random(seed)
    writer = Writer(rng)
    source = writer.source()
    call, inputs = rng.choice(list((MASKED if writer.masked else RECORDED).items()))
    training = rng.random() < 0.1 and not any(text in source for text in NOT_WITH_GRADIENTS)
    steps = [f"r = {call}"] * UNCHANGED
    for _ in range(3):
        steps += [_call(rng, call) for _ in range(3)]
        if writer.changes:
            steps.append(rng.choice(writer.changes))
        steps.append(f"r = {call}")
    if training:
        steps.append(f"r = {GRADIENTS}")
    return Forward(seed=seed, source=source, inputs=inputs, steps=tuple(steps), training=training)


def _call(rng: random.Random, recorded: str) -> str:
    text = f"r = {recorded if rng.random() < 0.2 else rng.choice(CALLS)}"
    return f"with {rng.choice(MODES)}: {text}" if rng.random() < 0.15 else text


# ---- running ----


def judge(seed: int, *, weld: bool = True) -> ForwardOutcome:
    """Runs all steps on both twins and compares; the outcome says what differs."""
    made = generate(seed)
    outcome = ForwardOutcome()
    plain, welded = _namespace(made), _namespace(made)
    with torch.set_grad_enabled(made.training), quiet():
        try:
            if weld:
                _weld(made, welded, outcome)
        except Exception as error:
            outcome.problems.append(f"welding raised {type(error).__name__}: {error}")
            return outcome
        for number, step in enumerate(made.steps):
            want, runs = _done(step, number, plain), last_run()["calls"]
            have = _done(step, number, welded)
            if number < UNCHANGED and outcome.welded:
                outcome.ran &= last_run()["calls"] > runs
            wrong = difference(have, want)
            if wrong:
                outcome.problems.append(f"step {number}, {step}: {wrong}")
                break
    return outcome


def _namespace(made: Forward) -> dict[str, Any]:
    """Runs the source; the module is `m`, with the same weights every time."""
    file = f"<random forward {made.seed}>"
    if made.has_source_file:
        file = f"random_forward_{made.seed}.py"
        lines = made.source.splitlines(keepends=True)
        linecache.cache[file] = (len(made.source), None, lines, file)
    names: dict[str, Any] = {"__name__": f"random_forward_{made.seed}"}
    exec(compile(made.source, file, "exec"), names)
    torch.manual_seed(made.seed)
    names["m"] = names["Model"]().train(made.training)
    return names


def _inputs() -> dict[str, Any]:
    """Fresh inputs for every step, because forwards may change them."""
    hard = fixed(8, K)
    # No Inf: torch's own gelu(Inf) is NaN if it is vectorised, and Inf otherwise.
    hard[0, 0], hard[1, 1], hard[2] = float("nan"), 1e30, 1e4
    tagged = fixed(8, K)
    tagged.tag = True  # type: ignore[attr-defined]
    return {
        "X": fixed(8, K),
        "LONG": fixed(9, K, seed=4),
        "TAGGED": tagged,
        "HARD": hard,
        "TALL": fixed(K, 8, seed=1),
        "WIDE": fixed(8, 2 * K, seed=2),
        "MASK": fixed(8, 1, seed=3),
        "K": K,
    }


def _weld(made: Forward, names: dict[str, Any], outcome: ForwardOutcome) -> None:
    inputs = [eval(text, {**_inputs(), "torch": torch, "tw": tw}) for text in made.inputs]
    plan = tw.plan(names["m"], inputs, force=True, training=made.training, remember=False)
    tw.apply(names["m"], plan)
    names["LOG"].clear()
    outcome.welded = "" in welded_paths(names["m"])


def _done(step: str, number: int, names: dict[str, Any]) -> Any:
    """A step's result, its effects, and the inputs after it; or the type of its exception."""
    inputs = _inputs()
    names |= {**inputs, "r": None}
    torch.manual_seed(number)
    try:
        exec(step, names)
    except Exception as error:
        return type(error)
    result = names["r"]
    if isinstance(result, torch.Tensor) and result.is_inference():
        result = result.clone()
    seen = (list(names["LOG"]), getattr(names["m"], "calls", None))
    return result, seen, [t.detach() for t in inputs.values() if isinstance(t, torch.Tensor)]


def report(seed: int, outcome: ForwardOutcome) -> str:
    found = "\n".join(outcome.problems)
    return (
        f"seed {seed}: {found}\n{generate(seed)}\n"
        f"replay: python -m tests.behaviours.random_forwards {seed}"
    )


# ---- replaying by hand ----


def _seeds(words: list[str]) -> Iterator[int]:
    for word in words:
        first, _, last = word.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main(words: list[str]) -> int:
    seeds = list(_seeds(words))
    wrong = welded = 0
    for seed in seeds:
        outcome = judge(seed)
        welded += outcome.welded
        wrong += bool(outcome.problems)
        if outcome.problems or len(seeds) == 1:
            print(report(seed, outcome), end="\n\n")
    print(f"{len(seeds)} forwards, {welded} welded, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
