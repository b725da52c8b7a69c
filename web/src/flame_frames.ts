/** Flames as frames with places: where each begins, how wide and how deep it is. Data in, data out. */

import { FRAME_KINDS, type Flame, type FlameDiff, type ModuleRow } from "./page_data";
import { change, count, duration, share } from "./number_text";

/** Frames as columns, each after the frame around it. A place is in µs, as the width is. */
export interface Frames {
  parent: number[];
  depth: Int32Array;
  start: Float64Array;
  width: Float64Array;
  nameOf: (frame: number) => string;
  labelOf: (frame: number) => string;
  /** Its colour, as a class of the style sheet. */
  classOf: (frame: number) => string;
  linesOf: (frame: number) => string[];
}

/** Lays siblings side by side, in the order they come. */
export function placed(parent: number[], width: Float64Array): [Float64Array, Int32Array] {
  const start = new Float64Array(parent.length);
  const free = new Float64Array(parent.length);
  const depth = new Int32Array(parent.length);
  for (let i = 0; i < parent.length; i++) {
    const around = parent[i];
    if (around >= 0) {
      start[i] = free[around];
      free[around] += width[i];
      depth[i] = depth[around] + 1;
    }
    free[i] = start[i];
  }
  return [start, depth];
}

/** Own times plus those of everything inside. */
function withInside(parent: number[], own: number[]): Float64Array {
  const total = Float64Array.from(own);
  for (let i = parent.length - 1; i > 0; i--) {
    if (parent[i] >= 0) total[parent[i]] += total[i];
  }
  return total;
}

export function flameFrames(flame: Flame, modules: ModuleRow[]): Frames {
  const width = withInside(flame.parent, flame.own_us);
  const [start, depth] = placed(flame.parent, width);
  const nameOf = (i: number) => flame.names[flame.name[i]];
  const linesOf = (i: number) => {
    const module = flame.module[i] >= 0 ? modules[flame.module[i]] : undefined;
    const kind = FRAME_KINDS[flame.kind[i]];
    const own = flame.own_us[i] !== width[i] ? `, of it ${duration(flame.own_us[i])} itself` : "";
    const calls =
      flame.calls[i] > 0
        ? `${count(flame.calls[i])} ${flame.calls[i] === 1 ? "call" : "calls"}`
        : "";
    const where = module === undefined ? "" : `in ${module.path || "the model"} (${module.kind})`;
    return [
      nameOf(i),
      `${duration(width[i])}, ${share(width[i], width[0])} of the step${own}`,
      kind === "rest" ? calls : [kind, calls].filter((one) => one !== "").join(", "),
      where,
    ];
  };
  return {
    parent: flame.parent,
    depth,
    start,
    width,
    nameOf,
    labelOf: nameOf,
    classOf: (i) => `kind-${FRAME_KINDS[flame.kind[i]]}`,
    linesOf,
  };
}

/** Upper limits of a frame's change, and the class of each band; the last has no limit. */
export const BANDS: { limit: number; name: string; text: string }[] = [
  { limit: 0.5, name: "band-1", text: "less than half" },
  { limit: 0.8, name: "band-2", text: "−50 to −20 %" },
  { limit: 0.95, name: "band-3", text: "−20 to −5 %" },
  { limit: 1.05, name: "band-4", text: "within 5 %" },
  { limit: 1.2, name: "band-5", text: "+5 to +20 %" },
  { limit: 1.5, name: "band-6", text: "+20 to +50 %" },
  { limit: Infinity, name: "band-7", text: "more than +50 %" },
];

function bandOf(before: number, after: number): string {
  const part = before > 0 ? after / before : 1;
  return (BANDS.find((band) => part <= band.limit) ?? BANDS[6]).name;
}

/** Both steps as one flame. `vanished`: as wide as it was before, so that what is gone is seen. */
export function diffFrames(diff: FlameDiff, vanished: boolean): Frames {
  const width = Float64Array.from(vanished ? diff.before_us : diff.after_us);
  const [start, depth] = placed(diff.parent, width);
  const nameOf = (i: number) => diff.names[diff.name[i]];
  const labels = weldedLabels(diff);
  const classOf = (i: number) => {
    const state = diff.state[i];
    if (state === "new" || state === "gone") return `state-${state}`;
    return `${bandOf(diff.before_us[i], diff.after_us[i])}${state === "welded" ? " state-welded" : ""}`;
  };
  const linesOf = (i: number) => [
    labels.get(i) ?? nameOf(i),
    changeText(diff, i),
    FRAME_KINDS[diff.kind[i]] === "rest" ? "" : FRAME_KINDS[diff.kind[i]],
  ];
  return {
    parent: diff.parent,
    depth,
    start,
    width,
    nameOf,
    labelOf: (i) => (diff.state[i] === "new" ? `+ ${nameOf(i)}` : (labels.get(i) ?? nameOf(i))),
    classOf,
    linesOf,
  };
}

function changeText(diff: FlameDiff, i: number): string {
  const before = diff.before_us[i];
  const after = diff.after_us[i];
  if (diff.state[i] === "new")
    return `new: ${duration(after)}, ${share(after, diff.after_us[0])} of the step`;
  if (diff.state[i] === "gone") {
    return `gone: was ${duration(before)}, ${share(before, diff.before_us[0])} of the step`;
  }
  return `${duration(before)} → ${duration(after)} (${change(before, after)})`;
}

/** A welded module reads as one change: "mlp: up, gelu, down → torchweld::chain". */
function weldedLabels(diff: FlameDiff): Map<number, string> {
  const gone = new Map<number, string[]>();
  const fresh = new Map<number, string[]>();
  for (let i = 1; i < diff.parent.length; i++) {
    const around = diff.parent[i];
    if (around < 0 || diff.state[around] !== "welded") continue;
    if (FRAME_KINDS[diff.kind[i]] === "phase") continue;
    const list = diff.state[i] === "gone" ? gone : diff.state[i] === "new" ? fresh : null;
    const name = shortName(diff, i);
    if (list === null) continue;
    const names = list.get(around) ?? [];
    if (!names.includes(name)) names.push(name);
    list.set(around, names);
  }
  const labels = new Map<number, string>();
  for (const [frame, after] of fresh) {
    const before = gone.get(frame);
    if (before === undefined) continue;
    labels.set(frame, `${shortName(diff, frame)}: ${before.join(", ")} → ${after.join(", ")}`);
  }
  return labels;
}

/** Of a module without its class: "up", not "up: Linear". */
function shortName(diff: FlameDiff, i: number): string {
  const name = diff.names[diff.name[i]];
  return FRAME_KINDS[diff.kind[i]] === "module" ? name.split(": ")[0] : name;
}

export interface Matches {
  frames: Uint8Array;
  count: number;
  /** Every µs once: a match inside a match adds nothing. */
  time: number;
}

export function search(frames: Frames, text: string): Matches | null {
  const wanted = text.trim().toLowerCase();
  if (wanted === "") return null;
  const found = new Uint8Array(frames.parent.length);
  const covered = new Uint8Array(frames.parent.length);
  let time = 0;
  let matches = 0;
  for (let i = 0; i < found.length; i++) {
    const around = frames.parent[i];
    covered[i] = around >= 0 ? found[around] | covered[around] : 0;
    if (frames.width[i] <= 0 || !frames.nameOf(i).toLowerCase().includes(wanted)) continue;
    found[i] = 1;
    matches += 1;
    if (covered[i] === 0) time += frames.width[i];
  }
  return { frames: found, count: matches, time };
}
