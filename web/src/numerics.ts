/** Numerics: how far eager and fused are from the reference, in units of what is allowed. */

import { scaleLinear } from "d3-scale";

import { blank, bottomAxis, tickText, type Area } from "./axes";
import { drawnToFit, html, svg } from "./dom";
import { fitted } from "./flame_view";
import { figure, measured, reason, small } from "./number_text";
import { finite, type ErrorRow, type Page } from "./page_data";
import { exact, figureOf, type Section, type Table } from "./plot";
import { withTooltips } from "./tooltip";

const ROW = 20;
const MOST_DRAWN = 40;

export function numericsSection(page: Page): Section | null {
  const errors = page.errors ?? [];
  if (errors.length === 0) return null;
  const bad = errors.filter((row) => !row.ok).length;
  const says =
    bad === 0
      ? "Everything welded stays within the numerical rule: at most 1 of what is allowed."
      : `${bad} of ${errors.length} break the numerical rule, or could not be judged.`;
  const drawn = largest(errors);
  const holder = html("div", { class: "drawing" });
  drawnToFit(holder, (width) => draw(drawn, width));
  withTooltips(holder, (target) => {
    const at = target.closest("[data-row]")?.getAttribute("data-row");
    return at === null || at === undefined ? null : lines(drawn[Number(at)]);
  });
  const plot = figureOf({
    id: "numerics-plot",
    title: "Error relative to what is allowed",
    unit: "largest over rows, against a higher-precision reference",
    body: [holder, legend()],
    table: () => tableOfErrors(errors),
    printed: 60,
    drawing: () => holder.querySelector("svg"),
    note:
      drawn.length < errors.length
        ? `The ${drawn.length} largest of ${errors.length}; the table has all.`
        : undefined,
  });
  return {
    id: "numerics",
    title: "Numerics",
    short: "Numerics",
    content: [html("p", { class: bad === 0 ? "lead" : "doubt" }, says), plot],
  };
}

/** In the order they come, without the smallest where there are many. */
function largest(errors: ErrorRow[]): ErrorRow[] {
  if (errors.length <= MOST_DRAWN) return errors;
  const size = (row: ErrorRow) => (row.ok ? (finite(row.of_allowed) ?? 0) : Infinity);
  const kept = new Set([...errors].sort((a, b) => size(b) - size(a)).slice(0, MOST_DRAWN));
  return errors.filter((row) => kept.has(row));
}

function legend(): HTMLElement {
  const entry = (sign: string, style: string, text: string) =>
    html("li", {}, html("span", { class: `sign ${style}`, "aria-hidden": "true" }, sign), text);
  return html(
    "ul",
    { class: "legend" },
    entry("○", "before", "eager"),
    entry("●", "after", "fused"),
    entry("✕", "bad", "not within the rule"),
  );
}

/** Eager's error in the same unit. */
function eagerPart(row: ErrorRow): number | null {
  const [eager, fused, part] = [row.eager, row.fused, row.of_allowed].map(finite);
  if (eager === null || fused === null || part === null || fused <= 0) return null;
  return (part * eager) / fused;
}

function lines(row: ErrorRow): string[] {
  return [
    `${row.block}: ${row.tensor}`,
    `eager ${measured(row.eager, small)}, fused ${measured(row.fused, small)}`,
    `${measured(row.of_allowed, figure)} of what is allowed`,
    reason(row.of_allowed) || reason(row.eager),
    row.ok ? "within the rule" : "not within the rule",
  ];
}

function tableOfErrors(errors: ErrorRow[]): Table {
  return {
    columns: [
      "block",
      "tensor",
      "eager",
      "fused",
      "of allowed",
      "within the rule",
      "why not measured",
    ].map((name) => ({ name })),
    rows: errors.map((row) => [
      row.block,
      row.tensor,
      exact(row.eager, small),
      exact(row.fused, small),
      exact(row.of_allowed, figure),
      row.ok ? "yes" : "no",
      reason(row.of_allowed) || reason(row.fused) || reason(row.eager),
    ]),
  };
}

function draw(rows: ErrorRow[], width: number): SVGSVGElement {
  const left = Math.min(250, Math.max(130, width * 0.3));
  const heads = rows.filter((row, i) => i === 0 || rows[i - 1].block !== row.block).length;
  const height = (rows.length + heads) * ROW + 52;
  const area: Area = { left, top: 6, width: width - left - 16, height: height - 50 };
  const parts = rows.flatMap((row) => [finite(row.of_allowed) ?? 0, eagerPart(row) ?? 0]);
  const most = Math.max(1.1, ...parts);
  const x = scaleLinear([0, most], [area.left, area.left + area.width]);
  const drawing = blank(width, height, "Errors of eager and fused; the table has the numbers");
  const title = "of what is allowed";
  drawing.append(
    bottomAxis(area, { place: x, ticks: x.ticks(6), text: tickText, title }),
    svg("path", { class: "limit", d: `M${x(1)} ${area.top}V${area.top + area.height}` }),
  );
  let y = area.top + ROW / 2;
  rows.forEach((row, i) => {
    if (i === 0 || rows[i - 1].block !== row.block) {
      drawing.append(
        // Nothing is plotted beside it, and the ends of paths tell them apart.
        svg("text", { x: 0, y: y + 4, class: "strong haloed" }, fitted(row.block, width * 0.86)),
      );
      y += ROW;
    }
    drawing.append(dotRow(row, i, y, area, x, left));
    y += ROW;
  });
  return drawing;
}

function dotRow(
  row: ErrorRow,
  i: number,
  y: number,
  area: Area,
  x: (value: number) => number,
  left: number,
): SVGGElement {
  const right = area.left + area.width;
  const group = svg(
    "g",
    { "data-row": i },
    svg("rect", { x: 0, y: y - ROW / 2, width: right, height: ROW, class: "hit" }),
    svg("text", { x: 10, y: y + 4, class: "muted" }, fitted(row.tensor, left - 26)),
    svg("path", { class: "grid", d: `M${area.left} ${y}H${right}` }),
  );
  const fused = finite(row.of_allowed);
  const eager = eagerPart(row);
  if (fused !== null && eager !== null) {
    group.append(svg("path", { class: "join", d: `M${x(eager)} ${y}H${x(fused)}` }));
  }
  if (eager !== null)
    group.append(svg("circle", { cx: x(eager), cy: y, r: 4, class: "dot before" }));
  if (fused !== null)
    group.append(svg("circle", { cx: x(fused), cy: y, r: 4, class: "dot after" }));
  if (!row.ok || fused === null) {
    const at = fused === null ? right - 6 : x(fused) + 12;
    const text = fused === null ? `${measured(row.of_allowed, figure)} ✕` : "✕";
    group.append(
      svg(
        "text",
        { x: at, y: y + 4, class: `bad ${fused === null ? "end" : "middle"}` },
        row.ok ? "not measured" : text,
      ),
    );
  }
  return group;
}
