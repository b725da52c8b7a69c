"""Rules about the host: overhead, metadata, the first step, recompilation, guards, layout copies.

None of them needs the machine's peaks.
"""

from __future__ import annotations

from collections import Counter

from torchweld.core.number_text import counted, duration, figure, share, size
from torchweld.findings.evidence import Evidence
from torchweld.findings.finding import Draft, Slice
from torchweld.profiles.attributing.compilation_watch import LOOKUP
from torchweld.profiles.profile import Compilation, Tensor

# Overhead bounds a step if it is more than half of it.
OVERHEAD_SHARE = 0.5
# Every Linear makes a few views. A storm is many views that the model itself asks for, at a
# noticeable share of the step.
STORM_CALLS = 30
STORM_SHARE = 0.05
# A first step is always slower. It is reported if it takes several times as long, and long enough
# for the first request to notice.
COLD_RATIO = 5.0
COLD_US = 100_000.0
PLACES_NAMED = 3


def overhead_bound(case: Evidence) -> list[Draft]:
    """A step on a CPU that spends most of its time on everything but work.

    Reads the account's launch and host time: Python, dispatcher, autograd, views. The bound leaves
    the work as it is and removes all of that; nothing can do better. On a device the same
    shows as idle time, which has its own rule.
    """
    step = case.step
    if case.on_device:
        return []
    claims: dict[Slice, float] = {}
    by_module: Counter[int] = Counter()
    for i, op in enumerate(case.ops):
        found = case.claim(i, ("launch_us", "host_us"))
        claims.update(found)
        by_module[op.module] += sum(found.values())  # type: ignore[assignment]  # µs
    for module, us in enumerate(case.host_of_module):
        if us > 0:
            claims[Slice("module", module, "host_us")] = us
            by_module[module] += us  # type: ignore[assignment]
    overhead_us, useful_us = case.settled_us(claims), step.useful_us
    if overhead_us <= OVERHEAD_SHARE * case.step_us:
        return []
    python_us = sum(case.host_of_module)
    launches = sum(about.launches for about in case.account.ops)
    # A trace of another machine does not tell what starting an op takes there.
    starting = f"starting them takes {duration(step.launch_us)}, " if step.launch_us > 0 else ""
    worst = [(m, us) for m, us in by_module.most_common(PLACES_NAMED) if us > 0]
    return [
        Draft(
            rule="overhead-bound",
            title="The step is bound by overhead, not by work",
            cause="Ops are so small, or so few beside the Python around them, that starting them "
            "takes longer than what they do.",
            action="Do more in each op: fuse blocks (tw.FusedMLP), compile the whole model "
            "(torch.compile), batch inputs, and move loops from Python into tensors.",
            evidence=(
                f"{share(overhead_us, case.step_us)} of {duration(case.step_us)} is overhead"
                + (
                    f"; arithmetic and necessary traffic are {share(useful_us, case.step_us)}"
                    if useful_us > 0
                    else ""
                ),
                f"{counted(len(case.ops), 'op')} run, of which {launches:,} do work: {starting}"
                f"Python and the backward engine take {duration(python_us)}, the rest of the host "
                f"{duration(step.host_us - python_us)}",
                "most of it in " + ", ".join(f"{case.path(m)} ({duration(us)})" for m, us in worst),
            ),
            waste="overhead",
            claims=claims,
            modules=case.patterns(module for module, _ in worst),
        )
    ]


def metadata_storm(case: Evidence) -> list[Draft]:
    """Views and other ops that launch nothing, called by the model itself again and again.

    Reads ops of kind metadata that run in no other op, so not the views inside aten::linear. The
    bound removes them, the Python just before each and the backward nodes they made, and nothing
    else.
    """
    storm = [i for i in case.outermost if case.about(i).kind == "metadata" and case.is_forward(i)]
    claims: dict[Slice, float] = {}
    for i in storm:
        claims.update(_without(case, i))
    if len(storm) < STORM_CALLS or case.settled_us(claims) < STORM_SHARE * case.step_us:
        return []
    names = Counter(case.ops[i].name.removeprefix("aten::") for i in storm).most_common(4)
    launches = sum(about.launches for about in case.account.ops)
    return [
        Draft(
            rule="metadata-storm",
            title=f"{counted(len(storm), 'view')} and other ops that launch nothing",
            cause="Shapes are changed op by op, and each change costs a trip through Python and "
            "the dispatcher although no data move.",
            action="Take views out of loops, make them once where shapes stay the same, or compile "
            "the function: a compiler resolves them before anything runs.",
            evidence=(
                f"they take {duration(case.settled_us(claims))} of {duration(case.step_us)}, the "
                f"Python before each included; ops that do work: {launches:,}",
                "most often " + ", ".join(f"{name} ({count:,})" for name, count in names),
            ),
            waste="views and metadata",
            claims=claims,
            modules=case.patterns(case.ops[i].module for i in storm),
        )
    ]


def cold_start(case: Evidence) -> list[Draft]:
    """A first step that takes many times as long as later ones.

    Reads the times of the first step and of the usual one. It is paid once, so the bound on later
    steps is 1; `once_us` is the difference.
    """
    timing = case.profile.timing
    if timing is None:
        return []
    more_us = timing.first_us - timing.wall_us
    if timing.first_us < COLD_RATIO * timing.wall_us or more_us < COLD_US:
        return []
    compilation = case.profile.compilation
    compiles = compilation is not None and compilation.compiled > 0
    return [
        Draft(
            rule="cold-start",
            title=f"The first step takes {figure(timing.first_us / timing.wall_us)} times as long",
            cause="torch.compile compiles when the model is first called."
            if compiles
            else "What is made on first use is made then: memory, packed weights, libraries, "
            "caches of the model's own.",
            action="Call the model once with inputs of the real shapes before it serves"
            + (
                "; keep compiled code between processes (TORCHINDUCTOR_CACHE_DIR, or an "
                "ahead-of-time package)."
                if compiles
                else "."
            ),
            evidence=(
                f"first step {duration(timing.first_us)}, later ones {duration(timing.wall_us)}",
            ),
            waste="what the first step makes",
            claims={},
            once_us=more_us,
            always=True,
        )
    ]


def recompilation(case: Evidence) -> list[Draft]:
    """torch.compile compiled something again while it was watched.

    Reads torch's own count. Time is claimed only as far as the recorded steps show it: what
    compiled modules and Dynamo's own ranges spend outside ops that do work. If the recompilation
    fell outside the recorded steps, that is next to nothing; the finding is reported nevertheless.
    """
    compilation = case.profile.compilation
    if compilation is None or not compilation.recompiled:
        return []
    claims = _dynamo_claims(case, lookups_only=False)
    return [
        Draft(
            rule="recompilation",
            title=f"Code was compiled again {counted(compilation.recompiled, 'time')}",
            cause="Something that the compiled code was specialised on (a shape, a number, a "
            "module's attribute) changed between calls.",
            action="Compile with dynamic=True or torch._dynamo.mark_dynamic, pad to few shapes, "
            "and keep numbers that change in tensors.",
            evidence=(
                f"{compilation.compiled} compilations, {compilation.recompiled} of them again; "
                f"{counted(compilation.graph_breaks, 'graph break')}",
                *(f"because {reason}" for reason in compilation.reasons[:3]),
            ),
            waste="compiling again, as far as the recorded steps show it",
            claims=claims,
            modules=_compiled(case),
            always=True,
        )
    ]


def guard_cost(case: Evidence) -> list[Draft]:
    """Looking for the compiled code whose guards hold.

    Reads the ranges that torch opens around it. The bound removes all of them.
    """
    compilation = case.profile.compilation
    if compilation is None or compilation.guard_us <= 0:
        return []
    claims = _dynamo_claims(case, lookups_only=True)
    return [
        Draft(
            rule="guard-cost",
            title="Checking guards takes a noticeable part of the step",
            cause="Every call of compiled code first checks what it was specialised on, in Python "
            "objects, one after the other.",
            action="Compile one region around the whole step instead of many small ones, remove "
            "graph breaks, and do not compile modules whose work is this short.",
            evidence=(_guards(compilation),),
            waste="checking guards",
            claims=claims,
            modules=_compiled(case),
        )
    ]


def _guards(compilation: Compilation) -> str:
    return (
        f"{duration(compilation.guard_us)} for {counted(compilation.regions, 'compiled region')} "
        f"per step, {counted(compilation.graph_breaks, 'graph break')}"
    )


def _compiled(case: Evidence) -> tuple[str, ...]:
    return case.patterns(i for i, m in enumerate(case.profile.modules) if m.compiled)


def _dynamo_claims(case: Evidence, lookups_only: bool) -> dict[Slice, float]:
    claims: dict[Slice, float] = {}
    for i, op in enumerate(case.ops):
        if op.name.startswith(LOOKUP) or (case.about(i).kind == "dynamo" and not lookups_only):
            claims.update(case.claim(i))
    if not lookups_only:
        for i, module in enumerate(case.profile.modules):
            if module.compiled and case.host_of_module[i] > 0:
                claims[Slice("module", i, "host_us")] = case.host_of_module[i]
    return claims


def layout_copies(case: Evidence) -> list[Draft]:
    """Copies made only because a tensor was not contiguous.

    Reads ops of kind copy that do work: the source is laid out otherwise than the contiguous
    target, and both have the same shape and type. Not counted are spreading a bias over rows
    (stride 0), casts, and writing into a slice. The bound removes the copies and what belongs to
    them (the op around, Python just before it, backward nodes) and leaves every other op as it is.
    """
    copies: list[int] = []
    claims: dict[Slice, float] = {}
    for i in case.flow.order:
        if case.about(i).kind != "copy":
            continue
        source = _forced_copy(case, i)
        if source is None:
            continue
        copies.append(i)
        claims.update(_without(case, _outermost_copy(case, i)))
    if not copies:
        return []
    moved = sum(case.about(i).read_bytes + case.about(i).written_bytes for i in copies)
    causes = Counter(map(case.caller, copies)).most_common(4)
    return [
        Draft(
            rule="layout-copy",
            title=f"{counted(len(copies), 'copy')} of tensors that are not contiguous",
            cause="An op that needs its input in one piece is given a transposed, permuted or "
            "sliced view, so the data are copied first.",
            action="Keep the layout from op to op: permute once, where it is smallest; use ops "
            "that take strides (einsum, matmul on the other side, channels_last); drop "
            ".contiguous() where a view would do.",
            evidence=(
                f"they move {size(moved)} and take {duration(case.settled_us(claims))} of "
                f"{duration(case.step_us)}",
                "asked for by " + ", ".join(f"{name} ({count:,})" for name, count in causes),
            ),
            waste="copies of tensors that are not contiguous",
            claims=claims,
            modules=case.patterns(case.ops[i].module for i in copies),
        )
    ]


def _without(case: Evidence, i: int) -> dict[Slice, float]:
    """Claims on an op, what runs inside it, the Python before it, and its backward."""
    claims: dict[Slice, float] = {}
    for inner in case.inside(i):
        for j in (inner, *case.backward_ops(inner)):
            claims.update(case.claim(j))
    _, pause_us = case.gaps.get(i, (0, 0.0))
    if pause_us > 0 and not case.on_device:
        claims[Slice("before op", i, "host_us")] = pause_us
    return claims


def _forced_copy(case: Evidence, i: int) -> Tensor | None:
    """The source, if this op copies it only because of its layout."""
    tensors = [tensor for tensor in case.ops[i].inputs if tensor is not None]
    name = case.ops[i].name
    if name == "aten::copy_" and len(tensors) >= 2:
        target, source = tensors[:2]
    elif name in ("aten::clone", "aten::contiguous") and tensors:
        source = target = tensors[0]
    else:
        return None
    if source.strides is None or source.contiguous or source.dtype != target.dtype:
        return None
    if source.device != target.device or source.shape != target.shape:
        return None
    if any(n > 1 and not stride for n, stride in zip(source.shape, source.strides, strict=True)):
        return None
    return source if target is source or target.contiguous else None


def _outermost_copy(case: Evidence, i: int) -> int:
    """The op around it that does nothing but this copy: aten::contiguous, aten::reshape."""
    found = i
    for outer in case.around(i):
        if case.working_inside[outer] != 1 or case.about(outer).kind not in ("copy", "composite"):
            break
        found = outer
    return found
