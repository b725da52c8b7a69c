/** The verdict: one sentence, which is in the page already, and the step split by its account. */

import { netted, PARTS } from "./account";
import { drawnToFit, html, svg } from "./dom";
import { fitted } from "./flame_view";
import { hatching } from "./hatching";
import {
  change,
  count,
  duration,
  measured,
  reason,
  sentences,
  share,
  unbroken,
} from "./number_text";
import {
  isMissing,
  isWholeTrace,
  namesModules,
  stepsOf,
  type Page,
  type PageSide,
  type Split,
} from "./page_data";
import { onPaper } from "./paper";
import { exactShare, figureOf, type Exact, type Table } from "./plot";

const BAR = 46;
const HEAD = 22;
const BELOW = 14;
const REDACTED =
  "Names on this page were replaced by stand-ins, such as m1 for a module. " +
  "A stand-in is the same name all over this page, and another one on another page.";
/** A sentence with more characters is set smaller. */
const LONG = 120;

interface Bar {
  side: PageSide;
  parts: number[];
  total: number;
}

export function fillVerdict(section: Element, page: Page): void {
  const sides = page.sides ?? [];
  const doubts = page.not_comparable ?? [];
  const title = section.querySelector("h2");
  if (title !== null) title.textContent = unbroken(page.verdict);
  if (page.verdict.length > LONG) section.classList.add("long");
  if (page.redacted === true) section.append(html("p", { class: "redacted" }, REDACTED));
  if (sides.length > 0) section.append(keyFigures(sides));
  for (const why of reasonsOf(sides, doubts, page.verdict))
    section.append(html("p", { class: "doubt" }, why));
  const bars = sides.flatMap((side): Bar[] => {
    if (isMissing(side.account)) return [];
    const parts = netted(side.account);
    return [{ side, parts, total: parts.reduce((a, b) => a + b, 0) }];
  });
  if (bars.length > 0) section.append(accountPlot(bars));
  const notes = new Set(page.notes ?? []);
  const notices = new Set(sides.flatMap((side) => side.notices ?? []));
  notes.forEach((note) => notices.delete(note));
  if (notes.size > 0) section.append(noteList(notes));
  if (notices.size > 0) {
    let wasOpen = false;
    const many = notices.size > 1 ? `${notices.size} notes` : "A note";
    const summary = html("summary", {}, `${many} on how it was measured`);
    const details = html("details", { class: "notices" }, summary, noteList(notices));
    section.append(details);
    onPaper(
      () => {
        wasOpen = details.open;
        details.open = true;
      },
      () => (details.open = wasOpen),
    );
  }
}

function noteList(notes: Set<string>): HTMLElement {
  const items = [...notes].map((note) => html("li", {}, sentences([note])));
  return html("ul", { class: "notes" }, ...items);
}

/** Why figures are missing or cannot be compared, each reason once, unless the verdict says it. */
function reasonsOf(sides: PageSide[], doubts: string[], verdict: string): string[] {
  const found = new Map<string, string>();
  const add = (why: string, words: string) => {
    const said = [verdict, ...found.keys()].some((one) => one.includes(why));
    if (why !== "" && !said) found.set(why, words);
  };
  for (const doubt of doubts) add(doubt, `not comparable: ${doubt}`);
  for (const side of sides) {
    const whose = side.name ? ` ${side.name}` : "";
    const step = [side.step_us, side.account, side.explained].map(reason);
    for (const why of step) add(why, `the step${whose} was not measured: ${why}`);
    const faults = faultsOf(side);
    if (isMissing(faults)) {
      add(reason(faults), `page faults${whose} were not measured: ${reason(faults)}`);
    }
  }
  return [...found.values()].map((words) => sentences([words]));
}

/** No trace tells them, which need not be said of each. */
function faultsOf(side: PageSide): PageSide["faults_per_step"] {
  return side.about.source === "trace" ? null : side.faults_per_step;
}

/** No ratio of the two steps: profiles are no paired comparison, whose word is the verdict. */
function keyFigures(sides: PageSide[]): HTMLElement {
  const list = html("dl", { class: "figures" });
  const add = (name: string, value: string) => {
    list.append(html("div", {}, html("dt", {}, name), html("dd", {}, value)));
  };
  for (const side of sides) {
    const steps = stepsOf(side);
    const name = `${stepName(side)}${side.name ? `, ${side.name}` : ""}`;
    add(
      steps > 1 ? `${name}, mean of ${steps}` : name,
      measured(side.step_us, (us) => duration(us / steps)),
    );
  }
  const last = sides[sides.length - 1];
  // It counts what is explained down to modules, so without modules it says nothing.
  if (!isMissing(last.explained) && namesModules(last)) add("Explained", share(last.explained, 1));
  const faults = faultsOf(last);
  if (faults !== null && faults !== undefined) add("Page faults per step", measured(faults, count));
  return list;
}

function stepName(side: PageSide): string {
  if (isWholeTrace(side)) return "Recorded";
  return side.about.training === true ? "Training step" : "Step";
}

/** What the bar covers: on a device not the steps, but the time between its kernels. */
function coverOf(side: PageSide): string {
  if (side.device_flame) return "from the first kernel to the last";
  if (isWholeTrace(side)) return "all that was recorded";
  return stepsOf(side) > 1 ? `${stepsOf(side)} steps` : "one step";
}

function accountPlot(bars: Bar[]): HTMLElement {
  const holder = html("div", { class: "drawing" });
  drawnToFit(holder, (width) => drawBars(bars, width));
  const table = (): Table => ({
    columns: [
      { name: "part" },
      ...bars.flatMap((bar) => {
        const name = bar.side.name || "time";
        return [{ name: `${name}, µs`, show: duration }, { name: `${name}, share` }];
      }),
      ...(bars.length === 2 ? [{ name: "change" }] : []),
      { name: "what it is" },
    ],
    rows: PARTS.map((part, i) => [
      part.name,
      ...bars.flatMap((bar) => [bar.parts[i], exactShare(bar.parts[i], bar.total)]),
      ...(bars.length === 2 ? [exactChange(bars[0].parts[i], bars[1].parts[i])] : []),
      part.what,
    ]),
  });
  return figureOf({
    id: "account",
    title: bars.length > 1 ? "Where the time went, before and after" : "Where the time goes",
    unit: [...new Set(bars.map((bar) => coverOf(bar.side)))].join(" → "),
    body: [holder, accountLegend(bars)],
    table,
    printed: PARTS.length,
    drawing: () => holder.querySelector("svg"),
    note: bars.some((bar) => ((bar.side.account as Split).unexplained_us ?? 0) < 0)
      ? "The parts added up to more than the step, so each was scaled down."
      : undefined,
  });
}

function exactChange(before: number, after: number): Exact {
  return { ...exactShare(after - before, before), shown: change(before, after) };
}

/** Each part with its time on every side: the bar's labels, for parts too narrow to have one. */
function accountLegend(bars: Bar[]): HTMLElement {
  const items = PARTS.map((part, i) => {
    const times = bars.map((bar) => duration(bar.parts[i])).join(" → ");
    return html(
      "li",
      { title: part.what },
      html("span", { class: `swatch part-${i}`, "aria-hidden": "true" }),
      html("span", { class: "name" }, part.name),
      html("span", { class: "value" }, times),
    );
  });
  return html("ul", { class: "legend wide" }, ...items);
}

function drawBars(bars: Bar[], width: number): SVGSVGElement {
  const longest = Math.max(...bars.map((bar) => bar.total));
  const row = HEAD + BAR + BELOW;
  const drawing = svg(
    "svg",
    {
      width,
      height: bars.length * row,
      role: "img",
      "aria-label": bars.map(barInWords).join(". "),
    },
    hatching("account-rest", "hatch-rest"),
  );
  bars.forEach((bar, i) => {
    const scale = width / longest;
    const y = i * row;
    const name = bar.side.name ? `${bar.side.name}  ` : "";
    drawing.append(
      svg(
        "text",
        { x: 0, y: y + HEAD - 8, class: "bar-head" },
        svg("tspan", { class: "muted" }, name),
        svg("tspan", { class: "strong" }, duration(bar.total)),
      ),
    );
    let x = 0;
    bar.parts.forEach((us, part) => {
      if (us > 0) drawing.append(...segment(x, y + HEAD, us * scale, part, us));
      x += us * scale;
    });
  });
  return drawing;
}

function segment(x: number, y: number, width: number, part: number, us: number): Element[] {
  const box = { x, y, width: Math.max(0.5, width - (width > 3 ? 1.5 : 0)), height: BAR };
  const found: Element[] = [svg("rect", { ...box, class: `part-${part}` })];
  if (part === PARTS.length - 1) found.push(svg("rect", { ...box, fill: "url(#account-rest)" }));
  const texts = [PARTS[part].name, duration(us)];
  if (texts.every((text) => fitted(text, width - 20) === text)) {
    found.push(
      svg("text", { x: x + 8, y: y + 18, class: `on-part-${part}` }, texts[0]),
      svg("text", { x: x + 8, y: y + 35, class: `on-part-${part} strong` }, texts[1]),
    );
  }
  return found;
}

function barInWords(bar: Bar): string {
  const parts = PARTS.map((part, i) => `${part.name} ${duration(bar.parts[i])}`);
  return `${bar.side.name || "step"} ${duration(bar.total)}: ${parts.join(", ")}`;
}
