/** The roofline: what the machine can do, and where every op and block stands below it. */

import { scaleLog } from "d3-scale";

import { blank, bottomAxis, leftAxis, logTicks, tickText, type Area } from "./axes";
import { drawnToFit, html, svg } from "./dom";
import { fitted } from "./flame_view";
import { bytes, count, duration, figure, flops, rate, sentences, share } from "./number_text";
import type { Page, Roof, RoofPoint, PageSide } from "./page_data";
import { exact, figureOf, type Exact, type Section, type Table } from "./plot";
import { withTooltips } from "./tooltip";

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
    body: [dots.length > 0 && holder, legend(several)],
    table: () => tableOfPoints(sides, roofs),
    drawing: () => holder.querySelector("svg"),
    note: sentences([
      left > 0 ? `${left} without FLOPs, bytes or time are in the table only.` : "",
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
  const rows = sides.flatMap((side) =>
    (side.points ?? []).map((point) => [
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
    ]),
  );
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
  drawing.append(...roofLines(area, x, y, flat, slanted, top));
  const longest = Math.max(...dots.map((dot) => dot.point.time_us));
  const radius = (dot: Dot) => 3 + (width < 600 ? 7 : 11) * Math.sqrt(dot.point.time_us / longest);
  drawing.append(...joins(dots, x, y));
  const order = dots.map((_, i) => i).sort((a, b) => dots[b].point.time_us - dots[a].point.time_us);
  drawing.append(...order.map((i) => dotSign(dots[i], i, x, y, radius(dots[i]))));
  drawing.append(
    ...dotLabels(
      order.map((i) => dots[i]),
      area,
      x,
      y,
      radius,
    ),
  );
  return drawing;
}

type Place = (value: number) => number;

function spread(values: number[], factor: number): [number, number] {
  return [Math.min(...values) / factor, Math.max(...values) * factor];
}

function roofLines(
  area: Area,
  x: Place & { domain: () => number[] },
  y: Place & { domain: () => number[] },
  flat: { name: string; gflops: number }[],
  slanted: { name: string; gbps: number }[],
  top: number,
): Element[] {
  const [least, most] = x.domain();
  const [lowest] = y.domain();
  const found: Element[] = [];
  for (const roof of flat) {
    const from = Math.max(least, ...slanted.map((one) => roof.gflops / one.gbps).slice(0, 1));
    found.push(svg("path", { class: "roof", d: `M${x(from)} ${y(roof.gflops)}H${x(most)}` }));
    const text = `${roof.name} ${rate(roof.gflops)}`;
    const right = area.left + area.width - 4;
    found.push(
      svg("text", { x: right, y: y(roof.gflops) - 6, class: "end roof-name haloed" }, text),
    );
  }
  slanted.forEach((roof, i) => {
    const from = Math.max(least, lowest / roof.gbps);
    const to = Math.min(most, top / roof.gbps);
    if (to <= from) return;
    found.push(
      svg("path", {
        class: "roof",
        d: `M${x(from)} ${y(from * roof.gbps)}L${x(to)} ${y(to * roof.gbps)}`,
      }),
    );
    const rise = y(from * roof.gbps) - y(to * roof.gbps);
    const angle = (-Math.atan2(rise, x(to) - x(from)) * 180) / Math.PI;
    // Names of roofs that lie close together stand beside each other.
    const at = from * (to / from) ** (0.08 + 0.2 * (i % 4));
    const turn = `translate(${x(at)} ${y(at * roof.gbps) - 6}) rotate(${angle})`;
    found.push(
      svg(
        "text",
        { transform: turn, class: "roof-name haloed" },
        `${roof.name} ${figure(roof.gbps)} GB/s`,
      ),
    );
  });
  return found;
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

/** The longest few by name, where there is room for it. */
function dotLabels(
  dots: Dot[],
  area: Area,
  x: Place,
  y: Place,
  radius: (dot: Dot) => number,
): Element[] {
  const taken: [number, number, number][] = [];
  const found: Element[] = [];
  const named = new Set<string>();
  for (const dot of dots.filter((one) => !one.before)) {
    if (found.length >= 8 || named.has(dot.point.name)) continue;
    const left = x(dot.intensity) + radius(dot) + 4;
    const at = y(dot.gflops) + 4;
    const text = fitted(dot.point.name, Math.min(190, area.left + area.width - left));
    const end = left + text.length * 7;
    const free = taken.every(
      ([from, to, line]) => end < from || left > to || Math.abs(line - at) > 14,
    );
    if (text.length < 4 || !free) continue;
    taken.push([left, end, at]);
    named.add(dot.point.name);
    found.push(svg("text", { x: left, y: at, class: "dot-name haloed" }, text));
  }
  return found;
}
