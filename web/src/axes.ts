/** Axes, grids and the lines between them, for plots drawn by hand. */

import { svg } from "./dom";

export interface Area {
  left: number;
  top: number;
  width: number;
  height: number;
}

export interface Axis {
  place: (value: number) => number;
  ticks: number[];
  text: (value: number) => string;
  title: string;
}

/** Ticks closer than their texts are wide are left out. */
export function bottomAxis(area: Area, axis: Axis, least = 44): SVGGElement {
  const y = area.top + area.height;
  const group = svg("g", { class: "axis" });
  let free = -Infinity;
  for (const tick of axis.ticks) {
    const x = axis.place(tick);
    if (x < area.left - 0.5 || x > area.left + area.width + 0.5) continue;
    group.append(svg("path", { class: "grid", d: `M${x} ${area.top}V${y}` }));
    if (x < free) continue;
    free = x + least;
    group.append(svg("text", { x, y: y + 16, class: "middle" }, axis.text(tick)));
  }
  const middle = area.left + area.width / 2;
  group.append(svg("path", { class: "base", d: `M${area.left} ${y}H${area.left + area.width}` }));
  group.append(svg("text", { x: middle, y: y + 34, class: "middle title" }, axis.title));
  return group;
}

export function leftAxis(area: Area, axis: Axis, least = 15): SVGGElement {
  const group = svg("g", { class: "axis" });
  let free = Infinity;
  for (const tick of axis.ticks) {
    const y = axis.place(tick);
    if (y < area.top - 0.5 || y > area.top + area.height + 0.5) continue;
    group.append(svg("path", { class: "grid", d: `M${area.left} ${y}H${area.left + area.width}` }));
    if (y > free) continue;
    free = y - least;
    group.append(svg("text", { x: area.left - 7, y: y + 4, class: "end" }, axis.text(tick)));
  }
  group.append(svg("text", { x: 0, y: area.top - 10, class: "title" }, axis.title));
  return group;
}

/** 1, 2, 5, 10, 20 … between two numbers; only powers of ten where there are many. */
export function logTicks(low: number, high: number): number[] {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const steps = last - first > 3 ? [1] : [1, 2, 5];
  const found = [];
  for (let power = first; power <= last; power++) {
    for (const step of steps) found.push(step * 10 ** power);
  }
  return found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

/** A number on an axis: no more digits than it needs. */
export function tickText(value: number): string {
  if (Number.isInteger(value) && value < 1e4) return String(value).replace("-", "−");
  if (value >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (value >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

/** A time or a size on an axis: "2 ms", not "2.00 ms". */
export function shortened(text: string): string {
  return text.replace(/\.0+(?= )/, "").replace(/(\.\d*?)0+(?= )/, "$1");
}

export function blank(width: number, height: number, label: string): SVGSVGElement {
  return svg("svg", { width, height, role: "img", "aria-label": label });
}
