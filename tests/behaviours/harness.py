"""Runs a case twice, on a plain model and on a welded one, and compares the results.

A case is a generator. It first yields a fresh model, and gets it back: welded in one run, plain in
the other. Then it does what a user might do: calls the model, changes something, calls it again.
Everything it yields (outputs, gradients, side effects) must be the same in both runs.

    @welded
    def a_flag_is_set_on_the_instance() -> Steps:
        class Model(Mlp): ...
        model = yield Model()
        yield model(X)
        model.flag = True
        yield model(X)

Each run begins with a call of the case itself, so each run has its own classes, closures and
functions, and globals that a case sets at its beginning are set anew.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.helpers import fixed, last_run
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import torchweld as tw
from torchweld.welds.swapping.swap import stats, welded_paths

K, H = 12, 20
X = fixed(8, K)  # the recorded input, unless a case gives another

Steps = Generator[Any, Any, None]


class Mlp(nn.Module):
    """The model of most cases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, H), nn.Linear(H, K)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Around(nn.Module):
    """A model with a norm and an MLP at "mlp": only the MLP can be welded."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(K), mlp

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x), **kwargs)
        return y


# ---- declaring cases ----


@dataclass(frozen=True, kw_only=True, eq=False)
class BehaviourCase:
    steps: Callable[[], Steps]
    expect: str  # "welded", "refused" or "either"
    reason: str = ""  # a pattern that the refusal must match
    inputs: Any = None  # that the model is recorded on
    path: str = ""  # of the module that must be welded or refused
    training: bool = False  # whether it is welded for training

    @property
    def name(self) -> str:
        module = self.steps.__module__.rpartition(".")[2].removeprefix("cases_")
        return f"{module}-{self.steps.__name__}"


CASES: list[BehaviourCase] = []


def _declare(expect: str, reason: str = "") -> Callable[..., Any]:
    def declare(
        steps: Callable[[], Steps] | None = None,
        *,
        inputs: Any = X,
        path: str = "",
        training: bool = False,
    ) -> Any:
        if steps is None:
            return functools.partial(declare, inputs=inputs, path=path, training=training)
        CASES.append(
            BehaviourCase(
                steps=steps,
                expect=expect,
                reason=reason,
                inputs=inputs,
                path=path,
                training=training,
            )
        )
        return steps

    return declare


# The whole module must be welded, and its first result must come from the op.
welded = _declare("welded")
# The module may be welded or refused; only results count.
either = _declare("either")


def refused(reason: str, **settings: Any) -> Callable[..., Any]:
    """The whole module must be refused, and the plan must say why and where."""
    declare = _declare("refused", reason)
    return functools.partial(declare, **settings) if settings else declare


@dataclass(frozen=True)
class Inside:
    """A result of a call that is covered by the recorded ones: the op must run."""

    value: Any


def inside(value: Any) -> Inside:
    return Inside(value)


def attempt(call: Callable[[], Any]) -> Any:
    """The result of a call, or the type of the exception it raises."""
    try:
        return call()
    except Exception as error:
        return type(error)


def before_and_after(model: nn.Module, change: Callable[[Any], object]) -> Steps:
    """The most common steps: a call, a change of something the model reads, the same call."""
    made = yield model
    yield made(X)
    change(made)
    yield made(X)


def on_other_inputs(model: nn.Module) -> Steps:
    """Steps with a call on other values, which the op serves, and one on other dimensions."""
    made = yield model
    yield made(X)
    yield inside(made(2 * X))
    yield made(X.view(2, 4, K))


# ---- running cases ----


@dataclass
class BehaviourOutcome:
    problems: list[str] = field(default_factory=list)
    welded: bool = False
    refusal: str = ""
    inside: int = 0  # results that the op had to compute
    ran: int = 0  # results among them that it did compute


@functools.cache
def outcome_of(case: BehaviourCase) -> BehaviourOutcome:
    """Runs a case both ways and compares; each case runs once per process."""
    outcome = BehaviourOutcome()
    expected = list(_results(case, None))
    got = _results(case, outcome)
    for number, want in enumerate(expected, start=1):
        try:
            have = next(got)
        except StopIteration:
            outcome.problems.append(f"result {number} is missing")
            break
        except Exception as error:
            outcome.problems.append(f"result {number} raised {type(error).__name__}: {error}")
            break
        wrong = difference(have, want)
        if wrong:
            outcome.problems.append(f"result {number}: {wrong}")
    else:
        if list(got):  # also runs the case to its end
            outcome.problems.append("there are more results than the original gives")
    got.close()
    _judge(case, outcome)
    return outcome


def _judge(case: BehaviourCase, outcome: BehaviourOutcome) -> None:
    at = case.path or "the model"
    if case.expect == "welded" and not outcome.welded:
        outcome.problems.append(f"{at} is not welded: {outcome.refusal}")
    if case.expect == "refused" and outcome.welded:
        outcome.problems.append(f"{at} is welded; it must be refused for {case.reason!r}")
    elif case.expect == "refused" and not (
        outcome.refusal and re.search(case.reason, outcome.refusal, re.IGNORECASE)
    ):
        outcome.problems.append(
            f"refused for {outcome.refusal!r}, which does not match {case.reason!r}"
        )


def _results(case: BehaviourCase, outcome: BehaviourOutcome | None) -> Steps:
    """What one run yields. With an outcome, the model is welded, and the outcome filled in."""
    torch.manual_seed(0)
    steps = case.steps()
    model = next(steps)
    model.train(case.training)
    with torch.set_grad_enabled(case.training), quiet(), closing(steps):
        if outcome is not None:
            _weld(case, model, outcome)
        torch.manual_seed(1)
        number = 0
        while True:
            before = _counts(model, case.path)
            try:
                value = steps.send(model if number == 0 else None)
            except StopIteration:
                return
            number += 1
            wanted = isinstance(value, Inside) or (number == 1 and case.expect == "welded")
            if outcome is not None and wanted and outcome.welded:
                outcome.inside += 1
                outcome.ran += _ran(before, _counts(model, case.path))
            yield tree_map(_kept, value.value if isinstance(value, Inside) else value)


def _kept(value: Any) -> Any:
    """A copy of the present value: a later step may change it."""
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _weld(case: BehaviourCase, model: nn.Module, outcome: BehaviourOutcome) -> None:
    inputs = copy.deepcopy(case.inputs)
    plan = tw.plan(model, inputs, force=True, training=case.training, remember=False)
    tw.apply(model, plan)
    outcome.welded = case.path in welded_paths(model)
    outcome.refusal = "; ".join(
        f"{one.reason} {one.op} {one.where}" for one in plan.refused if one.path == case.path
    )


def _counts(model: nn.Module, path: str) -> tuple[int, int]:
    """Number of kernel runs in this thread, and of calls at `path` that ran the original."""
    found = stats(model).get(path)
    return last_run()["calls"], sum(found.originals.values()) if found else 0


def _ran(before: tuple[int, int], after: tuple[int, int]) -> bool:
    return after[0] > before[0] and after[1] == before[1]


@contextmanager
def quiet() -> Iterator[None]:
    """Ignores the warnings of a welded module that it runs its original code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torchweld: ")
        yield


# ---- comparing results ----

_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def difference(got: Any, want: Any) -> str:
    """The first difference in words; "" if there is none."""
    got_leaves, got_tree = tree_flatten(got)
    want_leaves, want_tree = tree_flatten(want)
    if got_tree != want_tree:
        return f"{_in_words(got)} does not have the structure of {_in_words(want)}"
    for a, b in zip(got_leaves, want_leaves, strict=True):
        wrong = _tensors_differ(a, b) if isinstance(b, Tensor) else _values_differ(a, b)
        if wrong:
            return wrong
    return ""


def _values_differ(got: Any, want: Any) -> str:
    if type(got) is type(want) and got == want:
        return ""
    return f"{_in_words(got)} is not {_in_words(want)}"


def _in_words(value: Any) -> str:
    def short(leaf: Any) -> Any:
        return f"tensor {list(leaf.shape)}" if isinstance(leaf, Tensor) else leaf

    return repr(tree_map(short, value))


def _tensors_differ(got: Any, want: Tensor) -> str:
    if not isinstance(got, Tensor):
        return f"{got!r} is not {_in_words(want)}"
    for what in ("dtype", "shape", "requires_grad"):
        a, b = getattr(got, what), getattr(want, what)
        if a != b:
            return f"{what} is {a}, not {b}"
    got, want = got.detach(), want.detach()
    if not want.is_floating_point():
        return "" if torch.equal(got, want) else "integers differ"
    kinds_differ = (got.isnan() != want.isnan()) | ((got != want) & (got.isinf() | want.isinf()))
    kinds_differ &= ~(got.isnan() & want.isnan())
    if kinds_differ.any():
        where = tuple(kinds_differ.nonzero()[0].tolist())
        return f"{got[where].item()} at {where} is not {want[where].item()}"
    finite = want.isfinite()
    if not finite.any():
        return ""
    off, sizes = (got - want)[finite].abs(), want[finite].abs()
    largest = sizes.max().item()
    tolerance = _TOLERANCE.get(want.dtype, 1e-4)
    allowed = tolerance * (sizes + max(largest, 1e-2))  # if all values are tiny, it may be noise
    if (off > allowed).any():
        return f"off by {off.max().item():.3g}, where {largest:.3g} is the largest"
    return ""
