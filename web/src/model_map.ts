/** The model as a map: area is a share of time or of FLOPs, colour and pattern what became of it. */

import { max } from "d3-array";
import { hierarchy, treemap, treemapSquarify, type HierarchyRectangularNode } from "d3-hierarchy";

import { choice, drawnToFit, html, svg } from "./dom";
import { legendOf } from "./flame_section";
import { fitted } from "./flame_view";
import { dotting, hatching } from "./hatching";
import { fateClass, FATES } from "./module_tree";
import { change, duration, flops, measured, reason, share } from "./number_text";
import { isMissing, namesModules, type Fate, type ModuleRow, type PageSide } from "./page_data";
import { exactShare, figureOf, type Table } from "./plot";
import { withTooltips } from "./tooltip";

const HEAD = 18;
const PATTERNS: Partial<Record<Fate, string>> = {
  left: "map-left",
  "not measured": "map-unmeasured",
  part: "map-part",
};

interface Place {
  row: ModuleRow | null;
  /** Of the module itself, outside its children. */
  own: number;
  inside: Place[];
}

type Measure = "time" | "before" | "flops";

export function modelMap(sides: PageSide[], reveal: (path: string) => void): HTMLElement | null {
  const now = sides[sides.length - 1];
  const below = (side: PageSide, of: (row: ModuleRow) => number) =>
    namesModules(side) && side.modules.some((row) => row.parent >= 0 && of(row) > 0);
  const measures: [Measure, string][] = [];
  const several = sides.length > 1;
  if (below(now, timeOf)) measures.push(["time", several ? `Time ${now.name}` : "Time"]);
  if (several && below(sides[0], timeOf)) measures.push(["before", `Time ${sides[0].name}`]);
  if (below(now, (row) => row.flops)) measures.push(["flops", "FLOPs"]);
  if (measures.length === 0) return null;
  let measure = measures[0][0];
  const holder = html("div", { class: "drawing map" });
  const unit = html("span", {}, unitOf(measure));
  const rowsOf = () =>
    measure === "before" ? withFates(sides[0].modules, now.modules) : now.modules;
  const redraw = drawnToFit(holder, (width) => draw(rowsOf(), measure, width));
  const switches = choice("Area", measures, measure, (value) => {
    measure = value as Measure;
    unit.textContent = unitOf(measure);
    redraw();
  });
  listen(holder, rowsOf, sides, reveal);
  const fates = [...new Set(now.modules.map((row) => row.fate ?? ""))];
  const judged = fates.some((fate) => fate !== "");
  if (!judged) holder.classList.add("unjudged");
  const legend = legendOf(
    (Object.keys(FATES) as Fate[])
      .filter((fate) => fates.includes(fate))
      .map((fate) => [fateClass(fate), FATES[fate]]),
  );
  return figureOf({
    id: "welded-map",
    title: "The model as a map",
    unit,
    body: [
      html("div", { class: "controls" }, measures.length > 1 && switches, judged && legend),
      holder,
    ],
    table: () => mapTable(now.modules),
    drawing: () => holder.querySelector("svg"),
  });
}

function unitOf(measure: Measure): string {
  return measure === "flops" ? "area: share of the FLOPs" : "area: share of the step";
}

/** Fates are known of the last side; areas may be those of the first. */
function withFates(before: ModuleRow[], now: ModuleRow[]): ModuleRow[] {
  const fates = new Map(now.map((row) => [row.path, row]));
  return before.map((row) => {
    const fresh = fates.get(row.path);
    return { ...row, fate: fresh?.fate ?? "", why: fresh?.why ?? "" };
  });
}

/** 0 where it was not measured: no area, and the table says why. */
function timeOf(row: ModuleRow): number {
  return isMissing(row.time_us) ? 0 : row.time_us;
}

function mapTable(rows: ModuleRow[]): Table {
  const most = max(rows, timeOf) ?? 0;
  const flopsOfAll = max(rows, (row) => row.flops) ?? 0;
  return {
    columns: [
      { name: "module" },
      { name: "kind" },
      { name: "share of time" },
      { name: "FLOPs", show: flops },
      { name: "share of FLOPs" },
      { name: "fate" },
      { name: "why" },
    ],
    rows: rows.map((row) => [
      row.path || "the model",
      row.kind,
      isMissing(row.time_us) ? "not measured" : exactShare(row.time_us, most),
      row.flops,
      exactShare(row.flops, flopsOfAll),
      FATES[row.fate ?? ""],
      row.why ?? "",
    ]),
  };
}

function treeOf(rows: ModuleRow[], measure: Measure): Place {
  const value = (row: ModuleRow) => (measure === "flops" ? row.flops : timeOf(row));
  const places = rows.map((row): Place => ({ row, own: value(row), inside: [] }));
  const tops: Place[] = [];
  rows.forEach((row, i) => {
    if (row.parent < 0) {
      tops.push(places[i]);
      return;
    }
    // Parts of a welded block take no time of their own, so the block is one place.
    if (value(row) > 0) places[row.parent].inside.push(places[i]);
    places[row.parent].own -= value(row);
  });
  for (const place of [...places].reverse()) foldBlock(place, value);
  for (const place of places) {
    place.own = Math.max(0, place.own);
    // What a module does itself is a place beside its children.
    if (place.inside.length > 0 && place.own > 0) {
      place.inside.push({ row: place.row, own: place.own, inside: [] });
      place.own = 0;
    }
  }
  return tops.length === 1 ? tops[0] : { row: null, own: 0, inside: tops };
}

/** A block with one fate is one place, unless modules in it have fates of their own. */
function foldBlock(place: Place, value: (row: ModuleRow) => number): void {
  const fated = (one: Place): boolean =>
    !["", "part", undefined].includes(one.row?.fate) || one.inside.some(fated);
  if (place.row === null || !fated({ ...place, inside: [] }) || place.inside.some(fated)) return;
  place.own = value(place.row);
  place.inside = [];
}

function draw(rows: ModuleRow[], measure: Measure, width: number): SVGSVGElement {
  const height = Math.round(Math.max(300, Math.min(460, width * 0.42)));
  const root = hierarchy(treeOf(rows, measure), (place) => place.inside).sum((place) => place.own);
  const places = treemap<Place>()
    .tile(treemapSquarify.ratio(1.25))
    .size([width, height])
    .paddingInner(1)
    .paddingOuter((node) => (node.depth === 0 ? 0 : 2))
    .paddingTop((node) => (headed(node) ? HEAD : node.depth === 0 ? 0 : 2))
    .round(true)(root);
  const drawing = svg(
    "svg",
    { width, height, role: "img", "aria-label": inWords(rows, measure) },
    hatching("map-left", "hatch-left", 7),
    hatching("map-unmeasured", "hatch-unmeasured", 4),
    dotting("map-part", "dots-part"),
  );
  places.each((node) => {
    const seen = node.depth > 0 || node.height === 0;
    if (seen && node.x1 > node.x0 && node.y1 > node.y0) {
      drawing.append(cell(node, root.value ?? 0, rows));
    }
  });
  return drawing;
}

/** Room for the name of a module above those in it. */
function headed(node: HierarchyRectangularNode<Place>): boolean {
  return node.depth > 0 && node.height > 0 && node.x1 - node.x0 > 34 && node.y1 - node.y0 > 40;
}

function cell(
  node: HierarchyRectangularNode<Place>,
  whole: number,
  rows: ModuleRow[],
): SVGGElement {
  const { row } = node.data;
  const fate = row?.fate ?? "";
  const leaf = node.height === 0;
  const itself = leaf && node.parent?.data.row === row;
  const box = {
    x: node.x0,
    y: node.y0,
    width: node.x1 - node.x0,
    height: node.y1 - node.y0,
    rx: 2,
  };
  const group = svg("g", {
    class: `place ${fateClass(fate)}${leaf ? "" : " around"}`,
    "data-path": row?.path ?? null,
  });
  group.append(svg("rect", box));
  const pattern = PATTERNS[fate];
  if (leaf && pattern !== undefined) {
    group.append(svg("rect", { ...box, class: "over", fill: `url(#${pattern})` }));
  }
  const name = row === null ? "" : itself ? "itself" : shortName(row, rows);
  const x = node.x0 + 5;
  const room = box.width - 10;
  if (leaf ? box.height > 17 : headed(node)) {
    group.append(svg("text", { x, y: node.y0 + 13 }, fitted(name, room)));
  }
  if (leaf && box.height > 34) {
    const text = fitted(share(node.value ?? 0, whole), room);
    if (!text.endsWith("…"))
      group.append(svg("text", { x, y: node.y0 + 28, class: "second" }, text));
  }
  return group;
}

function shortName(row: ModuleRow, rows: ModuleRow[]): string {
  const around = row.parent >= 0 ? rows[row.parent].path : "";
  const inside = around !== "" && row.path.startsWith(`${around}.`);
  return inside ? row.path.slice(around.length + 1) : row.path || row.kind;
}

function listen(
  holder: HTMLElement,
  rowsOf: () => ModuleRow[],
  sides: PageSide[],
  reveal: (path: string) => void,
): void {
  const pathOf = (target: EventTarget | null) =>
    target instanceof Element
      ? (target.closest("[data-path]")?.getAttribute("data-path") ?? null)
      : null;
  withTooltips(holder, (target) => {
    const path = pathOf(target);
    const row = rowsOf().find((one) => one.path === path);
    return row === undefined ? null : lines(row, rowsOf(), sides);
  });
  holder.addEventListener("click", (event) => {
    const path = pathOf(event.target);
    if (path !== null) reveal(path);
  });
}

function lines(row: ModuleRow, rows: ModuleRow[], sides: PageSide[]): string[] {
  const [before, after] = sides.map(
    (side) => side.modules.find((one) => one.path === row.path)?.time_us,
  );
  const time =
    typeof before === "number" && typeof after === "number"
      ? `${duration(before)} → ${duration(after)} (${change(before, after)})`
      : measured(row.time_us, (us) => `${duration(us)}, ${share(us, timeOf(rows[0]))} of the step`);
  const fate = FATES[row.fate ?? ""];
  return [
    `${row.path || "the model"} (${row.kind})`,
    time,
    reason(row.time_us),
    row.flops > 0 ? `${flops(row.flops)}, ${share(row.flops, rows[0].flops)} of all` : "",
    row.why ? `${fate}: ${row.why}` : fate,
  ];
}

function inWords(rows: ModuleRow[], measure: Measure): string {
  const of = (row: ModuleRow) => (measure === "flops" ? row.flops : timeOf(row));
  const whole = max(rows, of) ?? 0;
  const parts = (Object.keys(FATES) as Fate[]).flatMap((fate) => {
    // A module inside another of the same fate is already counted.
    const tops = rows.filter((row) => (row.fate ?? "") === fate && fate !== "");
    const total = tops.reduce((sum, row) => sum + of(row), 0);
    return tops.length > 0 ? [`${FATES[fate]}: ${tops.length}, ${share(total, whole)}`] : [];
  });
  const what = measure === "flops" ? "FLOPs" : "time";
  return `Map of ${rows.length} modules by ${what}. ${parts.join(". ")}. The table below has them all.`;
}
