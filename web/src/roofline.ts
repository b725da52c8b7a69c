/** The roofline: what the machine can do, and where every op and block stands below it. */

import { scaleLog } from "d3-scale";

import { blank, bottomAxis, leftAxis, logTicks, tickText, type Area } from "./axes";
import { drawnToFit, html, svg } from "./dom";
import { fitted, textWidth } from "./flame_view";
import { LabelRoom, slantedBoxes, textBox, type Box } from "./label_room";
import { bytes, count, duration, figure, flops, rate, sentences, share } from "./number_text";
import type { Page, Roof, RoofPoint, PageSide } from "./page_data";
import { exact, figureOf, type Exact, type Section, type Table } from "./plot";
import { withTooltips } from "./tooltip";

/** Pixels: the height of names, as in the style sheet, and the longest that is not cut. */
const NAME = 11;
const LONGEST_NAME = 200;
const MOST_NAMES = 10;

interface Dot {
  point: RoofPoint;
  side: PageSide;
  before: boolean;
  intensity: number;
  gflops: number;
}

export function rooflineSection(page: Page): Section | null {
  const sides = (page.sides ?? []).filter((side) => (side.points ?? []).length > 0);
  if (sides.length === 0) return null;
  const dots = sides.flatMap((side) => dotsOf(side, sides.length > 1 && side === sides[0]));
  const roofs = sides[sides.length - 1].roofs ?? [];
  const holder = html("div", { class: "drawing" });
  drawnToFit(holder, (width) => draw(dots, roofs, width));
  withTooltips(holder, (target) => {
    const dot = target.closest("[data-dot]");
    return dot === null ? null : lines(dots[Number(dot.getAttribute("data-dot"))]);
  });
  const all = sides.reduce((sum, side) => sum + (side.points ?? []).length, 0);
  const left = all - dots.length;
  const several = sides.length > 1;
  const figure = figureOf({
    id: "roofline-plot",
    title: "Rate by FLOPs per byte",
    unit: "both axes logarithmic; size: time",
    body: dots.length > 0 ? [holder, legend(several)] : [],
    table: () => tableOfPoints(sides, roofs),
    printed: 20,
    ...(dots.length > 0 && { drawing: () => holder.querySelector("svg") }),
    note: sentences([
      left > 0
        ? `${left} without FLOPs, bytes or time ${left === 1 ? "is" : "are"} in the table only.`
        : "",
      roofs.length === 0 ? "The machine’s peaks were not measured, so there are no roofs." : "",
    ]),
  });
  return {
    id: "roofline",
    title: "Roofline",
    short: "Roofline",
    content: [
      html(
        "p",
        { class: "lead" },
        "The roofs are the machine’s peaks. Below a slanted one an op waits for memory, below the flat one it computes; the further below, the more time it loses.",
      ),
      figure,
    ],
  };
}

function dotsOf(side: PageSide, before: boolean): Dot[] {
  return (side.points ?? [])
    .filter((point) => point.flops > 0 && point.moved_bytes > 0 && point.time_us > 0)
    .map((point) => ({
      point,
      side,
      before,
      intensity: point.flops / point.moved_bytes,
      gflops: point.flops / point.time_us / 1e3,
    }));
}

function legend(several: boolean): HTMLElement {
  const entry = (sign: string, text: string) =>
    html("li", {}, html("span", { class: "sign", "aria-hidden": "true" }, sign), text);
  return html(
    "ul",
    { class: "legend" },
    entry("●", "op"),
    entry("■", "block"),
    several && entry("○", "hollow: before"),
    several && entry("●", "filled: after"),
  );
}

function lines(dot: Dot): string[] {
  const { point } = dot;
  const phase = point.phase ? `, ${point.phase}` : "";
  return [
    `${point.name}${phase}${dot.side.name ? `, ${dot.side.name}` : ""}`,
    `${duration(point.time_us)} in ${count(point.calls)} ${point.calls === 1 ? "call" : "calls"}`,
    `${rate(dot.gflops)} at ${figure(dot.intensity)} FLOP/B`,
    point.of_roofline === null ? "" : `${share(point.of_roofline, 1)} of its roofline`,
    point.bound ? `bound by ${point.bound}` : "",
  ];
}

/** Of memory, which has no GFLOP/s. */
function exactRate(gbps: number | null | undefined): Exact {
  return { shown: `${figure(gbps ?? NaN)} GB/s`, copied: `${gbps ?? ""} GB/s` };
}

function tableOfPoints(sides: PageSide[], roofs: Roof[]): Table {
  const points = sides.flatMap((side) => (side.points ?? []).map((point) => ({ point, side })));
  points.sort((a, b) => b.point.time_us - a.point.time_us);
  const rows = points.map(({ point, side }) => [
    point.name,
    point.block ? "block" : "op",
    side.name,
    point.phase,
    point.calls,
    point.time_us,
    point.flops,
    point.moved_bytes,
    point.time_us > 0 ? point.flops / point.time_us / 1e3 : "–",
    exact(point.of_roofline, (part) => share(part, 1)),
    point.bound,
  ]);
  const peaks = roofs.map((roof) => [
    roof.name,
    "roof",
    "",
    "",
    "",
    "",
    "",
    "",
    roof.gflops ?? exactRate(roof.gbps),
    "",
    "",
  ]);
  return {
    columns: [
      { name: "name" },
      { name: "what" },
      { name: "side" },
      { name: "phase" },
      { name: "calls", show: count },
      { name: "time, µs", show: duration },
      { name: "FLOPs", show: flops },
      { name: "bytes", show: bytes },
      { name: "GFLOP/s", show: figure },
      { name: "of roofline" },
      { name: "bound" },
    ],
    rows: [...rows, ...peaks],
  };
}

function draw(dots: Dot[], roofs: Roof[], width: number): SVGSVGElement {
  const height = Math.round(Math.max(320, Math.min(460, width * 0.45)));
  const area: Area = { left: 52, top: 28, width: width - 52 - 12, height: height - 28 - 44 };
  const flat = roofs.flatMap((roof) =>
    roof.gflops ? [{ name: roof.name, gflops: roof.gflops }] : [],
  );
  const slanted = roofs.flatMap((roof) =>
    roof.gbps ? [{ name: roof.name, gbps: roof.gbps }] : [],
  );
  const top = Math.max(...flat.map((roof) => roof.gflops), ...dots.map((dot) => dot.gflops));
  const ridges = flat.length > 0 ? slanted.map((roof) => top / roof.gbps) : [];
  const x = scaleLog()
    .domain(spread([...dots.map((dot) => dot.intensity), ...ridges], 1.6))
    .range([area.left, area.left + area.width]);
  const y = scaleLog()
    .domain(spread([...dots.map((dot) => dot.gflops), top], 1.6))
    .range([area.top + area.height, area.top]);
  const label = `Roofline with ${dots.length} ops and blocks; the table has their rates`;
  const drawing = blank(width, height, label);
  const ticksOf = (scale: { domain: () => number[] }) => {
    const [low, high] = scale.domain();
    return logTicks(low, high);
  };
  drawing.append(
    bottomAxis(area, { place: x, ticks: ticksOf(x), text: tickText, title: "FLOPs per byte" }),
    leftAxis(area, { place: y, ticks: ticksOf(y), text: tickText, title: "GFLOP/s" }),
  );
  const longest = Math.max(...dots.map((dot) => dot.point.time_us));
  const radius = (dot: Dot) => 3 + (width < 600 ? 7 : 11) * Math.sqrt(dot.point.time_us / longest);
  const room = new LabelRoom({
    left: area.left,
    top: 0,
    right: area.left + area.width,
    bottom: area.top + area.height,
  });
  const order = dots.map((_, i) => i).sort((a, b) => dots[b].point.time_us - dots[a].point.time_us);
  for (const dot of dots) room.take(dotBox(x(dot.intensity), y(dot.gflops), radius(dot)));
  drawing.append(
    ...flatRoofs(x, y, flat, slanted),
    ...slantedRoofs(x, y, slanted, top),
    ...joins(dots, x, y),
    ...order.map((i) => dotSign(dots[i], i, x, y, radius(dots[i]))),
    // Names last, so that nothing is drawn over them.
    ...flatNames(area, y, flat, room),
    ...slantedNames(x, y, slanted, top, room),
    ...dotNames(
      order.map((i) => dots[i]),
      x,
      y,
      radius,
      room,
    ),
  );
  return drawing;
}

/** What a name should not cover: a little less than the dot. */
function dotBox(x: number, y: number, radius: number): Box {
  const r = 0.85 * radius;
  return { left: x - r, top: y - r, right: x + r, bottom: y + r };
}

type Place = (value: number) => number;

function spread(values: number[], factor: number): [number, number] {
  return [Math.min(...values) / factor, Math.max(...values) * factor];
}

interface FlatRoof {
  name: string;
  gflops: number;
}

interface SlantedRoof {
  name: string;
  gbps: number;
}

type Scale = Place & { domain: () => number[] };

function flatRoofs(x: Scale, y: Place, flat: FlatRoof[], slanted: SlantedRoof[]): Element[] {
  const [least, most] = x.domain();
  return flat.map((roof) => {
    const from = Math.max(least, ...slanted.map((one) => roof.gflops / one.gbps).slice(0, 1));
    return svg("path", { class: "roof", d: `M${x(from)} ${y(roof.gflops)}H${x(most)}` });
  });
}

/** At the right end, above the line or below it; further left where that is taken. */
function flatNames(area: Area, y: Place, flat: FlatRoof[], room: LabelRoom): Element[] {
  return flat.flatMap((roof) => {
    const text = `${roof.name} ${rate(roof.gflops)}`;
    const width = textWidth(text, NAME);
    const right = area.left + area.width - 4;
    const spots = [0, 1, 2, 3].flatMap((step) =>
      [-5, 12].map((below) => {
        const end = right - step * (width + 12);
        const at = y(roof.gflops) + below;
        return { end, at, boxes: [textBox(end - width, at, width, NAME)] };
      }),
    );
    const spot = room.first(spots);
    if (spot === undefined) return [];
    return [svg("text", { x: spot.end, y: spot.at, class: "end roof-name haloed" }, text)];
  });
}

/** Where a slanted roof begins and ends in the plot; null where it is not in it. */
function reach(roof: SlantedRoof, x: Scale, y: Scale, top: number): [number, number] | null {
  const [least, most] = x.domain();
  const from = Math.max(least, y.domain()[0] / roof.gbps);
  const to = Math.min(most, top / roof.gbps);
  return to > from ? [from, to] : null;
}

function slantedRoofs(x: Scale, y: Scale, slanted: SlantedRoof[], top: number): Element[] {
  return slanted.flatMap((roof) => {
    const ends = reach(roof, x, y, top);
    if (ends === null) return [];
    const [from, to] = ends.map((at) => `${x(at)} ${y(at * roof.gbps)}`);
    return [svg("path", { class: "roof", d: `M${from}L${to}` })];
  });
}

/** Roofs too close for a name each have one together. */
function bundled(slanted: SlantedRoof[], y: Place): SlantedRoof[][] {
  const found: SlantedRoof[][] = [];
  for (const roof of [...slanted].sort((a, b) => b.gbps - a.gbps)) {
    const last = found.at(-1)?.at(-1);
    if (last !== undefined && y(roof.gbps) - y(last.gbps) < 1.6 * NAME) found.at(-1)?.push(roof);
    else found.push([roof]);
  }
  return found;
}

function bundleName(roofs: SlantedRoof[]): string {
  const [first, last] = [roofs[0], roofs[roofs.length - 1]];
  if (roofs.length === 1) return `${first.name} ${figure(first.gbps)} GB/s`;
  const rates = [...new Set([first, last].map((roof) => figure(roof.gbps)))];
  return `${first.name} … ${last.name} ${rates.join(" … ")} GB/s`;
}

/** Along the line, where there is room. */
function slantedNames(
  x: Scale,
  y: Scale,
  slanted: SlantedRoof[],
  top: number,
  room: LabelRoom,
): Element[] {
  return bundled(slanted, y).flatMap((roofs) => {
    const roof = roofs[0];
    const ends = reach(roof, x, y, top);
    if (ends === null) return [];
    const [from, to] = ends;
    const rise = y(to * roof.gbps) - y(from * roof.gbps);
    const angle = Math.atan2(rise, x(to) - x(from));
    const text = bundleName(roofs);
    const width = textWidth(text, NAME);
    const spots = Array.from({ length: 14 }, (_, i) => {
      const at = from * (to / from) ** (0.03 + 0.06 * i);
      const [left, base] = [x(at), y(at * roof.gbps) - 6];
      return { left, base, boxes: slantedBoxes(left, base, angle, width) };
    });
    const spot = room.first(spots);
    if (spot === undefined) return [];
    const degrees = (angle * 180) / Math.PI;
    const turn = `translate(${spot.left} ${spot.base}) rotate(${degrees})`;
    return [svg("text", { transform: turn, class: "roof-name haloed" }, text)];
  });
}

/** A thin line from what it was to what it is. */
function joins(dots: Dot[], x: Place, y: Place): Element[] {
  const key = (dot: Dot) => JSON.stringify([dot.point.name, dot.point.phase, dot.point.block]);
  const old = new Map(dots.filter((dot) => dot.before).map((dot) => [key(dot), dot]));
  return dots.flatMap((dot) => {
    const was = dot.before ? undefined : old.get(key(dot));
    if (was === undefined) return [];
    const d = `M${x(was.intensity)} ${y(was.gflops)}L${x(dot.intensity)} ${y(dot.gflops)}`;
    return [svg("path", { class: "join", d })];
  });
}

function dotSign(dot: Dot, i: number, x: Place, y: Place, r: number): Element {
  const place = { "data-dot": i, class: `dot ${dot.before ? "before" : "after"}` };
  const cx = x(dot.intensity);
  const cy = y(dot.gflops);
  if (!dot.point.block) return svg("circle", { cx, cy, r, ...place });
  const side = r * 1.7;
  return svg("rect", { x: cx - side / 2, y: cy - side / 2, width: side, height: side, ...place });
}

/** The longest few by name, each beside its dot, where there is room for it. */
function dotNames(
  dots: Dot[],
  x: Place,
  y: Place,
  radius: (dot: Dot) => number,
  room: LabelRoom,
): Element[] {
  const found: Element[] = [];
  const named = new Set<string>();
  for (const dot of dots.filter((one) => !one.before)) {
    if (found.length >= MOST_NAMES) break;
    if (named.has(dot.point.name)) continue;
    const text = fitted(dot.point.name, LONGEST_NAME);
    const width = textWidth(text, NAME);
    const [cx, cy, away] = [x(dot.intensity), y(dot.gflops), radius(dot) + 4];
    const places: [number, number][] = [
      [cx + away, cy + 4],
      [cx - away - width, cy + 4],
      [cx - width / 2, cy - away],
      [cx - width / 2, cy + away + 8],
    ];
    const spots = places.map(([left, base]) => ({
      left,
      base,
      boxes: [textBox(left, base, width, NAME)],
    }));
    const spot = room.first(spots);
    if (spot === undefined) continue;
    named.add(dot.point.name);
    found.push(svg("text", { x: spot.left, y: spot.base, class: "dot-name haloed" }, text));
  }
  return found;
}
