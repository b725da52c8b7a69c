/** Speeds with their intervals: the frame that curves and history share, with a line at 1. */

import { scaleLinear } from "d3-scale";

import { leftAxis, type Area } from "./axes";
import { svg } from "./dom";
import { finite, type Interval, type Measured, type NotMeasured } from "./page_data";

export interface Speed {
  speedup: Measured | NotMeasured;
  interval: Interval | null;
}

/** Both ends of an interval; null where one is no number. */
export function ends(interval: Interval | null): [number, number] | null {
  if (interval === null) return null;
  const [low, high] = interval.map(finite);
  return low === null || high === null ? null : [low, high];
}

/** A scale that has all speeds, their intervals and 1 in it. */
export function speedScale(speeds: Speed[], area: Area) {
  const all = speeds.flatMap((one) => [finite(one.speedup), ...(ends(one.interval) ?? [])]);
  const known = [1, ...all.filter((value) => value !== null)];
  const low = Math.min(...known);
  const high = Math.max(...known);
  const room = Math.max(0.05, (high - low) * 0.08);
  return scaleLinear([Math.max(0, low - room), high + room], [area.top + area.height, area.top]);
}

export function speedFrame(area: Area, y: ReturnType<typeof speedScale>): Element[] {
  const text = (value: number) => `${Number(value.toFixed(2))}×`;
  const d = `M${area.left} ${y(1)}H${area.left + area.width}`;
  return [
    leftAxis(area, { place: y, ticks: y.ticks(5), text, title: "speed over eager" }),
    svg("path", { class: "one", d }),
  ];
}
