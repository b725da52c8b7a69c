/** What was welded, seen: the model as a map, and the module tree as a table. */

import { html, type Child } from "./dom";
import { modelMap } from "./model_map";
import { ModuleTable } from "./module_table";
import { moduleTree } from "./module_tree";
import { reason } from "./number_text";
import type { BlockRow, Page } from "./page_data";
import {
  exactInterval,
  exactRatio,
  titledTable,
  type Exact,
  type Section,
  type Table,
} from "./plot";

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
  if (blocks.length > 0) content.push(blockTable(blocks));
  return {
    id: "welded",
    title: welded ? "What was welded" : "Modules",
    short: welded ? "Welded" : "Modules",
    content,
  };
}

const BRIEF = new Set(["what", "outcome", "served by", "speed over eager", "interval"]);

/** Blocks with one outcome whose paths differ in numbers alone are one row: `layers.*.mlp`. */
function alike(blocks: BlockRow[]): [string, BlockRow][] {
  const groups = new Map<string, BlockRow[]>();
  for (const block of blocks) {
    const name = block.path.replaceAll(/(^|\.)\d+(?=\.|$)/g, "$1*");
    groups.set(name, [...(groups.get(name) ?? []), block]);
  }
  return [...groups].flatMap(([name, group]): [string, BlockRow][] => {
    const outcomes = new Set(group.map((block) => JSON.stringify({ ...block, path: "" })));
    if (group.length > 1 && outcomes.size === 1) return [[name, group[0]]];
    return group.map((block) => [block.path, block]);
  });
}

/** "cpu packed" and "1.1 to 1.2" stay on one line; a list of ways breaks between them. */
function unbroken(text: string): string {
  return text
    .split(", ")
    .map((part) => part.replaceAll(" ", "\u00a0"))
    .join(", ");
}

function withoutBreaks(cell: Exact): Exact {
  return { ...cell, shown: unbroken(cell.shown) };
}

function blockTable(blocks: BlockRow[]): HTMLElement {
  const table: Table = {
    columns: ["block", "what", "outcome", "served by", "speed over eager", "interval", "why"].map(
      (name) => ({ name, brief: BRIEF.has(name) }),
    ),
    rows: alike(blocks).map(([path, block]) => [
      path || "the model",
      block.what,
      block.outcome,
      unbroken(block.serves),
      exactRatio(block.speedup),
      withoutBreaks(exactInterval(block.interval)),
      block.reason || reason(block.speedup),
    ]),
  };
  return titledTable("blocks", "Blocks that were found", table);
}
