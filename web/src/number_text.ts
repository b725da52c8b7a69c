/** Figures for people, in the words of torchweld's command line. */

import { isMissing, type Interval, type Measured, type NotMeasured } from "./page_data";

const MINUS = "−";

/** Three significant digits: 0.98, 3.20, 12.3, 2749. */
export function figure(value: number): string {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const digits = size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return value.toFixed(digits).replace("-", MINUS);
}

export function duration(us: number): string {
  if (us === 0) return "0 µs";
  const size = Math.abs(us);
  if (size >= 0.9995e6) return `${figure(us / 1e6)} s`;
  if (size >= 0.9995e3) return `${figure(us / 1e3)} ms`;
  return `${figure(us)} µs`;
}

export function bytes(count: number): string {
  const units: [string, number][] = [
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
  ];
  for (const [unit, factor] of units) {
    if (Math.abs(count) >= 0.9995 * factor) return `${figure(count / factor)} ${unit}`;
  }
  return `${count.toFixed(0)} B`.replace("-", MINUS);
}

export function flops(value: number): string {
  const units: [string, number][] = [
    ["TFLOP", 1e12],
    ["GFLOP", 1e9],
    ["MFLOP", 1e6],
    ["kFLOP", 1e3],
  ];
  for (const [unit, factor] of units) {
    if (value >= 0.9995 * factor) return `${figure(value / factor)} ${unit}`;
  }
  return `${value} FLOP`;
}

/** `24 %`, `0.4 %`; a dash if the whole is 0. */
export function share(part: number, whole: number): string {
  const percent = (100 * part) / whole;
  if (!Number.isFinite(percent)) return "–";
  if (percent === 0) return "0 %";
  if (Math.abs(percent) < 0.1) return percent > 0 ? "<0.1 %" : `${MINUS}0.1 %`;
  return `${percent.toFixed(Math.abs(percent) >= 9.95 ? 0 : 1).replace("-", MINUS)} %`;
}

/** A change in per cent, with its sign. */
export function change(before: number, after: number): string {
  if (before <= 0) return after > 0 ? "new" : "–";
  const text = share(after - before, before);
  return text.startsWith(MINUS) || text === "0 %" ? text : `+${text}`;
}

export function count(value: number): string {
  return value.toLocaleString("en-US", { maximumFractionDigits: 1 });
}

/** "1 row", "2 rows". */
export function counted(value: number, what: string): string {
  return `${count(value)} ${what}${value === 1 ? "" : "s"}`;
}

export function ratio(value: Measured | NotMeasured | null | undefined): string {
  return measured(value, (number) => `${figure(number)}×`);
}

export function interval(value: Interval | null | undefined): string {
  if (value === null || value === undefined) return "";
  const [low, high] = value.map((one) => measured(one, figure));
  return `${low} to ${high}`;
}

/** Scientific where that is shorter: 1.1e-6. */
export function small(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 0.01 && size < 10000 ? figure(value) : value.toExponential(1).replace("-", MINUS);
}

const ODD = { nan: "not a number", inf: "∞", "-inf": "−∞" };

/** A figure in words; "not measured" where there is none, never a 0. */
export function measured(
  value: Measured | NotMeasured | null | undefined,
  format: (value: number) => string,
): string {
  if (value === null || value === undefined) return "–";
  if (isMissing(value)) return "not measured";
  return typeof value === "number" ? format(value) : ODD[value];
}

/** Why there is no figure; "" if there is one. */
export function reason(value: unknown): string {
  return isMissing(value) ? value.not_measured : "";
}

/** With no line break between a figure and its unit, or inside an interval. */
export function unbroken(text: string): string {
  const whole = text.replaceAll(/(\d)–(?=\d)/g, "$1\u2060–\u2060");
  return whole.replaceAll(
    /(\d) (?=(?:%|[µmn]?s|[kMGT]?B|[kMGT]?FLOPs?|[kMGT]?FLOP\/s|GB\/s)(?![\p{L}\d]))/gu,
    "$1\u00a0",
  );
}

const LONGEST_WORD = 60;

/** With the middle of overlong names left out, such as paths of modules nested very deeply. */
export function clipped(text: string): string {
  const half = LONGEST_WORD / 2 - 1;
  return text.replaceAll(/\S+/gu, (word) =>
    word.length <= LONGEST_WORD ? word : `${word.slice(0, half)}…${word.slice(-half)}`,
  );
}

const LONGEST_TEXT = 400;

/** Of names together: with the middle of the whole left out too, as kernels' names have blanks. */
export function brief(text: string): string {
  const short = clipped(text);
  const half = LONGEST_TEXT / 2 - 1;
  return short.length <= LONGEST_TEXT ? short : `${short.slice(0, half)}…${short.slice(-half)}`;
}

/** Several remarks as one text: each begins with a capital and ends with a full stop. */
export function sentences(remarks: string[]): string {
  const ended = remarks
    .filter((one) => one !== "")
    .map((one) => `${capital(one)}${/[.!?…]$/.test(one) ? "" : "."}`);
  return unbroken(ended.join(" "));
}

export function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export function rate(gflops: number): string {
  return gflops >= 999.5 ? `${figure(gflops / 1e3)} TFLOP/s` : `${figure(gflops)} GFLOP/s`;
}
