/** What was measured again and again: speed with its interval over the runs, and the gate's word. */

import { scalePoint } from "d3-scale";

import { blank, bottomAxis, type Area } from "./axes";
import { drawnToFit, html, svg } from "./dom";
import { interval, ratio, reason } from "./number_text";
import { finite, type HistoryPlot, type HistoryPoint, type Page } from "./page_data";
import { exactInterval, exactRatio, figureOf, type Section, type Table } from "./plot";
import { ends, speedFrame, speedScale } from "./speed_plot";
import { withTooltips } from "./tooltip";

/** The verdict of a baseline, as history_view.py says it. */
const ACCEPTED = "accepted";
/** That of a gate which could not tell, as gate_text.py says it. */
const UNMEASURED = "not measured";

export function historySection(page: Page): Section | null {
  const plots = (page.history ?? []).filter((plot) => plot.points.length > 0);
  if (plots.length === 0) return null;
  return { id: "history", title: "History", short: "History", content: plots.map(historyOf) };
}

function historyOf(plot: HistoryPlot, number: number): HTMLElement {
  const holder = html("div", { class: "drawing" });
  drawnToFit(holder, (width) => draw(plot, width));
  withTooltips(holder, (target) => {
    const at = target.closest("[data-point]")?.getAttribute("data-point");
    return at === null || at === undefined ? null : lines(plot.points[Number(at)]);
  });
  const table = (): Table => ({
    columns: [
      "run",
      "name",
      "kind",
      "created",
      "commit",
      "speed",
      "interval",
      "verdict",
      "why not",
    ].map((name) => ({ name })),
    rows: plot.points.map((point) => [
      point.run,
      point.name,
      point.kind,
      point.created,
      point.commit,
      exactRatio(point.speedup),
      exactInterval(point.interval),
      point.verdict,
      reason(point.speedup),
    ]),
  });
  const gated = plot.points.some((point) => point.verdict !== "");
  return figureOf({
    id: `history-${number}`,
    title: plot.title,
    unit: "speed over eager, with its interval",
    body: [holder, gated && gateLegend()],
    table,
    printed: 40,
    drawing: () => holder.querySelector("svg"),
  });
}

function gateLegend(): HTMLElement {
  const entry = (sign: string, style: string, text: string) =>
    html("li", {}, html("span", { class: `sign ${style}`, "aria-hidden": "true" }, sign), text);
  return html(
    "ul",
    { class: "legend" },
    entry("●", "", "measured"),
    entry("◆", "good", "baseline accepted"),
    entry("▲", "good", "gate passed"),
    entry("✕", "bad", "gate did not pass"),
    entry("◌", "", "not measured"),
  );
}

function lines(point: HistoryPoint): string[] {
  const limits = interval(point.interval);
  return [
    `Run ${point.run}: ${point.kind}${point.verdict ? `, ${point.verdict}` : ""}`,
    `${ratio(point.speedup)}${limits ? ` (${limits})` : ""}`,
    reason(point.speedup),
    [point.created.slice(0, 16).replace("T", " "), point.commit]
      .filter((one) => one !== "")
      .join(", "),
  ];
}

function draw(plot: HistoryPlot, width: number): SVGSVGElement {
  const height = 270;
  const area: Area = { left: 46, top: 28, width: width - 46 - 10, height: height - 28 - 42 };
  const { points } = plot;
  const x = scalePoint(
    points.map((_, i) => i),
    [area.left, area.left + area.width],
  ).padding(0.6);
  const place = (i: number) => x(i) ?? area.left;
  const y = speedScale(points, area);
  const drawing = blank(
    width,
    height,
    `Speed over ${points.length} runs; the table has the numbers`,
  );
  const ticks = points.map((_, i) => i);
  const text = (i: number) => `#${points[i].run}`;
  drawing.append(
    bottomAxis(area, { place, ticks, text, title: "kept runs, oldest first" }, 34),
    ...speedFrame(area, y),
  );
  const known = points.flatMap((point, i) => {
    const speed = finite(point.speedup);
    return speed === null ? [] : [`${place(i)} ${y(speed)}`];
  });
  if (known.length > 1) drawing.append(svg("path", { class: "trend", d: `M${known.join("L")}` }));
  points.forEach((point, i) => drawing.append(mark(point, i, place(i), y, area)));
  return drawing;
}

function mark(
  point: HistoryPoint,
  i: number,
  x: number,
  y: (value: number) => number,
  area: Area,
): SVGGElement {
  const group = svg("g", { class: "run", "data-point": i });
  const bottom = area.top + area.height;
  group.append(
    svg("rect", { x: x - 9, y: area.top, width: 18, height: area.height, class: "hit" }),
  );
  const speed = finite(point.speedup);
  if (speed === null) {
    group.append(svg("circle", { cx: x, cy: bottom, r: 4.5, class: "unmeasured" }));
    return group;
  }
  if (point.verdict === UNMEASURED) {
    group.append(svg("circle", { cx: x, cy: y(speed), r: 4.5, class: "unmeasured" }));
    return group;
  }
  const limits = ends(point.interval);
  if (limits !== null) {
    group.append(svg("path", { class: "whisker", d: `M${x} ${y(limits[0])}V${y(limits[1])}` }));
  }
  const at = y(speed);
  if (point.verdict === "")
    group.append(svg("circle", { cx: x, cy: at, r: 4, class: "mark curve-0" }));
  else if (point.verdict.startsWith("pass")) {
    group.append(
      svg("path", {
        class: "gate good",
        d: `M${x - 6} ${at + 5}L${x} ${at - 6}L${x + 6} ${at + 5}Z`,
      }),
    );
  } else if (point.verdict === ACCEPTED) {
    const d = `M${x} ${at - 6.5}L${x + 6.5} ${at}L${x} ${at + 6.5}L${x - 6.5} ${at}Z`;
    group.append(svg("path", { class: "gate good", d }));
  } else {
    const d = `M${x - 5} ${at - 5}L${x + 5} ${at + 5}M${x - 5} ${at + 5}L${x + 5} ${at - 5}`;
    group.append(svg("path", { class: "gate bad", d }));
    group.append(svg("text", { x, y: at + 21, class: "middle bad" }, point.verdict));
  }
  return group;
}
