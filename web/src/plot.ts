/** What every plot has: a title, its numbers as a table to copy, and itself as an SVG file. */

import { breakable, button, html, freshId, type Child } from "./dom";
import { count, interval, measured, ratio, share } from "./number_text";
import { isMissing, type Interval, type Measured, type NotMeasured } from "./page_data";
import { onPaper } from "./paper";
import { standalone } from "./svg_file";

/** A text for people, and the figure in full for a spreadsheet. */
export interface Exact {
  shown: string;
  copied: string;
}
export type Cell = string | number | Exact;
export interface Column {
  name: string;
  /** How a number is shown; without it, the column holds text. */
  show?: (value: number) => string;
  /** Its words are never broken. */
  brief?: boolean;
}
export interface Table {
  columns: Column[];
  rows: Cell[][];
}
/** More rows than this make a page slow; copying gives all of them. */
const MOST_ROWS = 400;

export interface Plot {
  id: string;
  title: string;
  unit?: string | HTMLElement;
  body: Child[];
  table: () => Table;
  /** The drawing as it is now; null where nothing is drawn. */
  drawing?: () => SVGSVGElement | null;
  /** Said below the plot. */
  note?: string | undefined;
  /** How many rows of its table are printed below it: where a pointer would tell on a screen. */
  printed?: number;
}

export function figureOf(plot: Plot): HTMLElement {
  const titleId = `${plot.id}-title`;
  const figure = html(
    "figure",
    { class: "plot", id: plot.id, "aria-labelledby": titleId },
    html(
      "figcaption",
      {},
      html("h3", { id: titleId }, plot.title),
      plot.unit !== undefined && html("span", { class: "unit" }, plot.unit),
    ),
    ...plot.body,
    plot.note ? html("p", { class: "note" }, plot.note) : null,
  );
  const tools = html("div", { class: "tools" }, foldedTable(plot.title, plot.table));
  if (plot.drawing !== undefined) tools.prepend(saveButton(plot));
  const whole = html("div", { class: "plot-with-table" }, figure, tools);
  if (plot.printed !== undefined) printTable(whole, plot.table, plot.printed);
  return whole;
}

/** The first rows of a table, there only on paper. */
function printTable(holder: HTMLElement, make: () => Table, most: number): void {
  let printed: HTMLElement | null = null;
  const prepare = () => {
    const table = make();
    const all = table.rows.length;
    const rows = table.rows.slice(0, most);
    const note = `The first ${most} of ${count(all)} rows; the page itself has all.`;
    printed = html("div", { class: "printed" }, tableOf({ ...table, rows }));
    if (all > most) printed.append(html("p", { class: "note" }, note));
    holder.append(printed);
  };
  onPaper(prepare, () => printed?.remove());
}

function saveButton(plot: Plot): HTMLElement {
  const save = () => {
    const drawing = plot.drawing?.() ?? null;
    if (drawing === null) return;
    const file = new Blob([standalone(drawing, plot.title)], { type: "image/svg+xml" });
    const address = URL.createObjectURL(file);
    const link = html("a", { href: address, download: `torchweld-${plot.id}.svg` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  };
  return button("Save as SVG", save, { class: "save", "aria-label": `Save as SVG: ${plot.title}` });
}

/** The numbers of a plot; made when it is unfolded. */
export function foldedTable(title: string, make: () => Table): HTMLDetailsElement {
  const details = html("details", { class: "table" }, html("summary", {}, "Table"));
  details.setAttribute("aria-label", `Table of ${title}`);
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    const table = make();
    details.append(
      copyButton("Copy as TSV", () => tsvOf(table)),
      scrollingTable(title, table),
    );
  });
  return details;
}

/** A table that stands for itself. */
export function titledTable(id: string, title: string, table: Table, note = ""): HTMLElement {
  return html(
    "div",
    { class: "titled-table", id },
    html("h3", { id: `${id}-title` }, title),
    scrollingTable(title, table),
    note !== "" && html("p", { class: "note" }, note),
    copyButton("Copy as TSV", () => tsvOf(table)),
  );
}

export function scrollingTable(title: string, table: Table): HTMLElement {
  const hidden = table.rows.length - MOST_ROWS;
  return html(
    "div",
    {},
    html(
      "div",
      { class: "scroll", role: "region", "aria-label": title, tabindex: 0 },
      tableOf(table),
    ),
    hidden > 0 &&
      html(
        "p",
        { class: "note" },
        `The first ${MOST_ROWS} rows; copying gives all ${table.rows.length}.`,
      ),
  );
}

export function tableOf(table: Table): HTMLTableElement {
  const number = table.columns.map((column) => column.show !== undefined);
  const head = table.columns.map((column, i) =>
    html("th", { scope: "col", class: number[i] && "number" }, column.name),
  );
  const rows = table.rows.slice(0, MOST_ROWS).map((row) => {
    const cells = row.map((cell, i) => {
      const show = table.columns[i].show;
      const text = typeof cell === "number" && show !== undefined ? show(cell) : shownOf(cell);
      const style = number[i] ? "number" : table.columns[i].brief === true && "brief";
      return html("td", { class: style }, ...breakable(text));
    });
    return html("tr", {}, ...cells);
  });
  return html("table", {}, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...rows));
}

function shownOf(cell: Cell): string {
  return typeof cell === "object" ? cell.shown : String(cell);
}

function copiedOf(cell: Cell): string {
  return typeof cell === "object" ? cell.copied : String(cell);
}

type Figure = Measured | NotMeasured | null | undefined;

/** A figure as `format` shows it; copied in full. */
export function exact(value: Figure, format: (value: number) => string): Exact {
  return { shown: measured(value, format), copied: copiedFigure(value) };
}

export function exactRatio(value: Figure): Exact {
  return { shown: ratio(value), copied: copiedFigure(value) };
}

export function exactInterval(value: Interval | null | undefined): Exact {
  return { shown: interval(value), copied: (value ?? []).map(copiedFigure).join(" to ") };
}

/** A part of a whole: shown in per cent, copied as a fraction. */
export function exactShare(part: number, whole: number): Exact {
  return { shown: share(part, whole), copied: whole === 0 ? "" : String(part / whole) };
}

function copiedFigure(value: Figure): string {
  if (value === null || value === undefined) return "";
  return isMissing(value) ? "not measured" : String(value);
}

/** Numbers in full, so that a spreadsheet can use them. */
function tsvOf(table: Table): string {
  return tsv([
    table.columns.map((column) => column.name),
    ...table.rows.map((row) => row.map(copiedOf)),
  ]);
}

const NUMBER = /^[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?$/i;

/** Lines of cells. No cell breaks out of its place, and a spreadsheet takes none for a formula. */
export function tsv(lines: string[][]): string {
  const safe = (cell: string) => {
    const text = cell.replaceAll(/[\t\r\n]+/g, " ");
    return /^\s*[=+\-@]/.test(text) && !NUMBER.test(text) ? `'${text}` : text;
  };
  return lines.map((cells) => cells.map(safe).join("\t")).join("\n") + "\n";
}

export function copyButton(text: string, content: () => string): HTMLElement {
  const said = html("span", { role: "status", class: "said" });
  const press = () => {
    copy(content()).then(
      () => say("Copied"),
      () => say("Could not copy"),
    );
  };
  const say = (words: string) => {
    said.textContent = words;
    setTimeout(() => (said.textContent = ""), 2500);
  };
  return html("span", { class: "copy" }, button(text, press), said);
}

async function copy(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copySelected(text);
  }
}

/** Where the clipboard is closed to pages, a selected text can still be copied. */
function copySelected(text: string): void {
  const area = html("textarea", { readonly: true, class: "unseen", id: freshId("copy") });
  area.value = text;
  document.body.append(area);
  area.select();
  // The old way is the only one left here.
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser does not let this page copy");
}

export interface Section {
  id: string;
  title: string;
  /** In the navigation. */
  short: string;
  content: Child[];
}

export function sectionOf(section: Section): HTMLElement {
  const title = html("h2", { id: `${section.id}-title` }, section.title);
  return html(
    "section",
    { id: section.id, "aria-labelledby": title.id },
    title,
    ...section.content,
  );
}
