/** The one small box that says what is under the pointer. Escape hides it. */

import { html } from "./dom";
import { brief } from "./number_text";

const GAP = 14;
let box: HTMLElement | null = null;

function theBox(): HTMLElement {
  if (box === null) {
    box = html("div", { class: "tooltip", "aria-hidden": "true", hidden: true });
    document.body.append(box);
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hideTooltip();
    });
    document.addEventListener("scroll", hideTooltip, { passive: true });
  }
  return box;
}

/** The first line is what it is about. */
export function showTooltip(x: number, y: number, lines: string[]): void {
  const shown = theBox();
  shown.replaceChildren(
    ...lines
      .filter((line) => line !== "")
      .map((line, i) => html("div", { class: i === 0 && "what" }, brief(line))),
  );
  shown.hidden = false;
  const { width, height } = shown.getBoundingClientRect();
  const right = x + GAP + width > innerWidth - 8;
  const below = y + GAP + height > innerHeight - 8;
  shown.style.left = `${Math.max(8, right ? x - GAP - width : x + GAP)}px`;
  shown.style.top = `${Math.max(8, below ? y - GAP - height : y + GAP)}px`;
}

export function hideTooltip(): void {
  if (box !== null) box.hidden = true;
}

/** Tooltips for a whole drawing: `linesOf` the element under the pointer, or null. */
export function withTooltips(holder: Element, linesOf: (target: Element) => string[] | null): void {
  holder.addEventListener("pointermove", (event) => {
    const { target, clientX, clientY } = event as PointerEvent;
    const lines = target instanceof Element ? linesOf(target) : null;
    if (lines === null) hideTooltip();
    else showTooltip(clientX, clientY, lines);
  });
  holder.addEventListener("pointerleave", hideTooltip);
}
