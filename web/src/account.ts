/** The parts of a time, in the order and under the names of the account. */

import type { Split } from "./page_data";

export interface Part {
  key: keyof Split;
  name: string;
  what: string;
  waste: boolean;
}

export const PARTS: Part[] = [
  { key: "arithmetic_us", name: "arithmetic", what: "FLOPs at the machine’s peak", waste: false },
  {
    key: "traffic_us",
    name: "traffic",
    what: "bytes that have to move, beyond what hides behind the arithmetic",
    waste: false,
  },
  { key: "launch_us", name: "launches", what: "starting ops that do work", waste: true },
  {
    key: "round_trip_us",
    name: "round trips",
    what: "bytes that one op writes and another reads back",
    waste: true,
  },
  { key: "host_us", name: "host", what: "Python, dispatcher, autograd, views", waste: true },
  { key: "slow_us", name: "slow kernels", what: "above what their roofline allows", waste: true },
  { key: "unexplained_us", name: "unexplained", what: "what is left", waste: false },
];

export function totalOf(split: Split): number {
  return PARTS.reduce((sum, part) => sum + (split[part.key] ?? 0), 0);
}

/** Without a negative part: if they add up to more than the step, each is scaled down. */
export function netted(split: Split): number[] {
  const parts = PARTS.map((part) => split[part.key] ?? 0);
  const rest = parts[parts.length - 1];
  const total = totalOf(split);
  if (rest >= 0 || total <= 0) return parts.map((part) => Math.max(0, part));
  const left = total / (total - rest);
  return parts.map((part, i) => (i === parts.length - 1 ? 0 : part * left));
}

/** The largest waste of a time: its name and its length. */
export function largestWaste(split: Split): [string, number] | null {
  let found: [string, number] | null = null;
  for (const part of PARTS) {
    const us = split[part.key] ?? 0;
    if (part.waste && us > 0 && (found === null || us > found[1])) found = [part.name, us];
  }
  return found;
}
