/** Patterns, so that colour is never alone in telling things apart. */

import { svg } from "./dom";

/** Lines across; `style` gives them their colour. */
export function hatching(id: string, style: string, step = 6): SVGDefsElement {
  const pattern = svg(
    "pattern",
    {
      id,
      width: step,
      height: step,
      patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)",
    },
    svg("path", { d: `M0 0V${step}`, class: style }),
  );
  return svg("defs", {}, pattern);
}

export function dotting(id: string, style: string): SVGDefsElement {
  const pattern = svg(
    "pattern",
    { id, width: 7, height: 7, patternUnits: "userSpaceOnUse" },
    svg("circle", { cx: 2, cy: 2, r: 1.1, class: style }),
  );
  return svg("defs", {}, pattern);
}
