"""Is a profile quick, complete, and right about itself? GPT-2 and the built-in models are asked.

    python benchmarks/profiling.py            GPT-2 in training, and every built-in model
    python benchmarks/profiling.py hf:gpt2    that one alone

GPT-2 (124M, random weights, 1 × 128 tokens, training) has to be profiled in 60 s, model and all,
and 90 % of the step explained. Each model's corrected times have to be within 10 % of times taken
without the profiler, in the same rounds: of steps that calibrated nothing, and of single modules.
A check is kept if its 95 % interval lies within 10 %, missed if it lies outside, and else unclear.
Exits 1 if a figure is missed, 2 if one is unclear.
"""

import argparse
import sys
import time

import torchweld as tw
from torchweld.models import MODELS
from torchweld.models.targets import resolve

MOST_SECONDS = 60.0
LEAST_EXPLAINED = 0.90
MOST_ERROR = 0.10
# How long to calibrate for the checks, which take half of it again. More than a profile takes by
# itself: the more rounds, the narrower the interval. A round has three steps, each warmed up once.
SECONDS = 20.0
FEWEST_STEPS, MOST_STEPS = 20, 400
# What is asked of GPT-2 alone: the built-in models' steps are short, and what Python costs between
# modules belongs to the root.
FULL = "hf:gpt2"


def profiled(target: str, training: bool) -> int:
    """Profiles one target, prints what it found, and gives what to exit with."""
    full = target == FULL
    begun_s = time.perf_counter()
    chosen = resolve(target, (), training=training)
    given = [w.inputs if w.inputs is not None else w.run for w in chosen.workloads]
    profile = tw.profile(chosen.model, given, training=training)
    account = tw.account(profile)
    seconds = time.perf_counter() - begun_s
    if isinstance(profile.step_us, tw.NotMeasured):
        print(f"{target}: {profile.step_us}")
        return 2
    assert not isinstance(account.explained, tw.NotMeasured)
    steps = int(SECONDS * 1e6 / (6 * profile.step_us))
    steps = min(MOST_STEPS, max(FEWEST_STEPS, steps))
    profile = tw.profile(chosen.model, given, training=training, steps=steps)
    words = []

    def line(what: str, value: str, word: str = "") -> None:
        words.append(word)
        print(f"  {what:<44} {value:>26}  {word}", flush=True)

    print(f"{target}, {'training' if training else 'inference'}")
    quick, complete = seconds < MOST_SECONDS, account.explained >= LEAST_EXPLAINED
    line("seconds, end to end", f"{seconds:.0f}", _word(quick) if full else "")
    line("of the step explained", f"{account.explained:.0%}", _word(complete) if full else "")
    assert profile.timing is not None
    for check in profile.timing.checks:
        assert check.interval is not None, f"{steps} steps are too few for an interval"
        off = "{:+.1%} ({:+.1%} to {:+.1%})".format(check.error, *check.interval)
        line(f"{check.what}: corrected", off, _word(check.within(MOST_ERROR)))
    return 1 if "MISSED" in words else 2 if "unclear" in words else 0


def _word(good: bool | None) -> str:
    return "unclear" if good is None else "kept" if good else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", default=[FULL, *MODELS])
    args = parser.parse_args()
    codes = [profiled(target, training=target == FULL) for target in args.targets]
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
