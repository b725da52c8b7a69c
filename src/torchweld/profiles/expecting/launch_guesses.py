"""Guesses about what code launches, and verdicts on them: text in, text out.

In: guesses as a user writes them (`3`, `"<=12"`, `"linear=3,ops<=12"`) and the launches that were
counted. Out: a `Verdict`; as text, guess and truth side by side with the ops that broke it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchweld.core.argument_checks import shown
from torchweld.core.errors import TorchweldError
from torchweld.core.number_text import counted
from torchweld.core.typed_names import known
from torchweld.profiles.attributing.launch_counts import COUNTERS, Launch, counts_of
from torchweld.profiles.profile import Tensor

_FORMS = '3, "==3", "<=12", ">=1", "<5", ">0" or "2..4"'
_GUESS = re.compile(r"\s*(==|<=|>=|<|>|)\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?")
_PAIR = re.compile(r"\s*(\w+)\s*(==|<=|>=|<|>|=)(.*)", re.DOTALL)
# The most lines of ops below a failed guess.
_MOST_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """How often something should happen: from `low` to `high` (None: no limit)."""

    text: str  # as it was written
    low: int
    high: int | None

    def holds(self, count: int) -> bool:
        return self.low <= count and (self.high is None or count <= self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class GuessRow:
    """One guess and the truth. `module` is a path, or "" for the whole block."""

    module: str
    counter: str
    guess: Guess
    truth: int

    @property
    def holds(self) -> bool:
        return self.guess.holds(self.truth)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All guesses and what they met; as text, a table and the ops that broke it."""

    rows: tuple[GuessRow, ...]
    launches: tuple[Launch, ...]  # everything counted, views and allocations too
    where: str = ""  # of the block, if the error is raised elsewhere: "test_model.py:12"

    @property
    def holds(self) -> bool:
        return all(row.holds for row in self.rows)

    def __str__(self) -> str:
        wrong = [row for row in self.rows if not row.holds]
        if not wrong:
            return f"{counted(len(self.rows), 'guess')} confirmed"
        place = f" in the block at {self.where}" if self.where else ""
        title = f"{len(wrong)} of {counted(len(self.rows), 'guess')} did not hold{place}"
        return "\n".join([title, "", *_table(self.rows), *self._evidence(wrong)])

    def _evidence(self, wrong: Sequence[GuessRow]) -> list[str]:
        lines: list[str] = []
        if not self.launches:
            return ["", "no op ran inside the block"]
        shown: dict[str, list[str]] = {}  # place -> counters whose ops are listed
        short: dict[str, None] = {}  # where something is missing, each place once
        for row in wrong:
            inside = [x for x in self.launches if _is_in(x.module, row.module)]
            met = [x for x in inside if _counts_as(x, row.counter)]
            if met:
                lines += ["", f"{_place(row)}{row.counter}, {row.truth} in all:", *_listed(met)]
            shown.setdefault(row.module, []).append(row.counter)
            if row.truth < row.guess.low:
                short[row.module] = None
        for path in (path for path in short if "ops" not in shown[path]):
            others = [
                x
                for x in self.launches
                if x.works and _is_in(x.module, path) and x.counter not in shown[path]
            ]
            where = f" in {path}" if path else ""
            lines += ["", f"what else ran{where}:", *(_listed(others) or ["  nothing"])]
        return lines


# ---- guesses ----


def parse_guess(value: int | str, counter: str) -> Guess:
    """`3`, `"<=12"`, `"2..4"`; anything else is an error that says so."""
    text = str(value).strip()
    found = _GUESS.fullmatch(text)
    if isinstance(value, bool) or not isinstance(value, (int, str)) or found is None:
        raise TorchweldError(f"{counter}={shown(value)} is not a guess; write {_FORMS}")
    sign, number, end = found[1], int(found[2]), found[3]
    if end is not None:
        if sign or int(end) < number:
            raise TorchweldError(
                f"{counter}={value!r} is not a range; write the lower end first, as in 2..4"
            )
        return Guess(text=text, low=number, high=int(end))
    if sign == "<" and number == 0:
        raise TorchweldError(f"{counter}={value!r} can never hold: nothing is counted below 0")
    low = {"<=": 0, "<": 0, ">": number + 1}.get(sign, number)
    high = {">=": None, ">": None, "<": number - 1}.get(sign, number)
    return Guess(text=text, low=low, high=high)


def parse_expectations(text: str) -> dict[str, str]:
    """`"linear=3,pointwise<=2"` as what `expect` takes: counter -> guess. Checked at once."""
    found: dict[str, str] = {}
    for part in text.split(","):
        pair = _PAIR.fullmatch(part)
        if pair is None:
            raise TorchweldError(
                f"{part.strip()!r} in {text!r} is not an expectation; write counter=guess, "
                "separated by commas, as in linear=3,ops<=12"
            )
        counter, sign, rest = known(pair[1], COUNTERS, "counter"), pair[2], pair[3].strip()
        if counter in found:
            raise TorchweldError(f"{text!r} has two guesses of {counter}; give one, or a range")
        found[counter] = rest if sign == "=" else sign + rest
        parse_guess(found[counter], counter)
    return found


def parse_guesses(guesses: Mapping[str, int | str]) -> dict[str, Guess]:
    return {
        known(counter, COUNTERS, "counter"): parse_guess(value, counter)
        for counter, value in guesses.items()
    }


# ---- checking ----


def judge(
    guesses: Mapping[str, Guess],
    modules: Mapping[str, Mapping[str, Guess]],
    launches: Sequence[Launch],
    where: str = "",
) -> Verdict:
    """Guesses about all launches, and about those of each module by its path."""
    rows = []
    for path, wanted in [("", guesses), *modules.items()]:
        counts = counts_of(x for x in launches if _is_in(x.module, path))
        rows += [
            GuessRow(module=path, counter=counter, guess=guess, truth=counts[counter])
            for counter, guess in wanted.items()
        ]
    return Verdict(rows=tuple(rows), launches=tuple(launches), where=where)


def _is_in(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(path + ".")


def _counts_as(launch: Launch, counter: str) -> bool:
    return launch.works if counter == "ops" else launch.counter == counter


# ---- text ----


def _place(row: GuessRow) -> str:
    return f"{row.module}: " if row.module else ""


def _table(rows: Sequence[GuessRow]) -> list[str]:
    cells = [("", "", "guess", "truth", "")]
    cells += [
        (r.module, r.counter, r.guess.text, str(r.truth), "" if r.holds else "<-") for r in rows
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    lines = []
    for module, counter, guess, truth, note in cells:
        left = f"{module:<{widths[0]}}  " if widths[0] else ""
        line = f"  {left}{counter:<{widths[1]}}  {guess:>{widths[2]}}  {truth:>{widths[3]}}  {note}"
        lines.append(line.rstrip())
    return lines


def _listed(launches: Sequence[Launch]) -> list[str]:
    """How often, name, shapes and module, the most frequent first."""
    tally = Counter(
        (x.name, _shapes(x.inputs), x.module, "" if x.forward else f"  ({x.phase})")
        for x in launches
    )
    lines = []
    for (name, shapes, module, phase), times in tally.most_common(_MOST_LINES):
        where = f"  in {module}" if module else ""
        lines.append(f"  {times:>3} x {name}{shapes}{where}{phase}")
    left = len(tally) - len(lines)
    return [*lines, f"  and {left} more"] if left > 0 else lines


def _shapes(inputs: Sequence[Tensor | None]) -> str:
    given = [
        "x".join(map(str, tensor.shape)) or "scalar" for tensor in inputs if tensor is not None
    ]
    return f"  ({', '.join(given)})" if given else ""
