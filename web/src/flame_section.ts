/** The flame graphs: of each side, of the device, and the difference. */

import { html } from "./dom";
import { BANDS, diffFrames, flameFrames } from "./flame_frames";
import { FlameView } from "./flame_view";
import {
  FRAME_KINDS,
  isMissing,
  isWholeTrace,
  stepsOf,
  type Flame,
  type FlameDiff,
  type Page,
  type PageSide,
} from "./page_data";
import { capital, count, duration, sentences } from "./number_text";
import { figureOf, type Section, type Table } from "./plot";
import { tabs, type Tab } from "./tabs";

export function flameSection(page: Page): Section | null {
  const sides = page.sides ?? [];
  const found: Tab[] = [];
  const now = sides.at(-1);
  if (now?.flame) found.push(flameTab("flame-now", now.name || "host", now, now.flame));
  const before = sides.length > 1 ? sides[0] : undefined;
  if (before?.flame) found.push(flameTab("flame-before", before.name, before, before.flame));
  if (page.diff) found.push(diffTab(page.diff, page.not_comparable ?? []));
  const several = sides.length > 1;
  for (const side of [...sides].reverse()) {
    if (!side.device_flame) continue;
    const id = side === now ? "flame-device" : "flame-device-before";
    found.push(flameTab(id, several ? `device, ${side.name}` : "device", side, side.device_flame));
  }
  if (found.length === 0) return null;
  return {
    id: "flame",
    title: "Flame graph",
    short: "Flame",
    content: [
      html(
        "p",
        { class: "lead" },
        "Modules, the ops they run, and the kernels of these. As wide as they take time; backward is drawn in the module whose forward caused it.",
      ),
      tabs("Flame graphs", found),
    ],
  };
}

function flameTab(id: string, name: string, side: PageSide, flame: Flame): Tab {
  const make = () => {
    const frames = flameFrames(flame, side.modules);
    const view = new FlameView(frames, `Flame graph, ${name}`);
    const legend = legendOf(
      [...new Set(flame.kind)].sort().map((kind) => [`kind-${FRAME_KINDS[kind]}`, KINDS[kind]]),
    );
    const table = (): Table => ({
      columns: [
        { name: "frame" },
        { name: "kind" },
        { name: "level", show: count },
        { name: "module" },
        { name: "time, µs", show: duration },
        { name: "itself, µs", show: duration },
        { name: "calls", show: count },
      ],
      rows: byWidth(frames.width).map((i) => [
        frames.nameOf(i),
        FRAME_KINDS[flame.kind[i]],
        frames.depth[i] + 1,
        flame.module[i] >= 0 ? side.modules[flame.module[i]].path : "",
        frames.width[i],
        flame.own_us[i],
        flame.calls[i],
      ]),
    });
    const merged = flame.merged ?? 0;
    return figureOf({
      id: `${id}-plot`,
      title: titleOf(side, flame, name),
      unit: "width: time",
      body: [legend, view.element],
      table,
      printed: 12,
      drawing: () => view.drawing(),
      note: sentences([
        flame.note ?? "",
        merged > 0
          ? `${count(merged)} frames too small to see were added to frames called “smaller ones”; no time is lost.`
          : "",
      ]),
    });
  };
  return { id, name: capital(name), make };
}

/** Frames of several threads, or of a device, do not add up to the step. */
function titleOf(side: PageSide, flame: Flame, name: string): string {
  const total = duration(flame.total_us);
  if (flame === side.device_flame) return `${total} of kernels, ${name}`;
  const step = isMissing(side.step_us) ? 0 : side.step_us;
  const isStep = Math.abs(flame.total_us - step) <= 0.001 * step;
  const whose = side.name ? `, ${side.name}` : "";
  if (!isStep || isWholeTrace(side)) return `${total} of host threads${whose}`;
  const steps = stepsOf(side);
  return `${steps > 1 ? `${steps} steps` : "Step"} of ${total}${whose || ", host"}`;
}

const KINDS = ["module", "op", "kernel", "phase, such as backward", "the rest"];

function diffTab(diff: FlameDiff, doubts: string[]): Tab {
  const make = () => {
    const box = html("input", { type: "checkbox", id: "flame-vanished" });
    const toggle = html("label", { class: "check" }, box, html("span", {}, "Show what vanished"));
    const view = new FlameView(diffFrames(diff, false), "Flame graph of the change", [toggle]);
    const unit = html("span", {}, "width: time after");
    box.addEventListener("change", () => {
      view.show(diffFrames(diff, box.checked));
      unit.textContent = box.checked ? "width: time before" : "width: time after";
    });
    const legend = legendOf([
      ...BANDS.map((band): [string, string] => [band.name, band.text]),
      ["state-new", "new"],
      ["state-gone", "gone (shown by the switch)"],
    ]);
    const frames = diffFrames(diff, false);
    const largest = diff.before_us.map((before, i) => Math.max(before, diff.after_us[i]));
    const table = (): Table => ({
      columns: [
        { name: "frame" },
        { name: "kind" },
        { name: "level", show: count },
        { name: "state" },
        { name: "before, µs", show: duration },
        { name: "after, µs", show: duration },
        { name: "change, µs", show: duration },
      ],
      rows: byWidth(largest).map((i) => [
        frames.nameOf(i),
        FRAME_KINDS[diff.kind[i]],
        frames.depth[i] + 1,
        diff.state[i],
        diff.before_us[i],
        diff.after_us[i],
        diff.after_us[i] - diff.before_us[i],
      ]),
    });
    return html(
      "div",
      {},
      ...doubts.map((doubt) => html("p", { class: "doubt" }, doubt)),
      figureOf({
        id: "flame-diff-plot",
        title: `Before ${duration(diff.before_us[0])} → after ${duration(diff.after_us[0])}`,
        unit,
        body: [legend, view.element],
        table,
        printed: 20,
        drawing: () => view.drawing(),
      }),
    );
  };
  return { id: "flame-diff", name: "Change", make };
}

function byWidth(width: ArrayLike<number>): number[] {
  return Array.from(width, (_, i) => i).sort((a, b) => width[b] - width[a]);
}

/** Swatches with their meaning. */
export function legendOf(entries: [string, string][]): HTMLElement {
  return html(
    "ul",
    { class: "legend" },
    ...entries.map(([style, text]) =>
      html("li", {}, html("span", { class: `swatch ${style}`, "aria-hidden": "true" }), text),
    ),
  );
}
