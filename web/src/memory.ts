/** Memory over the step, and what is alive where it peaks. */

import { max, maxIndex, min } from "d3-array";
import { scaleLinear } from "d3-scale";
import { curveStepAfter, line } from "d3-shape";

import { blank, bottomAxis, leftAxis, shortened, type Area } from "./axes";
import { drawnToFit, html, svg, type Child } from "./dom";
import { textWidth } from "./flame_view";
import { LabelRoom, textBox } from "./label_room";
import { bytes, capital, counted, count, duration } from "./number_text";
import type { MemoryView, Page } from "./page_data";
import { figureOf, titledTable, type Section, type Table } from "./plot";

/** As wide as letters of this size: names are bold. */
const BOLD = 14;

interface Course {
  name: string;
  memory: MemoryView;
  before: boolean;
}

export function memorySection(page: Page): Section | null {
  const sides = page.sides ?? [];
  const courses = sides.flatMap((side, i): Course[] =>
    side.memory
      ? [{ name: side.name, memory: side.memory, before: sides.length > 1 && i === 0 }]
      : [],
  );
  if (courses.length === 0) return null;
  const content: Child[] = [html("p", { class: "lead" }, ...courses.map(inWords))];
  const drawn = courses.filter((course) => course.memory.at_us.length > 1);
  if (drawn.length > 0) content.push(coursePlot(drawn));
  for (const course of courses) {
    if (course.memory.at_peak.length > 0) content.push(aliveTable(course));
  }
  return { id: "memory", title: "Memory", short: "Memory", content };
}

function inWords(course: Course): string {
  const { memory } = course;
  const name = course.name ? `${capital(course.name)}: ` : "";
  return (
    `${name}${bytes(memory.peak_bytes)} at the peak, ` +
    `${counted(memory.allocations, "allocation")} of ${bytes(memory.allocated_bytes)} in all. `
  );
}

function coursePlot(courses: Course[]): HTMLElement {
  const holder = html("div", { class: "drawing" });
  drawnToFit(holder, (width) => draw(courses, width));
  const table = (): Table => ({
    columns: [
      { name: "side" },
      { name: "from, µs", show: duration },
      { name: "bytes", show: bytes },
    ],
    rows: courses.flatMap(({ name, memory }) =>
      memory.at_us.map((at, i) => [name, at, memory.bytes[i]]),
    ),
  });
  return figureOf({
    id: "memory-plot",
    title: "Memory of tensors over the step",
    unit: "above what was there when it began",
    body: [holder],
    table,
    drawing: () => holder.querySelector("svg"),
  });
}

function draw(courses: Course[], width: number): SVGSVGElement {
  const height = 260;
  const area: Area = { left: 64, top: 26, width: width - 64 - 14, height: height - 26 - 44 };
  const end = max(courses, (course) => max(course.memory.at_us)) ?? 1;
  const all = courses.flatMap((course) => [course.memory.peak_bytes, ...course.memory.bytes]);
  const x = scaleLinear([0, end], [area.left, area.left + area.width]);
  const low = Math.min(0, min(all) ?? 0);
  const y = scaleLinear([low, (max(all) ?? 1) * 1.12], [area.top + area.height, area.top]);
  const drawing = blank(width, height, `Memory over the step. ${courses.map(inWords).join(" ")}`);
  drawing.append(
    bottomAxis(
      area,
      {
        place: x,
        ticks: x.ticks(8),
        text: (us) => shortened(duration(us)),
        title: "time in the step",
      },
      70,
    ),
    leftAxis(area, {
      place: y,
      ticks: y.ticks(5),
      text: (size) => shortened(bytes(size)),
      title: "bytes",
    }),
  );
  const room = new LabelRoom({ left: area.left, top: 0, right: width, bottom: height });
  for (const course of courses) {
    const [at, top] = peakOf(course, x, y);
    room.take({ left: at - 6, top: top - 6, right: at + 6, bottom: top + 6 });
    drawing.append(...courseLines(course, x, y));
  }
  for (const course of courses) drawing.append(...peakMark(course, x, y, room));
  return drawing;
}

type Place = (value: number) => number;

function courseLines({ memory, before }: Course, x: Place, y: Place): Element[] {
  const shape = line<number>(
    (_, i) => x(memory.at_us[i]),
    (value) => y(value),
  ).curve(curveStepAfter);
  const side = before ? "before" : "after";
  return [svg("path", { class: `course ${side}`, d: shape(memory.bytes) ?? "" })];
}

function peakOf({ memory }: Course, x: Place, y: Place): [number, number] {
  const peak = maxIndex(memory.bytes);
  return [x(memory.at_us[peak]), y(memory.bytes[peak])];
}

/** The peak and its height, beside it where that is free. */
function peakMark(course: Course, x: Place, y: Place, room: LabelRoom): Element[] {
  const { memory, before, name } = course;
  const [at, top] = peakOf(course, x, y);
  const text = `${name ? `${name}: ` : ""}peak ${bytes(memory.peak_bytes)}`;
  const width = textWidth(text, BOLD);
  const spots = [-6, -20, 18, 32].flatMap((down) =>
    [at + 9, at - 9 - width].map((left) => ({
      left,
      base: top + down,
      boxes: [textBox(left, top + down, width, BOLD)],
    })),
  );
  const spot = room.first(spots);
  const mark = svg("circle", {
    class: `peak ${before ? "before" : "after"}`,
    cx: at,
    cy: top,
    r: 4.5,
  });
  if (spot === undefined) return [mark];
  return [mark, svg("text", { x: spot.left, y: spot.base, class: "strong haloed" }, text)];
}

function aliveTable(course: Course): HTMLElement {
  const title = `Alive at the peak${course.name ? `, ${course.name}` : ""}`;
  const table: Table = {
    columns: [
      { name: "module" },
      { name: "op" },
      { name: "phase" },
      { name: "tensors", show: count },
      { name: "bytes", show: bytes },
    ],
    rows: course.memory.at_peak.map((one) => [
      one.module || "the model",
      one.op,
      one.phase,
      one.count,
      one.bytes,
    ]),
  };
  return titledTable(`memory-alive${course.before ? "-before" : ""}`, title, table);
}
