/** What was welded, seen: the model as a map, and the module tree as a table. */

import { html, type Child } from "./dom";
import { modelMap } from "./model_map";
import { ModuleTable } from "./module_table";
import { moduleTree } from "./module_tree";
import { interval, ratio, reason } from "./number_text";
import type { BlockRow, Page } from "./page_data";
import { scrollingTable, type Section, type Table } from "./plot";

export function weldedSection(page: Page): Section | null {
  const sides = page.sides ?? [];
  const blocks = page.blocks ?? [];
  const tree = moduleTree(sides);
  if (tree === null && blocks.length === 0) return null;
  const fates = new Set(sides.at(-1)?.modules.map((row) => row.fate ?? ""));
  const welded = blocks.length > 0 || fates.has("welded") || fates.has("left");
  const content: Child[] = [];
  if (tree !== null) {
    const table = new ModuleTable(tree, Boolean(sides.at(-1)?.device_flame));
    content.push(
      modelMap(sides, (path) => table.reveal(path)),
      welded && html("h3", {}, "Modules"),
      table.element,
    );
  }
  if (blocks.length > 0) content.push(...blockTable(blocks));
  return {
    id: "welded",
    title: welded ? "What was welded" : "Modules",
    short: welded ? "Welded" : "Modules",
    content,
  };
}

function blockTable(blocks: BlockRow[]): Child[] {
  const table: Table = {
    columns: ["block", "what", "outcome", "served by", "speed over eager", "interval", "why"].map(
      (name) => ({ name }),
    ),
    rows: blocks.map((block) => [
      block.path,
      block.what,
      block.outcome,
      block.serves,
      ratio(block.speedup),
      interval(block.interval),
      block.reason || reason(block.speedup),
    ]),
  };
  return [html("h3", {}, "Blocks that were found"), scrollingTable("Blocks", table)];
}
