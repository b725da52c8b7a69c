/** Raw samples: every round of a comparison as a dot, the interval, and the same against itself. */

import { scaleLinear } from "d3-scale";

import { blank, bottomAxis, tickText, type Area } from "./axes";
import { drawnToFit, html, svg } from "./dom";
import { fitted, textWidth } from "./flame_view";
import { figure, interval, ratio, reason } from "./number_text";
import { finite, type Page, type Strip } from "./page_data";
import { exact, exactInterval, exactRatio, figureOf, type Section, type Table } from "./plot";
import { ends } from "./speed_plot";
import { withTooltips } from "./tooltip";

const ROW = 74;
const SPREAD = 9;
/** As wide as letters of this size: names are bold. */
const BOLD = 13;
const MOST_DRAWN = 40;

export function samplesSection(page: Page): Section | null {
  const strips = page.strips ?? [];
  if (strips.length === 0) return null;
  const drawn = strips.slice(0, MOST_DRAWN);
  const holder = html("div", { class: "drawing" });
  drawnToFit(holder, (width) => draw(drawn, width));
  withTooltips(holder, (target) => {
    const at = target.closest("[data-strip]")?.getAttribute("data-strip");
    return at === null || at === undefined ? null : lines(drawn[Number(at)]);
  });
  const plot = figureOf({
    id: "samples-plot",
    title: "Time before over time after, round by round",
    unit: "right of 1: faster",
    body: [holder, legend()],
    table: () => tableOfSamples(strips),
    drawing: () => holder.querySelector("svg"),
    note:
      drawn.length < strips.length ? `The first ${drawn.length} of ${strips.length}.` : undefined,
  });
  return { id: "samples", title: "Samples", short: "Samples", content: [plot] };
}

function legend(): HTMLElement {
  const entry = (sign: string, style: string, text: string) =>
    html("li", {}, html("span", { class: `sign ${style}`, "aria-hidden": "true" }, sign), text);
  return html(
    "ul",
    { class: "legend" },
    entry("●", "after", "a round"),
    entry("○", "muted", "the same code against itself"),
    entry("├┤", "", "interval"),
  );
}

function lines(strip: Strip): string[] {
  const limits = interval(strip.interval);
  return [
    strip.name,
    `${inShort(strip)}${limits ? `, ${limits}` : ""}`,
    reason(strip.speedup),
    `${strip.ratios.length} rounds, ${strip.control.length} against itself`,
  ];
}

function tableOfSamples(strips: Strip[]): Table {
  return {
    columns: ["comparison", "speed", "interval", "verdict", "what", "ratio"].map((name) => ({
      name,
    })),
    rows: strips.flatMap((strip) => {
      const figures = [exactRatio(strip.speedup), exactInterval(strip.interval)];
      const head = [strip.name, ...figures, strip.verdict];
      const of = (what: string, values: Strip["ratios"]) =>
        values.map((value) => [...head, what, exact(value, figure)]);
      return [...of("round", strip.ratios), ...of("itself", strip.control)];
    }),
  };
}

function draw(strips: Strip[], width: number): SVGSVGElement {
  const narrow = width < 620;
  const longest = Math.max(...strips.map((strip) => textWidth(strip.name, BOLD)));
  const left = narrow ? 8 : Math.min(longest + 16, width * 0.36);
  const height = strips.length * ROW + 46;
  const area: Area = { left, top: 4, width: width - left - 14, height: height - 46 };
  const all = strips.flatMap((strip) =>
    [...strip.ratios, ...strip.control, ...(strip.interval ?? [])].map(finite),
  );
  const known = [1, ...all.filter((value) => value !== null)];
  const room = (Math.max(...known) - Math.min(...known)) * 0.04 + 0.01;
  const x = scaleLinear(
    [Math.min(...known) - room, Math.max(...known) + room],
    [area.left, area.left + area.width],
  );
  const drawing = blank(width, height, "Raw ratios of each comparison; the table has the numbers");
  drawing.append(
    bottomAxis(area, {
      place: x,
      ticks: x.ticks(8),
      text: (value) => `${tickText(value)}×`,
      title: "time before over time after",
    }),
    svg("path", { class: "one", d: `M${x(1)} ${area.top}V${area.top + area.height}` }),
    ...strips.map((strip, i) => stripRow(strip, i, area, x, narrow)),
  );
  return drawing;
}

function inShort(strip: Strip): string {
  const speed = ratio(strip.speedup);
  return speed === strip.verdict ? speed : `${speed} ${strip.verdict}`;
}

function stripRow(
  strip: Strip,
  number: number,
  area: Area,
  x: (value: number) => number,
  narrow: boolean,
): SVGGElement {
  const top = area.top + number * ROW;
  const y = top + (narrow ? 40 : 28);
  const group = svg("g", { "data-strip": number });
  const name = narrow ? area.width : area.left - 14;
  const textX = narrow ? area.left : 0;
  const speed = inShort(strip);
  group.append(
    svg("rect", { x: 0, y: top, width: area.left + area.width, height: ROW, class: "hit" }),
    svg(
      "text",
      { x: textX, y: narrow ? top + 16 : y, class: "strong" },
      fitted(narrow ? `${strip.name}: ${speed}` : strip.name, name * 0.93),
    ),
  );
  if (!narrow) group.append(svg("text", { x: 0, y: y + 16, class: "muted" }, fitted(speed, name)));
  // Spread by their order, not by chance: the same data give the same drawing.
  const lift = (i: number) => (((i * 7) % 11) / 10 - 0.5) * SPREAD * 2;
  strip.control.forEach((value, i) => {
    const at = finite(value);
    if (at !== null)
      group.append(
        svg("circle", { cx: x(at), cy: y + 25 + lift(i) * 0.4, r: 2.2, class: "control" }),
      );
  });
  strip.ratios.forEach((value, i) => {
    const at = finite(value);
    if (at !== null)
      group.append(svg("circle", { cx: x(at), cy: y + lift(i), r: 2.8, class: "sample" }));
  });
  const limits = ends(strip.interval);
  if (limits !== null) {
    const [low, high] = limits.map(x);
    const d = `M${low} ${y - 16}V${y - 10}M${low} ${y - 13}H${high}M${high} ${y - 16}V${y - 10}`;
    group.append(svg("path", { class: "whisker strong-line", d }));
  }
  return group;
}
