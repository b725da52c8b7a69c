"""What a plan still welds on a busy machine: the built-in models and BERT, quiet and loaded.

    python benchmarks/busy.py                  all of them, about ten minutes
    python benchmarks/busy.py gpt hf:bert      some
    python benchmarks/busy.py --burning 4      beside four processes that compute all the time

Each model is planned from scratch, first on the machine as it is, then beside processes that load
it. Exits 1 if fewer than 80 % of the blocks that are welded on the quiet machine are welded on the
busy one, over all models, or if a plan takes longer than its minute.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torchweld as tw
from torchweld.machine.machine_load import load_words
from torchweld.models import MODELS
from torchweld.models.targets import resolve

LEAST_SHARE = 0.8
# Finding comes before what is measured in a minute, and verifying the whole model after it.
MOST_S = 75.0


@dataclass(frozen=True, kw_only=True)
class BusyPlan:
    """What came of one plan."""

    welded: frozenset[str]
    found: int
    unmeasured: int
    whole: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{len(self.welded)} of {self.found} welded, {self.unmeasured} not measured, whole "
            f"model {self.whole}, {self.seconds:.0f} s"
        )


@contextmanager
def loaded(burning: int) -> Iterator[None]:
    """Beside so many processes that compute all the time."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(burning)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def planned(name: str) -> BusyPlan:
    target = resolve(name)
    given = [w.inputs if w.inputs is not None else w.run for w in target.workloads]
    begun_s = time.perf_counter()
    made = tw.plan(target.model, given, remember=False)
    seconds = time.perf_counter() - begun_s
    wholes = [f"{one.speed}" if one.speed else "not measured" for one in made.whole]
    return BusyPlan(
        welded=frozenset(decision.block.path for decision in made.decisions),
        found=len(made.planned),
        unmeasured=made.outcomes["not measured"],
        whole=", ".join(wholes) or "not welded",
        seconds=seconds,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=[*MODELS, "hf:bert"], help="TARGETs")
    parser.add_argument("--burning", type=int, default=1, help="processes that load the machine")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if words := load_words():
        print(f"{words} What is called quiet below is not.")
    quiet_count = kept_count = 0
    late = []
    for name in options.models:
        quiet = planned(name)
        print(f"{name}, quiet: {quiet}", flush=True)
        with loaded(options.burning):
            busy = planned(name)
        print(f"{name}, busy:  {busy}", flush=True)
        quiet_count += len(quiet.welded)
        kept_count += len(quiet.welded & busy.welded)
        late += [name] if busy.seconds > MOST_S else []
    if not quiet_count:
        print("nothing was welded on the quiet machine, so there is nothing to compare")
        return 2
    share = kept_count / quiet_count
    print(f"{kept_count} of {quiet_count} blocks, {share:.0%}, are welded beside the load too")
    if late:
        print(f"longer than {MOST_S:.0f} s: {', '.join(late)}")
    return 1 if share < LEAST_SHARE or late else 0


if __name__ == "__main__":
    sys.exit(main())
