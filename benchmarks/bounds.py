"""Is diagnosis right about what welding can win? The built-in models hold it to account.

    python benchmarks/bounds.py            all of them, about five minutes
    python benchmarks/bounds.py gpt bert   some

Each is profiled, planned and timed before and after. The measured gain may not exceed the bound
beyond its interval, and the bound may not be more than three times the gain. Exits 1 if one is
broken, 2 if one is not measured.
"""

import argparse
import sys

import torchweld as tw
from torchweld.core.not_measured import NotMeasured
from torchweld.findings import welding_bound
from torchweld.models import MODELS

MOST_OVER_GAIN = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help="built-in models")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each plan")
    args = parser.parse_args()
    code = 0
    for name in args.models:
        model, inputs = MODELS[name].build()
        profile = tw.profile(model, inputs)
        made = tw.plan(model, inputs, budget_s=args.seconds, profile=profile, remember=False)
        if not made.decisions:
            print(f"{name}: nothing was worth welding", flush=True)
            continue
        (whole,) = made.whole
        bound = welding_bound(profile)  # a plan leaves out one that is broken
        if isinstance(whole.speed, NotMeasured) or isinstance(bound, NotMeasured):
            unknown = whole.speed if isinstance(whole.speed, NotMeasured) else bound
            print(f"{name}: {unknown}", flush=True)
            code = code or 2
            continue
        low, high = whole.speed.interval
        kept = low <= bound <= MOST_OVER_GAIN * high
        print(
            f"{name}: measured {whole.speed}, diagnosis said at most {bound:.2f}: "
            f"{'kept' if kept else 'BROKEN'}",
            flush=True,
        )
        code = code if kept else 1
    return code


if __name__ == "__main__":
    sys.exit(main())
