/** The modules as a tree, with equal siblings in a row as one line, as `print(model)` shows them. */

import { totalOf } from "./account";
import {
  isMissing,
  type Fate,
  type ModuleRow,
  type NotMeasured,
  type PageSide,
  type Split,
} from "./page_data";

export interface TreeNode {
  name: string;
  kind: string;
  rows: ModuleRow[];
  /** The same modules before; fewer where it had others. */
  before: ModuleRow[];
  inside: TreeNode[];
  level: number;
  parent: TreeNode | null;
  signature: string;
}

/** Of the last side; times of the first beside it where there are two. */
export function moduleTree(sides: PageSide[]): TreeNode | null {
  const now = sides[sides.length - 1];
  if (now === undefined || now.modules.length === 0) return null;
  const before = new Map(sides.length > 1 ? sides[0].modules.map((row) => [row.path, row]) : []);
  const nodes = now.modules.map((row): TreeNode => {
    const old = before.get(row.path);
    return {
      name: row.path === "" ? row.kind : nameIn(row, now.modules),
      kind: row.kind,
      rows: [row],
      before: old === undefined ? [] : [old],
      inside: [],
      level: 0,
      parent: null,
      signature: "",
    };
  });
  let root: TreeNode | null = null;
  now.modules.forEach((row, i) => {
    if (row.parent >= 0) nodes[row.parent].inside.push(nodes[i]);
    else root ??= nodes[i];
  });
  if (root !== null) settle(root, null, 1, new Map());
  return root;
}

function nameIn(row: ModuleRow, modules: ModuleRow[]): string {
  const around = row.parent >= 0 ? modules[row.parent].path : "";
  return around !== "" && row.path.startsWith(`${around}.`)
    ? row.path.slice(around.length + 1)
    : row.path;
}

/** `seen`: numbers of signatures. As texts in texts they would double with every level. */
function settle(
  node: TreeNode,
  parent: TreeNode | null,
  level: number,
  seen: Map<string, string>,
): void {
  node.parent = parent;
  node.level = level;
  for (const one of node.inside) settle(one, node, level + 1, seen);
  node.inside = grouped(node, level + 1);
  const row = node.rows[0];
  const inside = node.inside.map((one) => `${one.name}=${one.signature}`);
  const text = JSON.stringify([row.kind, row.extra, row.fate ?? "", inside]);
  node.signature = seen.get(text) ?? String(seen.size);
  seen.set(text, node.signature);
}

/** Runs of equal siblings become one node with all of them inside. */
function grouped(around: TreeNode, level: number): TreeNode[] {
  const found: TreeNode[] = [];
  let run: TreeNode[] = [];
  const close = () => {
    if (run.length < 2) found.push(...run);
    else found.push(groupOf(run, around, level));
    run = [];
  };
  for (const one of around.inside) {
    const fits = run.length === 0 || run[0].signature === one.signature;
    if (!fits) close();
    run.push(one);
  }
  close();
  return found;
}

function groupOf(run: TreeNode[], around: TreeNode, level: number): TreeNode {
  const group: TreeNode = {
    name: `${run[0].name}–${run[run.length - 1].name}`,
    kind: `${run.length} × ${run[0].kind}`,
    rows: run.flatMap((one) => one.rows),
    before: run.flatMap((one) => one.before),
    inside: run,
    level,
    parent: around,
    signature: "",
  };
  const deeper = (node: TreeNode) => {
    node.level += 1;
    node.inside.forEach(deeper);
  };
  for (const one of run) {
    deeper(one);
    one.parent = group;
  }
  return group;
}

type Figure = number | NotMeasured;

/** Of all the modules; not measured where one of them is not. */
export function sum(rows: ModuleRow[], of: (row: ModuleRow) => Figure): Figure {
  let total = 0;
  for (const row of rows) {
    const value = of(row);
    if (isMissing(value)) return value;
    total += value;
  }
  return total;
}

/** The account of several modules; null where one of them has none. */
export function splitOf(rows: ModuleRow[]): Split | null {
  const total: Split = {};
  for (const row of rows) {
    if (isMissing(row.split)) return null;
    for (const [key, us] of Object.entries(row.split) as [keyof Split, number][]) {
      total[key] = (total[key] ?? 0) + us;
    }
  }
  return rows.length > 0 && totalOf(total) > 0 ? total : null;
}

export const FATES: Record<Fate, string> = {
  welded: "welded",
  part: "inside a welded block",
  left: "left as it was",
  "not measured": "not measured",
  "": "nothing to weld",
};

export function fateClass(fate: Fate): string {
  return `fate-${fate === "" ? "none" : fate.replace(" ", "-")}`;
}

/** One reason, or that they differ. */
export function whyOf(rows: ModuleRow[]): string {
  const reasons = [...new Set(rows.map((row) => row.why ?? ""))].filter((one) => one !== "");
  return reasons.length > 1 ? `${reasons[0]} (others: ${reasons.length - 1})` : (reasons[0] ?? "");
}
