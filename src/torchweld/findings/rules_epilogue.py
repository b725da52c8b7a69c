"""A rule about a device: element-wise kernels between matrix products, which welding spares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torchweld.core.number_text import counted, duration, share
from torchweld.findings.evidence import Evidence
from torchweld.findings.finding import Draft, Slice
from torchweld.profiles.profile import Device, Kernel

PRODUCT = "gemm"
# Triton's are Inductor's: those between two products are element by element too, or reductions,
# which its name tells ("triton_red", "triton_per").
BETWEEN = ("pointwise", "triton")
_REDUCING = ("triton_red", "triton_per")
# Why nothing ran before such a kernel: what its launch took.
_LATE = ("host wait", "kernel wait")


def between_products(case: Evidence) -> list[Draft]:
    """Element-wise kernels that run after one product and before the next, on one stream.

    Reads the kernels in the order of their stream, and the gaps before them. A product with such an
    epilogue (activation, gate, their gradients) needs neither the kernel nor its launch. The bound
    removes these kernels and the gaps that their launches ended; the products stay as they are, and
    whether a fused one is slower than its product is not known before it is measured.
    """
    device = case.profile.device
    if device is None:
        return []
    runs = list(_runs(device))
    kernels = [kernel for run in runs for kernel in run]
    if not kernels:
        return []
    running_us = sum(kernel.duration_us for kernel in kernels)
    launched_by = {kernel.op for kernel in kernels if kernel.op >= 0}
    late = [gap for gap in device.gaps if gap.cause in _LATE and gap.op in launched_by]
    claims = _claims(case, device, kernels)
    for gap in late:
        slice_ = Slice("op", gap.op, "launch_us")
        claims[slice_] = claims.get(slice_, 0.0) + gap.duration_us
    waited_us = sum(gap.duration_us for gap in late)
    launch_us = _launch_us(device, kernels)
    return [
        Draft(
            rule="between-products",
            title=f"{counted(len(kernels), 'element-wise kernel')} between matrix products",
            cause="Each reads from memory what a product has just written there, and writes it for "
            "the next one; each is a launch of its own.",
            action="Weld the blocks: torchweld fuse --device cuda measures a kernel for activation "
            "and gate, and products that end in them; torch.compile fuses the element-wise ops of "
            "a run into one kernel.",
            evidence=(
                f"{duration(running_us)} of {duration(case.step_us)} on the device "
                f"({share(running_us, case.step_us)}), and {duration(waited_us)} of gaps before "
                "them",
                f"their launches take the host {duration(launch_us)}",
                f"{counted(len(runs), 'place')} between two products: "
                f"{', '.join(_commonest(runs))}",
            ),
            waste="element-wise kernels between products, and their launches",
            claims=claims,
            modules=case.patterns(case.ops[k.op].module for k in kernels if k.op >= 0),
        )
    ]


def _runs(device: Device) -> Iterator[list[Kernel]]:
    """Element-wise kernels between two products of one stream."""
    streams: dict[tuple[int, int], list[Kernel]] = defaultdict(list)
    for kernel in filter(device.covers, device.kernels):
        streams[kernel.device, kernel.stream].append(kernel)
    for kernels in streams.values():
        kernels.sort(key=lambda kernel: kernel.start_us)
        run: list[Kernel] | None = None  # None: no product stands before
        for kernel in kernels:
            if kernel.category == PRODUCT:
                if run:
                    yield run
                run = []
            elif run is not None:
                run = [*run, kernel] if _is_elementwise(kernel) else None


def _is_elementwise(kernel: Kernel) -> bool:
    return kernel.category in BETWEEN and not kernel.name.startswith(_REDUCING)


def _claims(case: Evidence, device: Device, kernels: Sequence[Kernel]) -> dict[Slice, float]:
    """For each op, the share of its time on the device that these kernels take."""
    own: dict[int, float] = defaultdict(float)
    for kernel in kernels:
        own[kernel.op] += kernel.duration_us
    whole: dict[int, float] = defaultdict(float)
    for kernel in filter(device.covers, device.kernels):
        whole[kernel.op] += kernel.duration_us
    busy_us = device.span_us - device.idle_us
    running_us = sum(kernel.duration_us for kernel in filter(device.covers, device.kernels))
    claims: dict[Slice, float] = {}
    for op, us in own.items():
        if op < 0:
            scale = busy_us / running_us if running_us else 0.0
            claims[Slice("module", 0, "unexplained_us")] = us * scale
            continue
        part = us / whole[op] if whole[op] else 0.0
        running = ("arithmetic_us", "traffic_us", "round_trip_us", "slow_us", "unexplained_us")
        for slice_, found in case.claim(op, running).items():
            claims[slice_] = found * part
    return claims


def _launch_us(device: Device, kernels: Iterable[Kernel]) -> float:
    launches = {kernel.launch for kernel in kernels if kernel.launch >= 0}
    return sum(device.calls[launch].duration_us for launch in launches)


def _commonest(runs: Sequence[Sequence[Kernel]]) -> list[str]:
    """`12 of 2 kernels`, the most frequent first."""
    counts: dict[int, int] = defaultdict(int)
    for run in runs:
        counts[len(run)] += 1
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return [f"{count:,} of {counted(length, 'kernel')}" for length, count in ranked[:3]]
