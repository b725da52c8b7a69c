/** Findings as cards: what, why, what to do, and the most that could be won. */

import { html } from "./dom";
import { capital, clipped, duration, figure, unbroken } from "./number_text";
import { isWholeTrace, type Finding, type Page } from "./page_data";
import type { Section } from "./plot";

/** Python's MOST_BOUND: nearly all of the step. */
const MOST_BOUND = 1000;
const MOST_MODULES = 6;

export function findingsSection(page: Page): Section | null {
  const sides = (page.sides ?? []).filter((side) => (side.findings ?? []).length > 0);
  if (sides.length === 0) return null;
  const several = (page.sides ?? []).length > 1;
  const content = sides.flatMap((side) => [
    several && html("h3", { class: "over-cards" }, capital(side.name)),
    html(
      "ol",
      { class: "cards" },
      ...(side.findings ?? []).map((one) => card(one, isWholeTrace(side))),
    ),
  ]);
  return { id: "findings", title: "Findings", short: "Findings", content };
}

function card(finding: Finding, wholeTrace: boolean): HTMLElement {
  const once = finding.once_us ?? 0;
  const most = finding.bound >= MOST_BOUND;
  const bound = once > 0 ? duration(once) : most ? `> ${MOST_BOUND}×` : `${figure(finding.bound)}×`;
  const label = once > 0 ? "once, in the first step" : "at most";
  const part = wholeTrace ? "what was recorded" : "each step";
  const saves =
    once > 0
      ? `Nothing in later steps: it is ${finding.waste}.`
      : `Saves at most ${duration(finding.saved_us)} of ${part}: ${finding.waste}.`;
  const modules = finding.modules ?? [];
  const more = modules.length - MOST_MODULES;
  return html(
    "li",
    { class: "card" },
    html(
      "p",
      { class: "bound" },
      html("span", { class: "muted" }, label),
      " ",
      html("strong", {}, bound),
    ),
    html("h3", {}, finding.title),
    html("p", {}, unbroken(finding.cause)),
    html("p", { class: "action" }, unbroken(finding.action)),
    html(
      "ul",
      { class: "evidence" },
      ...finding.evidence.map((one) =>
        html("li", { title: clipped(one) === one ? null : one }, unbroken(clipped(one))),
      ),
    ),
    html("p", { class: "saves" }, unbroken(saves)),
    modules.length > 0 &&
      html(
        "p",
        { class: "modules" },
        ...modules
          .slice(0, MOST_MODULES)
          .map((path) =>
            html(
              "code",
              { title: clipped(path) === path ? null : path },
              clipped(path) || "the model",
            ),
          ),
        more > 0 && `and ${more} more`,
      ),
  );
}
