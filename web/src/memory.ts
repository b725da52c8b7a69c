/** Memory over the step, and what is alive where it peaks. */

import { max, maxIndex, min } from "d3-array";
import { scaleLinear } from "d3-scale";
import { curveStepAfter, line } from "d3-shape";

import { blank, bottomAxis, leftAxis, shortened, type Area } from "./axes";
import { drawnToFit, html, svg, type Child } from "./dom";
import { bytes, capital, counted, count, duration } from "./number_text";
import type { MemoryView, Page } from "./page_data";
import { figureOf, scrollingTable, type Section, type Table } from "./plot";

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
    if (course.memory.at_peak.length > 0) content.push(...aliveTable(course));
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
  for (const course of courses) drawing.append(...courseLines(course, x, y, area));
  return drawing;
}

function courseLines(
  course: Course,
  x: (value: number) => number,
  y: (value: number) => number,
  area: Area,
): Element[] {
  const { memory } = course;
  const shape = line<number>(
    (_, i) => x(memory.at_us[i]),
    (value) => y(value),
  ).curve(curveStepAfter);
  const side = course.before ? "before" : "after";
  const peak = maxIndex(memory.bytes);
  const at = x(memory.at_us[peak]);
  const top = y(memory.bytes[peak]);
  const right = at > area.left + area.width * 0.7;
  const text = `${course.name ? `${course.name}: ` : ""}peak ${bytes(memory.peak_bytes)}`;
  return [
    svg("path", { class: `course ${side}`, d: shape(memory.bytes) ?? "" }),
    svg("circle", { class: `peak ${side}`, cx: at, cy: top, r: 4.5 }),
    svg(
      "text",
      {
        x: right ? at - 9 : at + 9,
        y: top - 6,
        class: right ? "end strong haloed" : "strong haloed",
      },
      text,
    ),
  ];
}

function aliveTable(course: Course): Child[] {
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
  return [html("h3", {}, title), scrollingTable(title, table)];
}
