/** The timeline: lanes of spans on a canvas, to zoom and to pan. What is under a pixel is merged. */

import { blank, bottomAxis } from "./axes";
import { button, html, offstage, svg } from "./dom";
import { fitted } from "./flame_view";
import { brief, duration } from "./number_text";
import type { ModuleRow, Timeline } from "./page_data";
import { onPaper } from "./paper";
import { firstAfter, spanAt, spanRows, type Span, type SpanRow } from "./timeline_rows";
import { hideTooltip, showTooltip } from "./tooltip";

const ROW = 16;
const LANE_HEAD = 22;
const TOP = 24;
const TONES = 5;
/** Pixels: a box of spans too short to see says something about this place, not about a stretch. */
const LONGEST_RUN = 2;
/** No closer than this: 10 ns across. */
const LEAST_SPAN_US = 0.01;

interface Box {
  x: number;
  y: number;
  width: number;
  tone: string;
  name: string;
}

export class TimelineView {
  readonly element: HTMLElement;
  private readonly rows: SpanRow[];
  private readonly tops: number[] = [];
  private readonly heads: { y: number; text: string; device: boolean }[] = [];
  private readonly height: number;
  private from = 0;
  private to: number;
  private width = 0;
  private chosen: Span | null = null;
  private waiting = false;
  private readonly tones: string[];
  private readonly canvas: HTMLCanvasElement;
  private readonly said = html("p", { class: "flame-said", role: "status" });
  private readonly holder: HTMLElement;

  constructor(
    private readonly timeline: Timeline,
    private readonly modules: ModuleRow[],
    label: string,
  ) {
    this.to = timeline.end_us;
    this.rows = spanRows(timeline);
    this.height = this.layOut();
    const parts = new Set(modules.flatMap((row) => [row.path, row.kind, ...row.path.split(".")]));
    const isModule = (name: string) => parts.has(name.replace(/^backward of /, ""));
    this.tones = timeline.names.map((name) => (isModule(name) ? "tone-module" : toneOf(name)));
    this.canvas = html("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": `${label}. Arrows go from span to span, Shift with arrows pans, plus and minus zoom, Enter zooms to the span, Escape shows all.`,
    });
    this.holder = html("div", { class: "timeline-drawing" }, this.canvas);
    this.element = html(
      "div",
      { class: "timeline" },
      html(
        "div",
        { class: "controls" },
        button("Zoom in", () => this.zoomAround(0.5, 0.5)),
        button("Zoom out", () => this.zoomAround(0.5, 2)),
        button("←", () => this.pan(-0.3), { "aria-label": "Earlier" }),
        button("→", () => this.pan(0.3), { "aria-label": "Later" }),
        button("Whole step", () => this.reset(), { class: "quiet" }),
      ),
      this.holder,
      this.said,
    );
    this.said.textContent =
      "Drag to pan; click, then turn the wheel to zoom. By keyboard: arrows, Shift and arrows, plus, minus, Enter, Escape.";
    this.listen();
    new ResizeObserver(() => this.resize()).observe(this.holder);
    // Printing does not wait for a frame; a view that was hidden has no width yet.
    onPaper(
      () => {
        this.resize();
        this.draw();
      },
      () => this.later(),
    );
    matchMedia("print").addEventListener("change", () => this.draw());
    document.addEventListener("theme", () => this.later());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.later());
  }

  /** What is seen now, as SVG. */
  drawing(): SVGSVGElement | null {
    if (this.width === 0) return null;
    const drawing = blank(this.width, this.height + 26, "Timeline");
    const area = { left: 0, top: TOP - 6, width: this.width, height: this.height - TOP + 6 };
    drawing.append(bottomAxis(area, this.axis(), 80));
    for (const head of this.heads) {
      drawing.append(svg("text", { x: 4, y: head.y, class: "lane-head" }, head.text));
    }
    for (const box of this.boxes()) {
      const { x, y, width } = box;
      drawing.append(svg("rect", { x, y, width, height: ROW - 1, class: `tone ${box.tone}` }));
      const text = box.width > 30 ? fitted(box.name, box.width - 8) : "";
      if (text !== "") drawing.append(svg("text", { x: x + 4, y: y + 11, class: "on-tone" }, text));
    }
    return offstage(drawing);
  }

  private layOut(): number {
    let y = TOP;
    let lane = -1;
    for (const row of this.rows) {
      if (row.lane !== lane) {
        lane = row.lane;
        const { name, device } = this.timeline.lanes[lane];
        this.heads.push({
          y: y + 15,
          text: device && !name.includes("device") ? `${name} · device` : name,
          device,
        });
        y += LANE_HEAD;
      }
      this.tops.push(y);
      y += ROW;
      const next = this.rows[this.tops.length];
      if (next?.lane !== lane) y += 6;
    }
    return y;
  }

  private resize(): void {
    const width = Math.floor(this.holder.clientWidth);
    if (width === this.width || width <= 0) return;
    this.width = width;
    this.later();
  }

  private later(): void {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  private axis() {
    const span = this.to - this.from;
    const scale = this.width / span;
    const step = niceStep(span / Math.max(2, Math.floor(this.width / 110)));
    const ticks = [];
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) ticks.push(at);
    const [unit, length] =
      span >= 5e6 ? ["s", 1e6] : span >= 5e3 ? ["ms", 1e3] : span >= 5 ? ["µs", 1] : ["ns", 1e-3];
    // As many digits as tell neighbours apart, however late in the step they are.
    const digits = Math.max(0, -Math.floor(Math.log10(step / length) + 1e-9));
    const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    return {
      place: (us: number) => (us - this.from) * scale,
      ticks,
      text: (us: number) => `${(us / length).toLocaleString("en-US", format)} ${unit}`,
      title: "",
    };
  }

  /** The boxes that are in sight; neighbours narrower than a pixel are one. */
  private boxes(): Box[] {
    const { timeline, from, to } = this;
    const scale = this.width / (to - from);
    const found: Box[] = [];
    this.rows.forEach((row, number) => {
      const { start_us: start, duration_us: length, name_index: names } = timeline.lanes[row.lane];
      const y = this.tops[number];
      // A run of spans too short to see: one box, in the tone of its longest.
      let run: Box | null = null;
      let longest = 0;
      for (let i = firstAfter(timeline, row, from); i < row.spans.length; i++) {
        const span = row.spans[i];
        if (start[span] > to) break;
        const x = Math.max(0, (start[span] - from) * scale);
        const end = Math.min(this.width, (start[span] + length[span] - from) * scale);
        const tone = this.tones[names[span]];
        if (end - x >= 1) {
          run = null;
          const width = end - x > 3 ? end - x - 0.7 : end - x;
          found.push({ x, y, width, tone, name: timeline.names[names[span]] });
        } else if (run !== null && x <= run.x + run.width + 0.5 && x - run.x < LONGEST_RUN) {
          run.width = Math.max(run.width, end - run.x);
          if (length[span] > longest) run.tone = tone;
          longest = Math.max(longest, length[span]);
        } else {
          run = { x, y, width: Math.max(0.5, end - x), tone, name: "" };
          longest = length[span];
          found.push(run);
        }
      }
    });
    return found;
  }

  private draw(): void {
    const context = this.canvas.getContext("2d");
    if (context === null || this.width === 0) return;
    const density = devicePixelRatio || 1;
    this.canvas.width = this.width * density;
    this.canvas.height = this.height * density;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    context.scale(density, density);
    const colours = coloursIn(this.holder);
    context.clearRect(0, 0, this.width, this.height);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    this.drawGrid(context, colours);
    for (const box of this.boxes()) {
      context.fillStyle = colours[box.tone];
      context.fillRect(box.x, box.y, box.width, ROW - 1);
      const text = box.width > 30 ? fitted(box.name, (box.width - 8) * 1.08) : "";
      if (text === "") continue;
      context.fillStyle = colours["on-tone"];
      context.fillText(text, box.x + 4, box.y + 11);
    }
    this.drawChosen(context, colours);
  }

  private drawGrid(context: CanvasRenderingContext2D, colours: Record<string, string>): void {
    const axis = this.axis();
    context.strokeStyle = colours.grid;
    context.lineWidth = 1;
    for (const tick of axis.ticks) {
      const x = Math.round(axis.place(tick)) + 0.5;
      context.beginPath();
      context.moveTo(x, TOP - 6);
      context.lineTo(x, this.height);
      context.stroke();
      context.fillStyle = colours.muted;
      const text = axis.text(tick);
      const middle = x - context.measureText(text).width / 2;
      context.fillText(text, Math.max(2, Math.min(this.width - 40, middle)), 12);
    }
    for (const head of this.heads) {
      context.fillStyle = colours.text;
      context.font = `600 ${context.font}`;
      context.fillText(head.text, 4, head.y);
      context.font = context.font.replace("600 ", "");
    }
  }

  private drawChosen(context: CanvasRenderingContext2D, colours: Record<string, string>): void {
    if (this.chosen === null) return;
    const { lane, span } = this.chosen;
    const { start_us: start, duration_us: length, depth } = this.timeline.lanes[lane];
    const row = this.rows.findIndex((one) => one.lane === lane && one.depth === depth[span]);
    const scale = this.width / (this.to - this.from);
    const x = (start[span] - this.from) * scale;
    context.strokeStyle = colours.focus;
    context.lineWidth = 2;
    context.strokeRect(x, this.tops[row], Math.max(2, length[span] * scale), ROW - 1);
  }

  private lines({ lane, span }: Span): string[] {
    const spans = this.timeline.lanes[lane];
    const module = spans.module[span] >= 0 ? this.modules[spans.module[span]] : undefined;
    return [
      this.timeline.names[spans.name_index[span]],
      `${duration(spans.duration_us[span])}, from ${duration(spans.start_us[span])}`,
      module === undefined ? "" : `in ${module.path || "the model"} (${module.kind})`,
      `${spans.name}${spans.device ? ", device" : ""}`,
    ];
  }

  private say(span: Span): void {
    const lines = this.lines(span).filter((line) => line !== "");
    this.said.textContent = lines.map(brief).join(" · ");
  }

  private show(from: number, to: number): void {
    const whole = this.timeline.end_us;
    const span = Math.max(LEAST_SPAN_US, Math.min(whole, to - from));
    this.from = Math.max(0, Math.min(whole - span, from));
    this.to = this.from + span;
    hideTooltip();
    this.later();
  }

  private zoomAround(place: number, factor: number): void {
    const span = this.to - this.from;
    const at = this.from + place * span;
    this.show(at - place * span * factor, at + (1 - place) * span * factor);
  }

  private pan(part: number): void {
    const step = part * (this.to - this.from);
    this.show(this.from + step, this.to + step);
  }

  private reset(): void {
    this.show(0, this.timeline.end_us);
  }

  private spanUnder(x: number, y: number): Span | null {
    const row = this.tops.findIndex((top) => y >= top && y < top + ROW);
    if (row < 0) return null;
    const perPixel = (this.to - this.from) / this.width;
    const us = this.from + x * perPixel;
    const span = spanAt(this.timeline, this.rows[row], us, perPixel);
    return span === null ? null : { lane: this.rows[row].lane, span };
  }

  private listen(): void {
    const { canvas } = this;
    let grabbed: { x: number; from: number; to: number; moved: boolean } | null = null;
    canvas.addEventListener("pointerdown", (event) => {
      grabbed = { x: event.offsetX, from: this.from, to: this.to, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const { offsetX: x, offsetY: y } = event;
      if (grabbed !== null && event.buttons > 0) {
        const step = ((grabbed.x - x) / this.width) * (grabbed.to - grabbed.from);
        if (Math.abs(grabbed.x - x) > 3) grabbed.moved = true;
        if (grabbed.moved) this.show(grabbed.from + step, grabbed.to + step);
        return;
      }
      const span = this.spanUnder(x, y);
      if (span === null) hideTooltip();
      else showTooltip(event.clientX, event.clientY, this.lines(span));
    });
    canvas.addEventListener("pointerup", (event) => {
      const clicked = grabbed !== null && !grabbed.moved;
      grabbed = null;
      const span = clicked ? this.spanUnder(event.offsetX, event.offsetY) : null;
      if (span !== null) this.choose(span);
    });
    canvas.addEventListener("dblclick", () => this.zoomToChosen());
    canvas.addEventListener("pointerleave", hideTooltip);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (this.press(event)) event.preventDefault();
    });
  }

  /** Zooms with Ctrl, by a pinch, or once the timeline has the focus; else the page scrolls. */
  private wheel(event: WheelEvent): void {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (event.ctrlKey || event.metaKey || (!sideways && document.activeElement === this.canvas)) {
      this.zoomAround(event.offsetX / this.width, Math.exp(event.deltaY * 0.004));
    } else if (sideways) {
      this.pan((event.deltaX || event.deltaY) / this.width);
    } else return;
    event.preventDefault();
  }

  private choose(span: Span): void {
    this.chosen = span;
    const { start_us: start, duration_us: length } = this.timeline.lanes[span.lane];
    const at = start[span.span];
    const width = this.to - this.from;
    if (at + length[span.span] < this.from || at > this.to)
      this.show(at - width / 3, at + (2 * width) / 3);
    this.say(span);
    this.later();
  }

  private zoomToChosen(): void {
    if (this.chosen === null) return;
    const { start_us: start, duration_us: length } = this.timeline.lanes[this.chosen.lane];
    const at = start[this.chosen.span];
    const long = length[this.chosen.span];
    this.show(at - long * 0.05, at + long * 1.05);
  }

  private press(event: KeyboardEvent): boolean {
    const { key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    if (key === "+" || key === "=" || key === "w") this.zoomAround(0.5, 0.6);
    else if (key === "-" || key === "s") this.zoomAround(0.5, 1 / 0.6);
    else if (key === "a" || (event.shiftKey && key === "ArrowLeft")) this.pan(-0.2);
    else if (key === "d" || (event.shiftKey && key === "ArrowRight")) this.pan(0.2);
    else if (key === "Enter") this.zoomToChosen();
    else if (key === "Escape" || key === "0" || key === "Home") this.reset();
    else if (key === "ArrowRight") this.step(1);
    else if (key === "ArrowLeft") this.step(-1);
    else if (key === "ArrowDown") this.change(1);
    else if (key === "ArrowUp") this.change(-1);
    else return false;
    return true;
  }

  private rowOfChosen(): number {
    const { chosen } = this;
    if (chosen === null) return -1;
    const depth = this.timeline.lanes[chosen.lane].depth[chosen.span];
    return this.rows.findIndex((row) => row.lane === chosen.lane && row.depth === depth);
  }

  /** Along the row. */
  private step(by: number): void {
    const row = this.rowOfChosen();
    if (row < 0 || this.chosen === null) {
      this.change(1);
      return;
    }
    const { spans, lane } = this.rows[row];
    const next = spans[spans.indexOf(this.chosen.span) + by];
    if (next !== undefined) this.choose({ lane, span: next });
  }

  /** To the row below or above, at the same time. */
  private change(by: number): void {
    let row = this.rowOfChosen();
    const us =
      this.chosen === null
        ? this.from
        : this.timeline.lanes[this.chosen.lane].start_us[this.chosen.span];
    for (row += by; row >= 0 && row < this.rows.length; row += by) {
      const { spans, lane } = this.rows[row];
      if (spans.length === 0) continue;
      const at = Math.min(spans.length - 1, firstAfter(this.timeline, this.rows[row], us));
      this.choose({ lane, span: spans[at] });
      return;
    }
  }
}

/** 1, 2 or 5 times a power of ten, at least as long. */
function niceStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return (
    [1, 2, 5, 10].map((one) => one * power).find((step) => step >= least * 0.999) ?? 10 * power
  );
}

function toneOf(name: string): string {
  if (name.startsWith("torchweld::")) return "tone-welded";
  let hash = 7;
  for (let i = 0; i < name.length; i++) hash = (hash * 31 + name.charCodeAt(i)) | 0;
  return `tone-${Math.abs(hash) % TONES}`;
}

/** The style sheet's colours as a canvas needs them. */
function coloursIn(holder: HTMLElement): Record<string, string> {
  const probe = html("span", { hidden: true });
  holder.append(probe);
  const names: [string, string][] = [
    ...Array.from({ length: TONES }, (_, i): [string, string] => [`tone-${i}`, `--tone-${i}`]),
    ["tone-welded", "--tone-welded"],
    ["tone-module", "--tone-module"],
    ["on-tone", "--on-frame"],
    ["grid", "--line"],
    ["muted", "--muted"],
    ["text", "--text"],
    ["focus", "--focus"],
  ];
  const found = names.map(([name, property]) => {
    probe.style.color = `var(${property})`;
    return [name, getComputedStyle(probe).color];
  });
  probe.remove();
  return Object.fromEntries(found) as Record<string, string>;
}
