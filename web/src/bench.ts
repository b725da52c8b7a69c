/** Benches: who is fastest where, and speed by the number of rows. */

import { scaleLog } from "d3-scale";
import { area as bandShape, line } from "d3-shape";

import { blank, bottomAxis, tickText, type Area } from "./axes";
import { drawnToFit, html, offstage, svg, type Child } from "./dom";
import { legendOf } from "./flame_section";
import { fitted } from "./flame_view";
import { count, counted, duration, interval, ratio, reason, sentences } from "./number_text";
import {
  finite,
  type CrossoverMap,
  type CurvePlot,
  type LaunchedRow,
  type MapCell,
  type Page,
} from "./page_data";
import {
  exact,
  exactInterval,
  exactRatio,
  figureOf,
  titledTable,
  type Section,
  type Table,
} from "./plot";
import { ends, speedFrame, speedScale } from "./speed_plot";
import { withTooltips } from "./tooltip";

export function benchSection(page: Page): Section | null {
  const maps = page.maps ?? [];
  const curves = (page.curves ?? []).filter((plot) =>
    plot.curves.some((one) => one.points.length > 0),
  );
  const launched = page.launched ?? [];
  if (maps.length + curves.length + launched.length === 0) return null;
  const content: Child[] = maps.map((map, i) => crossover(map, i));
  if (curves.length > 0) {
    content.push(html("div", { class: "small-plots" }, ...curves.map(curvesOf)));
  }
  if (launched.length > 0) content.push(...launchesOf(launched));
  return { id: "bench", title: "Speed by shape", short: "Bench", content };
}

/** Steps of a heat cell: below 1 loses, above 1 wins. */
function heatClass(cell: MapCell | undefined): string {
  const speed = finite(cell?.speedup);
  if (speed === null) return "heat-none";
  const limits = [0.8, 0.95, 1.05, 1.25, 1.6];
  return `heat-${limits.filter((limit) => speed > limit).length}`;
}

function crossover(map: CrossoverMap, number: number): HTMLElement {
  const cells = new Map(map.cells.map((cell) => [`${cell.row} ${cell.column}`, cell]));
  const head = map.columns.map((name) => html("th", { scope: "col" }, name));
  const rows = map.rows.map((name, r) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, name),
      ...map.columns.map((_, c) => heatCell(cells.get(`${r} ${c}`))),
    ),
  );
  const table = html(
    "table",
    { class: "heat" },
    html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "block \\ rows"), ...head)),
    html("tbody", {}, ...rows),
  );
  const title = `Who is fastest: ${map.title}`;
  const region = { class: "scroll", role: "region", "aria-label": `${title}, map`, tabindex: 0 };
  return figureOf({
    id: `bench-map-${number}`,
    title,
    unit: "the fastest, and ours over the best other",
    body: [html("div", region, table)],
    table: () => mapTable(map),
    drawing: () => drawMap(map),
  });
}

function heatCell(cell: MapCell | undefined): HTMLElement {
  if (cell === undefined) return html("td", { class: "heat-none" }, "–");
  return html(
    "td",
    { class: heatClass(cell), title: reason(cell.speedup) },
    html("strong", {}, ratio(cell.speedup)),
    cell.best !== "" && html("span", {}, cell.best),
  );
}

/** The map as a drawing, for slides; the page itself has it as a table. */
function drawMap(map: CrossoverMap): SVGSVGElement {
  const [left, cell, height] = [230, 104, 42];
  const width = left + map.columns.length * cell;
  const drawing = blank(width, (map.rows.length + 1) * height, map.title);
  const text = (x: number, y: number, words: string, style = "middle") =>
    svg("text", { x, y, class: style }, words);
  map.columns.forEach((name, c) =>
    drawing.append(text(left + (c + 0.5) * cell, 26, name, "middle muted")),
  );
  map.rows.forEach((name, r) =>
    drawing.append(text(0, (r + 1) * height + 25, fitted(name, left - 10), "strong")),
  );
  for (const one of map.cells) {
    const x = left + one.column * cell;
    const y = (one.row + 1) * height;
    const middle = x + cell / 2;
    drawing.append(
      svg("rect", { x, y, width: cell - 1, height: height - 1, class: heatClass(one) }),
      text(middle, y + 18, ratio(one.speedup), "middle strong"),
      text(middle, y + 33, one.best),
    );
  }
  return offstage(drawing);
}

function mapTable(map: CrossoverMap): Table {
  return {
    columns: ["block", "rows", "fastest", "ours over the best other", "why not"].map((name) => ({
      name,
    })),
    rows: map.cells.map((cell) => [
      map.rows[cell.row],
      map.columns[cell.column],
      cell.best,
      exactRatio(cell.speedup),
      reason(cell.speedup),
    ]),
  };
}

function curvesOf(plot: CurvePlot, number: number): HTMLElement {
  const holder = html("div", { class: "drawing" });
  drawnToFit(holder, (width) => draw(plot, width));
  withTooltips(holder, (target) => {
    const at = target.closest("[data-point]")?.getAttribute("data-point")?.split(" ");
    if (at === undefined) return null;
    const curve = plot.curves[Number(at[0])];
    const point = curve.points[Number(at[1])];
    return [
      `${curve.name}, ${counted(point.x, "row")}`,
      ratio(point.speedup),
      interval(point.interval),
      point.verdict,
    ];
  });
  const table = (): Table => ({
    columns: [
      { name: "way" },
      { name: "rows", show: count },
      { name: "speed" },
      { name: "interval" },
      { name: "verdict" },
      { name: "why not" },
    ],
    rows: plot.curves.flatMap((curve) =>
      curve.points.map((point) => [
        curve.name,
        point.x,
        exactRatio(point.speedup),
        exactInterval(point.interval),
        point.verdict,
        reason(point.speedup),
      ]),
    ),
  });
  const names = plot.curves.map((curve, i): [string, string] => [`curve-${i % 5}`, curve.name]);
  const known = plot.curves.some((curve) =>
    curve.points.some((one) => finite(one.speedup) !== null),
  );
  return figureOf({
    id: `bench-curves-${number}`,
    title: plot.title,
    unit: plot.source === "plan" ? "measured for the plan" : "bench",
    body: known ? [holder, legendOf(names)] : [html("p", { class: "note" }, whyEmpty(plot))],
    table,
    printed: 24,
    ...(known && { drawing: () => holder.querySelector("svg") }),
  });
}

function whyEmpty(plot: CurvePlot): string {
  const all = plot.curves.flatMap((curve) => curve.points.map((point) => reason(point.speedup)));
  const reasons = [...new Set(all)].filter((one) => one !== "");
  return sentences([`not measured${reasons.length > 0 ? `: ${reasons.join("; ")}` : ""}`]);
}

function draw(plot: CurvePlot, width: number): SVGSVGElement {
  const height = 250;
  const points = plot.curves.flatMap((curve) => curve.points);
  const rows = [...new Set(points.map((point) => point.x))].sort((a, b) => a - b);
  const right = width > 420 && rows.length > 1 ? 92 : 14;
  const area: Area = { left: 46, top: 28, width: width - 46 - right, height: height - 28 - 42 };
  // With one number of rows, the ways stand side by side instead.
  const single = rows.length === 1;
  const last = Math.max(rows[0] * 1.01, rows[rows.length - 1]);
  const byRows = scaleLog(
    [Math.max(1, rows[0]), last],
    [area.left + 8, area.left + area.width - 8],
  );
  const step = area.width / plot.curves.length;
  const place = (curve: number, x: number) =>
    single ? area.left + (curve + 0.5) * step : byRows(Math.max(1, x));
  const y = speedScale(points, area);
  const names = plot.curves.map((curve) => curve.name).join(", ");
  const drawing = blank(width, height, `Speed of ${names} by rows; the table has the numbers`);
  drawing.append(
    single
      ? bottomAxis(area, {
          place: (i) => place(i, 0),
          ticks: plot.curves.map((_, i) => i),
          text: (i) => fitted(plot.curves[i].name, step - 8),
          title: counted(rows[0], "row"),
        })
      : bottomAxis(area, { place: byRows, ticks: rows, text: tickText, title: "rows" }, 34),
    ...speedFrame(area, y),
    ...plot.curves.flatMap((_, i) => curveLines(plot, i, (rows) => place(i, rows), y)),
    ...(single ? unmeasuredNames(plot, (i) => place(i, 0), area) : []),
    ...(right > 14 ? curveNames(plot, area.left + area.width + 2, right, y) : []),
  );
  return drawing;
}

/** Where a way has no speed, what was found instead, such as "behind" or "not measured". */
function unmeasuredNames(plot: CurvePlot, x: (curve: number) => number, area: Area): Element[] {
  return plot.curves.flatMap((curve, i) => {
    const [point] = curve.points;
    if (point === undefined || finite(point.speedup) !== null) return [];
    const words = fitted(point.verdict, area.width / plot.curves.length - 6);
    const place = { x: x(i), y: area.top + area.height / 2 };
    return [svg("text", { ...place, class: "middle muted", "data-point": `${i} 0` }, words)];
  });
}

function curveLines(
  plot: CurvePlot,
  number: number,
  x: (value: number) => number,
  y: (value: number) => number,
): Element[] {
  const { points } = plot.curves[number];
  type Point = (typeof points)[number];
  const style = `curve-${number % 5}`;
  const high = (point: Point, end: 0 | 1) => y((ends(point.interval) ?? [0, 0])[end]);
  const band = bandShape<Point>()
    .defined((point) => finite(point.speedup) !== null && ends(point.interval) !== null)
    .x((point) => x(point.x))
    .y0((point) => high(point, 0))
    .y1((point) => high(point, 1));
  const course = line<Point>()
    .defined((point) => finite(point.speedup) !== null)
    .x((point) => x(point.x))
    .y((point) => y(finite(point.speedup) ?? 0));
  const dots = points.flatMap((point, i) => {
    const speed = finite(point.speedup);
    if (speed === null) return [];
    const place = { cx: x(point.x), cy: y(speed), r: 3.4 };
    return [svg("circle", { ...place, class: `mark ${style}`, "data-point": `${number} ${i}` })];
  });
  const whiskers = points.flatMap((point) => {
    const limits = finite(point.speedup) === null ? null : ends(point.interval);
    if (limits === null) return [];
    const d = `M${x(point.x)} ${y(limits[0])}V${y(limits[1])}`;
    return [svg("path", { class: `whisker ${style}`, d })];
  });
  return [
    svg("path", { class: `interval ${style}`, d: band(points) ?? "" }),
    svg("path", { class: `course ${style}${DASHES[number % 3]}`, d: course(points) ?? "" }),
    ...whiskers,
    ...dots,
  ];
}

/** Names at the ends of the curves, pushed apart where they would touch. */
function curveNames(
  plot: CurvePlot,
  x: number,
  room: number,
  y: (value: number) => number,
): Element[] {
  const ends = plot.curves.flatMap((curve, i) => {
    const last = curve.points
      .map((point) => finite(point.speedup))
      .filter((one) => one !== null)
      .at(-1);
    return last === undefined ? [] : [{ name: curve.name, i, y: y(last) + 4 }];
  });
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => {
    if (i > 0) end.y = Math.max(end.y, ends[i - 1].y + 14);
  });
  return ends.map((end) =>
    svg("text", { x, y: end.y, class: `curve-name curve-${end.i % 5}` }, fitted(end.name, room)),
  );
}

/** Lines differ in their dashes as well. */
const DASHES = ["", " dashed", " dotted"];

/** What a call of each side launches on a GPU. */
function launchesOf(launched: LaunchedRow[]): Child[] {
  const differ = launched.filter((row) => row.verdict === "differs").length;
  const unseen = launched.map((row) => reason(row.kernels)).filter((why) => why !== "");
  const note = sentences([
    differ > 0 ? `${counted(differ, "side")} did not launch what was expected` : "",
    ...new Set(unseen),
  ]);
  return [
    titledTable("bench-launches", "What a call launches", launchTable(launched), note),
    titledTable("bench-kernels", "Kernels of a call", kernelTable(launched)),
  ];
}

function launchTable(launched: LaunchedRow[]): Table {
  const time = (name: string) => ({ name, show: duration });
  return {
    columns: [
      { name: "cell" },
      { name: "side", brief: true },
      { name: "kernels" },
      time("kernel time"),
      time("host"),
      time("launches"),
      time("call"),
      { name: "expected", brief: true },
    ],
    rows: launched.map((row) => [
      row.cell,
      row.side,
      row.kinds || "not measured",
      ...[row.kernel_us, row.host_us, row.launch_us, row.call_us].map((us) => exact(us, duration)),
      { "as expected": "yes", differs: "no", "not measured": "not measured", "": "" }[row.verdict],
    ]),
  };
}

function kernelTable(launched: LaunchedRow[]): Table {
  return {
    columns: [
      { name: "cell" },
      { name: "side" },
      { name: "kernel" },
      { name: "kind" },
      { name: "count", show: count },
      { name: "time", show: duration },
    ],
    rows: launched.flatMap(({ cell, side, rows }) =>
      (rows ?? []).map((one) => [cell, side, one.name, one.category, one.count, one.us]),
    ),
  };
}
