"""Rules about a device: idle while it waits for the host, and copies to and from it."""

from __future__ import annotations

from collections import Counter

from torchweld.core.number_text import counted, duration, share
from torchweld.findings.evidence import Evidence
from torchweld.findings.finding import Draft, Slice
from torchweld.profiles.accounting.device_account import covered
from torchweld.profiles.profile import Kernel

# Gaps of 1 to 2 µs between kernels are normal; a tenth of the time is not.
IDLE_SHARE = 0.10
# Why nothing ran -> the part of an op's time to which the account adds such a gap.
_WAITING = {"host wait": "launch_us", "synchronisation": "host_us"}
_WITH_HOST = ("HtoD", "DtoH", "HostToDevice", "DeviceToHost")
# Copies within one device are DtoD; those between devices have other names.
_WITH_PEER = ("PtoP", "PeerToPeer")


def device_idle(case: Evidence) -> list[Draft]:
    """Finds time in which the device waits because the host has not launched the next kernel yet.

    Reads the gaps of the device's timeline that end with a launch that came too late, or after the
    host had waited for the device. The bound removes all of these gaps. The kernels stay, and so do
    the short gaps between kernels that were launched in time.
    """
    device = case.profile.device
    if device is None:
        return []
    gaps = [gap for gap in device.gaps if gap.cause in _WAITING]
    claims: dict[Slice, float] = {}
    by_cause: Counter[str] = Counter()
    for gap in gaps:
        slice_ = _slice(gap.op, _WAITING[gap.cause])
        claims[slice_] = claims.get(slice_, 0.0) + gap.duration_us
        by_cause[gap.cause] += gap.duration_us  # type: ignore[assignment]  # µs
    waited_us = sum(claims.values())
    if waited_us < IDLE_SHARE * case.step_us:
        return []
    longest = max(gaps, key=lambda gap: gap.duration_us)
    causes = ", ".join(f"{cause} {duration(us)}" for cause, us in by_cause.most_common())
    waits = by_cause["synchronisation"] > by_cause["host wait"]
    return [
        Draft(
            rule="device-idle",
            title="The device is idle while it waits for the host",
            cause="The host waits for results of the device (.item(), .cpu(), printing) before it "
            "launches more."
            if waits
            else "Launching a kernel takes the host longer than running it takes the device.",
            action="Read results back later, or every few steps, so that the host runs ahead."
            if waits
            else "Launch fewer, larger kernels: fuse blocks, compile the model, replay the step as "
            'a CUDA graph (torch.compile(mode="reduce-overhead")), or give it larger batches.',
            evidence=(
                f"{share(waited_us, case.step_us)} of {duration(case.step_us)} in "
                f"{counted(len(gaps), 'gap')}: {causes}",
                f"{counted(device.launches, 'launch')} take the host {duration(device.launch_us)}; "
                f"what they launched takes {duration(device.launched_us)}",
                f"the longest, {duration(longest.duration_us)}, ends with {longest.before[:60]}",
            ),
            waste="the device waiting for the host",
            claims=claims,
            modules=case.patterns(case.ops[gap.op].module for gap in gaps if gap.op >= 0),
        )
    ]


def device_copies(case: Evidence) -> list[Draft]:
    """Copies from host to device and back, and from one device to another.

    Reads the device's copy kernels by name, and the gaps before them. The bound removes the part in
    which nothing else runs on the device: a copy that runs beside a kernel costs the step nothing.
    """
    device = case.profile.device
    if device is None:
        return []
    kernels = sorted(filter(device.covers, device.kernels), key=lambda kernel: kernel.start_us)
    copies = [kernel for kernel in kernels if _crosses(kernel)]
    if not copies:
        return []
    others = covered(
        (kernel.start_us, kernel.start_us + kernel.duration_us)
        for kernel in kernels
        if not _crosses(kernel)
    )
    ends = _ends(copies)
    claims: dict[Slice, float] = {}
    exposed_us = _exposed(copies, others)
    for kernel, us in zip(copies, exposed_us, strict=True):
        slice_ = _slice(kernel.op, "unexplained_us")
        claims[slice_] = claims.get(slice_, 0.0) + us
    before_us = 0.0
    for gap in device.gaps:
        if gap.cause == "copy" and _goes_between(gap.before):
            slice_ = _slice(gap.op, "unexplained_us")
            claims[slice_] = claims.get(slice_, 0.0) + gap.duration_us
            before_us += gap.duration_us
    names = Counter(kernel.name for kernel in copies).most_common(3)
    callers = Counter(case.caller(kernel.op) for kernel in copies if kernel.op >= 0)
    asked = ", ".join(f"{name} ({count:,})" for name, count in callers.most_common(3))
    return [
        Draft(
            rule="device-copy",
            title=f"{counted(len(copies), 'copy')} between {ends}",
            cause=f"Data pass between the memories of {ends} within the step.",
            action="Keep tensors where they are used: move inputs once, ahead of time, from pinned "
            "memory with non_blocking=True; make new tensors on the device; read results back "
            "together at the end."
            if ends != "devices"
            else "Keep tensors where they are used: put layers that feed each other on the same "
            "device, and let what has to cross overlap with other work.",
            evidence=(
                f"they take {duration(sum(kernel.duration_us for kernel in copies))}, of which "
                f"{duration(sum(exposed_us))} beside nothing else, and "
                f"{duration(before_us)} of waiting before them",
                ", ".join(f"{count:,} × {name}" for name, count in names),
                *([f"asked for by {asked}"] if asked else []),
            ),
            waste=f"copies between {ends}",
            claims=claims,
            modules=case.patterns(case.ops[k.op].module for k in copies if k.op >= 0),
        )
    ]


def _slice(op: int, part: str) -> Slice:
    """The slice that gives a kernel's time: of its op, or of the root if no op launched it."""
    return Slice("op", op, part) if op >= 0 else Slice("module", 0, part)


def _crosses(kernel: Kernel) -> bool:
    return kernel.category == "copy" and _goes_between(kernel.name)


def _goes_between(name: str) -> bool:
    return any(way in name for way in (*_WITH_HOST, *_WITH_PEER))


def _ends(copies: list[Kernel]) -> str:
    """What they copy between, in words."""
    peers = [any(way in kernel.name for way in _WITH_PEER) for kernel in copies]
    if not any(peers):
        return "host and device"
    return "devices" if all(peers) else "host and devices"


def _exposed(copies: list[Kernel], others: list[tuple[float, float]]) -> list[float]:
    """µs of each copy in which no other kernel ran, and no earlier copy either; all by start."""
    found = []
    done_us = float("-inf")
    position = 0
    for kernel in copies:
        start_us = max(kernel.start_us, done_us)
        end_us = max(start_us, kernel.start_us + kernel.duration_us)
        done_us = max(done_us, end_us)
        while position < len(others) and others[position][1] <= start_us:
            position += 1
        hidden_us, at = 0.0, position
        while at < len(others) and others[at][0] < end_us:
            hidden_us += min(end_us, others[at][1]) - max(start_us, others[at][0])
            at += 1
        found.append(end_us - start_us - hidden_us)
    return found
