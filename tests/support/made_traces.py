"""Chrome traces made by hand, in the form in which torch.profiler writes them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchweld.profiles.profile import Profile

TRACES = Path(__file__).parents[1] / "traces"  # real ones

HOST = 1000  # pid and tid of the main thread
BACKWARD = 1001  # tid of autograd's thread


@dataclass
class MadeTrace:
    """Collects events; every method gives the trace back, so that calls can be chained."""

    events: list[Any] = field(default_factory=list)
    header: dict[str, Any] = field(
        default_factory=lambda: {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-40GB"}],
        }
    )

    def add(self, cat: str, name: str, ts: Any, dur: Any, **more: Any) -> MadeTrace:
        event = {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": HOST}
        self.events.append({**event, "ts": ts, "dur": dur, **more})
        return self

    def op(self, name: str, ts: Any, dur: Any, tid: Any = HOST, **arguments: Any) -> MadeTrace:
        return self.add("cpu_op", name, ts, dur, tid=tid, args=arguments)

    def step(self, number: int, ts: Any, dur: Any, pid: int = HOST) -> MadeTrace:
        return self.add("user_annotation", f"ProfilerStep#{number}", ts, dur, pid=pid)

    def call(
        self, name: str, ts: Any, dur: Any, correlation: int = 0, pid: int = HOST, tid: int = HOST
    ) -> MadeTrace:
        arguments = {"correlation": correlation}
        return self.add("cuda_runtime", name, ts, dur, pid=pid, tid=tid, args=arguments)

    def ran(
        self,
        name: str,
        ts: Any,
        dur: Any,
        correlation: int = 0,
        stream: int = 7,
        device: int = 0,
        cat: str = "kernel",
    ) -> MadeTrace:
        arguments = {"device": device, "stream": stream, "correlation": correlation}
        return self.add(cat, name, ts, dur, pid=device, tid=stream, args=arguments)

    def launch(
        self, name: str, call_at: float, runs_at: float, dur: float, correlation: int, **more: Any
    ) -> MadeTrace:
        """A call of 2 µs and the kernel it puts on the device."""
        call = "cudaLaunchKernel" if more.get("cat", "kernel") == "kernel" else "cudaMemcpyAsync"
        self.call(call, call_at, 2, correlation)
        return self.ran(name, runs_at, dur, correlation, **more)

    def text(self) -> str:
        return json.dumps({**self.header, "traceEvents": self.events})

    def write(self, path: Path) -> Path:
        """Compressed if the name ends in .gz."""
        raw = self.text().encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
        return path


def five_ops() -> MadeTrace:
    """op0 to op4, one after the other."""
    trace = MadeTrace()
    for i in range(5):
        trace.op(f"aten::op{i}", 10 * i, 8)
    return trace


def names(profile: Profile) -> list[str]:
    return [op.name for op in profile.ops]


@contextmanager
def a_folder() -> Iterator[Path]:
    """A folder for one example of hypothesis; pytest's own lives as long as the test."""
    with TemporaryDirectory() as name:
        yield Path(name)
