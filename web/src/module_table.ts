/** The module tree as a table that folds. Keys as in any treegrid: arrows, Home, End, Enter. */

import { largestWaste } from "./account";
import { breakable, button, html, svg, type Child } from "./dom";
import { fateClass, FATES, splitOf, sum, whyOf, type TreeNode } from "./module_tree";
import { bytes, change, count, duration, flops, measured, reason, share } from "./number_text";
import { isMissing, type ModuleRow, type NotMeasured } from "./page_data";
import { onPaper } from "./paper";
import { copyButton, tsv } from "./plot";

/** So many rows are unfolded at first, if whole levels fit. */
const FIRST_ROWS = 24;
const MOST_PRINTED = 32;

interface TableColumn {
  name: string;
  title: string;
  style: string;
  cell: (node: TreeNode) => HTMLElement;
}

interface Line {
  node: TreeNode;
  element: HTMLTableRowElement;
}

export class ModuleTable {
  readonly element: HTMLElement;
  private readonly open = new Set<TreeNode>();
  private readonly body = html("tbody");
  private readonly compared: boolean;
  private readonly timed: boolean;
  private readonly judged: boolean;
  private readonly shown: TableColumn[];
  private lines: Line[] = [];
  private cursor: TreeNode;

  constructor(
    private readonly root: TreeNode,
    private readonly onDevice: boolean,
  ) {
    this.cursor = root;
    this.compared = root.before.length > 0;
    this.timed = !isMissing(nowOf(root));
    this.judged = this.all().some((node) => node.rows.some((row) => (row.fate ?? "") !== ""));
    this.unfoldSome(FIRST_ROWS);
    this.shown = this.columns();
    const heads = this.shown.map(({ name, title, style }) =>
      html("th", { scope: "col", title, class: style }, name),
    );
    const table = html(
      "table",
      { class: "modules", id: "module-table", role: "treegrid", "aria-label": "Modules" },
      html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "module"), ...heads)),
      this.body,
    );
    this.element = html(
      "div",
      { class: "module-table" },
      html(
        "div",
        { class: "controls" },
        button("Unfold all", () => this.foldAll(false)),
        button("Fold all", () => this.foldAll(true)),
        copyButton("Copy as TSV", () => this.tsv()),
      ),
      html(
        "div",
        { class: "scroll tall", role: "region", "aria-label": "Modules, scrolls" },
        table,
      ),
    );
    this.listen();
    this.redraw();
    const open = new Set<TreeNode>();
    onPaper(
      () => {
        this.open.forEach((node) => open.add(node));
        this.unfoldSome(MOST_PRINTED, true);
      },
      () => {
        this.open.clear();
        open.forEach((node) => this.open.add(node));
        open.clear();
        this.redraw();
      },
    );
  }

  /** Unfolds down to a module and goes there. */
  reveal(path: string): void {
    const found = this.all().find((node) => node.rows.length === 1 && node.rows[0].path === path);
    if (found === undefined) return;
    for (let node = found.parent; node !== null; node = node.parent) this.open.add(node);
    this.redraw();
    this.focus(found);
  }

  /** What the page has of these modules decides the columns. */
  private columns(): TableColumn[] {
    const found: TableColumn[] = [];
    const text = (name: string, title: string, cell: (node: TreeNode) => Child[], style = "") =>
      found.push({
        name,
        title,
        style,
        cell: (node) => html("td", { class: style }, ...cell(node)),
      });
    const figure = (name: string, title: string, cell: (node: TreeNode) => string) =>
      text(name, title, (node) => [cell(node)], "number");
    const time = (name: string, title: string, of: (node: TreeNode) => number | NotMeasured) =>
      found.push({
        name,
        title,
        style: "number",
        // The time of what lies inside a welded block is the block's.
        cell: (node) => (isPart(node) ? html("td", { class: "number" }, "–") : timeCell(of(node))),
      });
    if (this.judged) text("fate", "what became of it, and why", fateOf, "fate");
    if (this.timed && this.compared) {
      // Before, what lies inside a welded block had a time of its own.
      found.push({
        name: "before",
        title: "time in all calls of a step, before",
        style: "number",
        cell: (node) => timeCell(node.before.length > 0 ? wasOf(node) : null),
      });
      time("after", "time in all calls of a step, after", nowOf);
      figure("change", "after compared with before", changeOf);
    } else if (this.timed) time("time", "time in all calls of a step", nowOf);
    if (this.timed) {
      text("share", "of the step", (node) => this.shareOf(node), "number share");
      const [host, where] = this.onDevice
        ? ["host ", ", on the host; other times are the device’s"]
        : ["", ""];
      time(`${host}forward`, `time in forward${where}`, (node) =>
        sum(node.rows, (row) => row.forward_us),
      );
      if (this.all().some((node) => node.rows.some((row) => row.backward_us !== 0))) {
        time(`${host}backward`, `time in backward${where}`, (node) =>
          sum(node.rows, (row) => row.backward_us),
        );
      }
    }
    const counted = (name: string, title: string, of: (row: ModuleRow) => number, show = count) =>
      figure(name, title, (node) => show(node.rows.reduce((total, row) => total + of(row), 0)));
    counted("calls", "forward calls per step", (row) => row.calls);
    counted("ops", "ops that do work, per step", (row) => row.launches);
    if (this.timed) {
      text("largest waste", "as a share of the step", (node) => [this.waste(node)]);
      figure(
        "roofline",
        "the least time its work could take, over the time it took",
        rooflineShare,
      );
    } else {
      counted("FLOPs", "floating-point operations per step", (row) => row.flops, flops);
      counted("moved", "bytes read and written per step", (row) => row.moved_bytes, bytes);
    }
    return found;
  }

  private shareOf(node: TreeNode): Child[] {
    const [now, whole] = [nowOf(node), nowOf(this.root)];
    return isMissing(now) || isMissing(whole) ? ["–"] : [bar(now, whole), share(now, whole)];
  }

  private waste(node: TreeNode): Child {
    const whole = nowOf(this.root);
    if (isMissing(whole)) return "–";
    const split = splitOf(node.rows);
    const found = split === null ? null : largestWaste(split);
    if (found !== null) return `${found[0]} ${share(found[1], whole)}`;
    const missing = node.rows.map((row) => row.split).find(isMissing);
    if (missing === undefined || nowOf(node) === 0) return "–";
    return html("span", { title: missing.not_measured }, "not measured");
  }

  private line(node: TreeNode, place: number, among: number): Line {
    const folds = node.inside.length > 0;
    const isOpen = this.open.has(node);
    const sign = html(
      "span",
      { class: "fold", "aria-hidden": "true" },
      folds ? (isOpen ? "▾" : "▸") : "",
    );
    const name = html(
      "th",
      { scope: "row", class: "module-name" },
      html(
        "span",
        { class: "indent" },
        sign,
        html("span", { class: "name" }, node.name),
        node.name !== node.kind && html("span", { class: "kind" }, ` ${node.kind}`),
        node.rows.length === 1 &&
          node.rows[0].extra !== "" &&
          html("span", { class: "kind" }, ` (${node.rows[0].extra})`),
      ),
    );
    const indent = name.firstElementChild;
    if (indent instanceof HTMLElement) indent.style.paddingLeft = `${(node.level - 1) * 14}px`;
    const element = html(
      "tr",
      {
        "aria-level": node.level,
        "aria-posinset": place,
        "aria-setsize": among,
        "aria-expanded": folds ? String(isOpen) : null,
        tabindex: node === this.cursor ? 0 : -1,
        "data-path": node.rows.length === 1 ? node.rows[0].path : null,
      },
      name,
      ...this.shown.map((column) => column.cell(node)),
    );
    return { node, element };
  }

  private redraw(): void {
    this.lines = [];
    const add = (node: TreeNode, place: number, among: number) => {
      this.lines.push(this.line(node, place, among));
      if (this.open.has(node)) {
        node.inside.forEach((one, i) => add(one, i + 1, node.inside.length));
      }
    };
    add(this.root, 1, 1);
    if (!this.lines.some((line) => line.node === this.cursor)) this.cursor = this.root;
    this.body.replaceChildren(...this.lines.map((line) => line.element));
    this.lines.find((line) => line.node === this.cursor)?.element.setAttribute("tabindex", "0");
  }

  private all(): TreeNode[] {
    const found: TreeNode[] = [];
    const add = (node: TreeNode) => {
      found.push(node);
      node.inside.forEach(add);
    };
    add(this.root);
    return found;
  }

  /** Level by level, while the rows fit. */
  private unfoldSome(most: number, redraw = false): void {
    let level = [this.root];
    let rows = 1;
    while (level.length > 0) {
      const below = level.flatMap((node) => node.inside);
      if (below.length === 0 || (rows + below.length > most && rows > 1)) break;
      level.forEach((node) => this.open.add(node));
      rows += below.length;
      level = below;
    }
    if (redraw) this.redraw();
  }

  private foldAll(folded: boolean): void {
    this.open.clear();
    if (!folded) this.all().forEach((node) => this.open.add(node));
    this.redraw();
  }

  private toggle(node: TreeNode): void {
    if (node.inside.length === 0) return;
    if (!this.open.delete(node)) this.open.add(node);
    this.redraw();
    this.focus(node);
  }

  private focus(node: TreeNode): void {
    for (const line of this.lines) {
      line.element.tabIndex = line.node === node ? 0 : -1;
      if (line.node === node) line.element.focus();
    }
    this.cursor = node;
  }

  private listen(): void {
    const nodeOf = (event: Event) => {
      const row = event.target instanceof Element ? event.target.closest("tr") : null;
      return this.lines.find((line) => line.element === row)?.node;
    };
    this.body.addEventListener("click", (event) => {
      const node = nodeOf(event);
      const selecting = (getSelection()?.toString() ?? "") !== "";
      if (node !== undefined && !selecting) this.toggle(node);
    });
    this.body.addEventListener("keydown", (event) => {
      const node = nodeOf(event);
      if (node !== undefined && this.press(event, node)) event.preventDefault();
    });
  }

  private press(event: KeyboardEvent, node: TreeNode): boolean {
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    const at = this.lines.findIndex((line) => line.node === node);
    const to = (place: number) => {
      this.focus(this.lines[Math.max(0, Math.min(this.lines.length - 1, place))].node);
      return true;
    };
    const isOpen = this.open.has(node);
    switch (event.key) {
      case "ArrowDown":
        return to(at + 1);
      case "ArrowUp":
        return to(at - 1);
      case "Home":
        return to(0);
      case "End":
        return to(this.lines.length - 1);
      case "ArrowRight":
        if (node.inside.length === 0) return true;
        if (isOpen) return to(at + 1);
        this.toggle(node);
        return true;
      case "ArrowLeft":
        if (isOpen) this.toggle(node);
        else if (node.parent !== null) this.focus(node.parent);
        return true;
      case "Enter":
      case " ":
        this.toggle(node);
        return true;
      default:
        return false;
    }
  }

  /** Every module, unfolded, with numbers in full. */
  private tsv(): string {
    const names =
      "path kind calls time_us forward_us backward_us launches flops moved_bytes " +
      "round_trip_bytes roofline_us bound fate why";
    const before = this.compared ? ["before_us"] : [];
    const lines = [[...names.split(" "), ...before]];
    for (const node of this.all()) {
      if (node.rows.length !== 1) continue;
      const [row] = node.rows;
      const cells = [row.path, row.kind, row.calls, row.time_us, row.forward_us, row.backward_us];
      const more = [row.launches, row.flops, row.moved_bytes, row.round_trip_bytes];
      const last = [row.roofline_us, row.bound, row.fate ?? "", row.why ?? ""];
      const old = this.compared ? [node.before[0]?.time_us ?? ""] : [];
      lines.push([...cells, ...more, ...last, ...old].map(plain));
    }
    return tsv(lines);
  }
}

/** A figure in full; where there is none, that. */
function plain(cell: string | number | NotMeasured): string {
  return isMissing(cell) ? `not measured: ${cell.not_measured}` : String(cell);
}

function timeCell(value: number | NotMeasured | null): HTMLElement {
  return html("td", { class: "number", title: reason(value) }, measured(value, duration));
}

function isPart(node: TreeNode): boolean {
  return node.rows.every((row) => row.fate === "part" && row.time_us === 0);
}

function nowOf(node: TreeNode): number | NotMeasured {
  return sum(node.rows, (row) => row.time_us);
}

function wasOf(node: TreeNode): number | NotMeasured {
  return sum(node.before, (row) => row.time_us);
}

function changeOf(node: TreeNode): string {
  if (isPart(node)) return "–";
  const [was, now] = [wasOf(node), nowOf(node)];
  return isMissing(was) || isMissing(now) ? "–" : change(was, now);
}

/** None if it beat the roofline: the known peak is then too low. */
function rooflineShare({ rows }: TreeNode): string {
  const time = sum(rows, (row) => row.time_us);
  const least = rows.reduce((total, row) => total + row.roofline_us, 0);
  return isMissing(time) || time <= 0 || least <= 0 || least > time ? "–" : share(least, time);
}

function bar(part: number, whole: number): Element {
  const width = whole > 0 ? Math.max(0, Math.min(1, part / whole)) * 32 : 0;
  return svg(
    "svg",
    { width: 32, height: 8, class: "share-bar", "aria-hidden": "true" },
    svg("rect", { width: 32, height: 8, class: "track" }),
    svg("rect", { width, height: 8, class: "fill" }),
  );
}

function fateOf(node: TreeNode): Child[] {
  const fates = new Set(node.rows.map((row) => row.fate ?? ""));
  const [fate] = fates;
  if (fates.size > 1 || fate === "") return [fatesInside(node)];
  const why = whyOf(node.rows);
  return [
    html("span", { class: `swatch ${fateClass(fate)}`, "aria-hidden": "true" }),
    html("span", {}, FATES[fate]),
    why !== "" && html("span", { class: "why" }, ...breakable(` ${why}`)),
  ];
}

/** What became of the modules inside: "6 welded, 6 left". */
function fatesInside(node: TreeNode): string {
  const counts = { welded: 0, left: 0, "not measured": 0 };
  const add = (one: TreeNode) => {
    const fate = one.rows.length === 1 ? (one.rows[0].fate ?? "") : "";
    if (fate !== "" && fate !== "part") counts[fate] += 1;
    one.inside.forEach(add);
  };
  node.inside.forEach(add);
  return Object.entries(counts)
    .filter(([, number]) => number > 0)
    .map(([fate, number]) => `${number} ${fate}`)
    .join(", ");
}
