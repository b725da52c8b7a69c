"""How large the page of a large trace is, how long it takes to make, to open, and to answer.

A trace of a training loop on a GPU is made up, with as many events as asked for: modules, ops in
ops, calls of the runtime, kernels on two streams, a backward thread, memory. It is read, turned
into one side of a page, and written as JSON and as the page itself. Prints seconds and bytes of
each stage, and checks that no time was lost: the frames of the flame add up to the time of all
threads, and those of the device to that of its kernels.

The page is then opened in Chromium: the time until its script has run and a frame was drawn, and
from each click until the next frame. Exits with 1 if the page has 15 MB or more, or if something
in the browser takes 2 s or more. Without a Chromium the page is only made.

    python benchmarks/large_page.py
    python benchmarks/large_page.py --events 400000 --html large.html
    python benchmarks/large_page.py --repeats 9   # open it so often; the longest times are printed
    python benchmarks/large_page.py --slowest   # functions that take longest, by cProfile
"""

import argparse
import cProfile
import gzip
import json
import pstats
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from chromium import REMEDY, chromium_path, opened_chromium
from playwright.sync_api import Browser

from torchweld.core.records import json_text
from torchweld.pages.page_html import html_of
from torchweld.pages.page_records import Page, PageSide
from torchweld.pages.profile_view import side_of
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording.trace_profile import read_trace

T = TypeVar("T")
HOST, BACKWARD = 1000, 1001
LAYERS = 24
LINEARS = ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.up")
KERNELS = ("ampere_sgemm_128x64_tn", "ampere_sgemm_64x32_sliced1x4_tn", "cutlass_80_gemm_f32")
MODULE = "nn.Module: "
MOST_PAGE_BYTES = 15e6
MOST_MS = 2000.0
# When the page is ready, and how long a click takes: until the frame after it is drawn.
WATCH = """
const drawn = (done) => requestAnimationFrame(() => setTimeout(done));
window.ready = new Promise((done) =>
  addEventListener("load", () => drawn(() => done(performance.now()))));
window.expectClick = () => {
  window.answer = new Promise((done) =>
    addEventListener("pointerdown", (down) =>
      addEventListener("click", () => drawn(() => done(performance.now() - down.timeStamp)),
        { capture: true, once: true }),
      { capture: true, once: true }));
};
"""
# What is clicked on, in this order.
CLICKS = {
    "zoom into a frame": "#flame-now g.frame[aria-level='3'] rect",
    "zoom out again": "#flame-now .controls button",
    "the device's flame": "#tab-flame-device",
    "a span": "#timeline-now canvas",
    "zoom into the timeline": "#timeline-now .controls button >> nth=0",
    "the whole timeline": "#timeline-now .controls button >> nth=4",
    "unfold all modules": ".module-table .controls button >> nth=0",
    "the table of spans": "#timeline-now .tools summary",
}


class TrainingLoop:
    """Steps of training, event by event."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.events: list[dict[str, Any]] = []
        self.now_us = 0.0
        self.device_us = {7: 0.0, 20: 0.0}  # until when a stream is busy
        self.correlation = self.sequence = self.address = 0

    def steps(self, count: int) -> list[dict[str, Any]]:
        """Steps until there are `count` events; the last one is cut short."""
        number = 0
        while len(self.events) < count:
            with self.span(f"ProfilerStep#{number}", "user_annotation"):
                self.step()
            number += 1
        del self.events[count:]
        return self.events

    def step(self) -> None:
        first = self.sequence
        with self.span(f"{MODULE}model", "user_annotation"):
            for layer in range(LAYERS):
                self.layer(f"{MODULE}model.layers.{layer}")
        for sequence in range(self.sequence, first, -1):
            self.node(sequence)

    def layer(self, path: str) -> None:
        with self.span(path, "user_annotation"):
            for name in LINEARS:
                self.linear(f"{path}.{name}")
            with self.span(f"{path}.mlp.act", "user_annotation"):
                self.op("aten::gelu", "vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>")
            self.linear(f"{path}.mlp.down")
            self.op("aten::add", "vectorized_elementwise_kernel<4, CUDAFunctor_add>", stream=20)

    def linear(self, path: str) -> None:
        with self.span(path, "user_annotation"), self.span("aten::linear", "cpu_op"):
            with self.span("aten::t", "cpu_op"), self.span("aten::transpose", "cpu_op"):
                self.op("aten::as_strided")
            self.sequence += 1
            shapes = {"Input Dims": [[768], [512, 768], [768, 768]], "Input type": ["float"] * 3}
            more: dict[str, Any] = {"Sequence number": self.sequence, **shapes}
            self.op("aten::addmm", self.random.choice(KERNELS), **more)
            self.memory(512 * 768 * 4)

    def node(self, sequence: int) -> None:
        name = "AddmmBackward0"
        more = {"Sequence number": sequence, "Fwd thread id": 1}
        engine = f"autograd::engine::evaluate_function: {name}"
        with self.span(engine, "cpu_op", BACKWARD), self.span(name, "cpu_op", BACKWARD, **more):
            for _ in range(2):
                self.op("aten::mm", self.random.choice(KERNELS), BACKWARD)

    @contextmanager
    def span(self, name: str, category: str, thread: int = HOST, **more: Any) -> Iterator[None]:
        place = len(self.events)
        self.events.append({})
        start_us = self.now_us
        self.now_us += self.random.uniform(0.3, 3.0)
        yield
        self.now_us += self.random.uniform(0.3, 3.0)
        self.events[place] = self.event(name, category, start_us, self.now_us, thread, more)

    def op(
        self, name: str, kernel: str = "", thread: int = HOST, stream: int = 7, **more: Any
    ) -> None:
        with self.span(name, "cpu_op", thread, **more):
            if kernel:
                self.launch(kernel, thread, stream)

    def launch(self, kernel: str, thread: int, stream: int) -> None:
        self.correlation += 1
        joined = {"correlation": self.correlation}
        with self.span("cudaLaunchKernel", "cuda_runtime", thread, **joined):
            pass
        start_us = max(self.now_us, self.device_us[stream])
        end_us = self.device_us[stream] = start_us + self.random.uniform(2.0, 30.0)
        more = {**joined, "device": 0, "stream": stream}
        self.events.append(self.event(kernel, "kernel", start_us, end_us, stream, more, pid=0))

    def memory(self, size: int) -> None:
        self.address += 1
        for address, change in ((self.address, size), (self.address - 50, -size)):
            more = {"Addr": address, "Bytes": change, "Device Type": 1}
            place = {"ph": "i", "cat": "cpu_instant_event", "pid": HOST, "tid": HOST}
            self.events.append({**place, "name": "[memory]", "ts": self.now_us, "args": more})

    @staticmethod
    def event(
        name: str,
        category: str,
        start_us: float,
        end_us: float,
        thread: int,
        more: dict[str, Any],
        pid: int = HOST,
    ) -> dict[str, Any]:
        start_us, end_us = round(start_us, 3), round(end_us, 3)
        times = {"ts": start_us, "dur": round(end_us - start_us, 3)}
        place = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread}
        return {**place, **times, "args": more}


def write_trace(path: Path, count: int) -> None:
    devices = [{"id": 0, "name": "NVIDIA A100-SXM4-40GB"}]
    data = {"deviceProperties": devices, "traceEvents": TrainingLoop().steps(count)}
    path.write_bytes(gzip.compress(json.dumps(data).encode(), 1))


def check_sums(profile: Profile, side: PageSide) -> None:
    """Raises SystemExit if time was lost on the way."""
    assert profile.device is not None
    threads_us = sum(module.self_us for module in profile.modules)
    kernels_us = sum(kernel.duration_us for kernel in profile.device.kernels)
    for flame, least_us in ((side.flame, threads_us), (side.device_flame, kernels_us)):
        found_us = sum(flame.own_us) if flame is not None else 0.0
        if found_us < least_us - 0.01:
            raise SystemExit(f"frames add up to {found_us:.3f} µs, not to {least_us:.3f}")


def timed(what: str, make: Callable[[], T]) -> T:
    begun = time.perf_counter()
    found = make()
    print(f"{what:24}{time.perf_counter() - begun:8.2f} s")
    return found


def sizes(side: PageSide) -> Iterator[tuple[str, int]]:
    for name in ("modules", "flame", "device_flame", "timeline", "points", "memory", "findings"):
        found = getattr(side, name)
        yield name, len(json_text(list(found) if isinstance(found, tuple) else found))


def run(trace: Path, html: Path | None) -> int:
    profile = timed("read the trace", lambda: read_trace(trace))
    kernels = len(profile.device.kernels) if profile.device is not None else 0
    print(f"{'':24}{len(profile.ops):,} ops, {kernels:,} kernels, {len(profile.modules)} modules")
    side = timed("build the side", lambda: side_of(profile))
    check_sums(profile, side)
    assert side.flame is not None
    assert side.timeline is not None
    print(f"{'':24}{len(side.flame.name):,} frames, {side.flame.merged:,} merged")
    shown = sum(len(lane.start_us) for lane in side.timeline.lanes)
    print(f"{'':24}{shown:,} spans, {sum(lane.merged for lane in side.timeline.lanes):,} merged")
    page = Page(title="a large trace", verdict="", sides=(side,))
    data = timed("write JSON", lambda: json_text(page))
    for name, count in sizes(side):
        print(f"  {name:22}{count / 1e6:8.2f} MB")
    print(f"{'data':24}{len(data) / 1e6:8.2f} MB")
    text = timed("write the page", lambda: html_of(page))
    print(f"{'page':24}{len(text.encode()) / 1e6:8.2f} MB")
    if html is not None:
        html.write_text(text)
    return int(len(text.encode()) >= MOST_PAGE_BYTES)


def opened(browser: Browser, html: Path) -> dict[str, float]:
    """Milliseconds until the page was ready, and for each of CLICKS."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.add_init_script(WATCH)
    page.goto(html.as_uri())
    found: dict[str, float] = {"open": page.evaluate("window.ready")}
    for what, selector in CLICKS.items():
        element = page.locator(selector).first
        element.scroll_into_view_if_needed()
        page.evaluate("window.expectClick()")
        element.click()
        found[what] = page.evaluate("window.answer")
    page.close()
    return found


def browse(html: Path, repeats: int) -> int:
    """Prints the longest time of each; 1 if one is too long."""
    with opened_chromium() as browser:
        print(f"\nin Chromium {browser.version}, longest of {repeats}")
        runs = [opened(browser, html) for _ in range(repeats)]
    longest = {what: max(one[what] for one in runs) for what in runs[0]}
    for what, ms in longest.items():
        print(f"  {what:22}{ms:8.0f} ms")
    return int(max(longest.values()) >= MOST_MS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--html", type=Path, help="keep the page here")
    parser.add_argument("--repeats", type=int, default=5, help="how often it is opened")
    parser.add_argument("--slowest", action="store_true", help="functions that take longest")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "large.json.gz"
        write_trace(trace, arguments.events)
        if not arguments.slowest:
            html = arguments.html or Path(folder) / "large.html"
            code = run(trace, html)
            if chromium_path() is None:
                print(f"\nnot opened: no Chromium is installed; {REMEDY}")
                return code
            return max(code, browse(html.resolve(), arguments.repeats))
        watch = cProfile.Profile()
        code = watch.runcall(run, trace, arguments.html)
        pstats.Stats(watch).sort_stats("tottime").print_stats(25)
        return code


if __name__ == "__main__":
    raise SystemExit(main())
