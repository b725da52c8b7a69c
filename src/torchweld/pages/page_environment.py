"""Where something was measured, as rows of a page: name and value, the same names everywhere."""

from __future__ import annotations

from torchweld.bench.bench_results import Bench
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import size
from torchweld.machine.fingerprint import Fingerprint
from torchweld.plans.plan import Plan
from torchweld.profiles.profile import About

Rows = tuple[tuple[str, str], ...]


def of_about(about: About) -> Rows:
    """Of a profile."""
    return _told(
        ("model", about.what),
        ("inputs", about.inputs),
        ("mode", "training" if about.training else "inference"),
        ("recorded", "by torchweld profile" if about.source == "live" else "in a trace"),
        ("rank", "" if about.rank is None else str(about.rank)),
        ("CPU", about.cpu),
        ("threads", str(about.threads) if about.threads else ""),
        ("torch", about.torch),
        ("machine", about.fingerprint),
        ("load", _load(about.load)),
    )


def of_fingerprint(where: Fingerprint) -> Rows:
    """Of a plan or a kept run."""
    return _told(
        ("CPU", where.cpu),
        ("instruction set", where.isa or "none"),
        ("threads", str(where.threads)),
        ("torch", where.torch),
        ("torchweld", where.torchweld),
        ("kernels", where.kernels or "none"),
        ("machine", where.key),
        ("commit", where.commit or ""),
        *where.versions.items(),
    )


def of_plan(plan: Plan) -> Rows:
    made = of_fingerprint(plan.made_on) if plan.made_on is not None else ()
    return _told(
        ("model", plan.model),
        ("mode", "training" if plan.training else "inference"),
        *(made or (("torch", plan.torch), ("machine", plan.fingerprint))),
        ("load", _load(plan.busy)),
    )


def of_bench(bench: Bench) -> Rows:
    busy = bench.busy_cores
    return _told(
        ("model", bench.target),
        ("preset", bench.preset),
        ("mode", "training" if bench.training else "inference"),
        ("CPU", bench.cpu),
        ("instruction set", bench.isa or "none"),
        ("threads", str(bench.threads)),
        ("torch", bench.torch),
        ("weights", "cold" if bench.cold else "hot"),
        ("seconds per side and cell", f"{bench.seconds:g}"),
        ("seed", str(bench.seed)),
        ("cores that others used", str(busy) if isinstance(busy, NotMeasured) else f"{busy:.1f}"),
        *_gpu_rows(bench),
    )


def _gpu_rows(bench: Bench) -> Rows:
    gpu = bench.gpu
    if gpu is None:
        return ()
    memory = size(gpu.memory_bytes) if gpu.memory_bytes else ""
    processors = str(gpu.processors) if gpu.processors else ""
    return (
        ("device", bench.device),
        ("GPU", gpu.name),
        ("compute capability", gpu.capability),
        ("GPU memory", memory),
        ("multiprocessors", processors),
        ("GPU runtime", gpu.runtime),
        ("GPU driver", gpu.driver),
        *bench.versions.items(),
    )


def _load(words: str) -> str:
    """The figure of `load_words` alone: what it means need not be said of each measurement."""
    return words.split(". ")[0].removeprefix("This machine is busy: ").rstrip(".")


def _told(*rows: tuple[str, str]) -> Rows:
    """Without what is not known."""
    return tuple((name, value) for name, value in rows if value)
