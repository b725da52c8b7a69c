/** Elements. Texts become text nodes, so a name from a model is never parsed. */

type Listener = (event: never) => void;
type Value = string | number | boolean | null | undefined | Listener;
export type Attributes = Record<string, Value>;
export type Child = Node | string | null | undefined | false;

const SVG = "http://www.w3.org/2000/svg";

function filled<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** An HTML element; a function among the attributes listens to the event of that name. */
export function html<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return filled(document.createElement(tag), attributes, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

export function button(text: string, press: () => void, attributes: Attributes = {}) {
  return html("button", { type: "button", click: press, ...attributes }, text);
}

/** Longer names may be broken. */
const LONG_NAME = 18;

/** A text whose long names break after a dot, a colon or an underscore; copied as it is. */
export function breakable(text: string): Child[] {
  return text.split(/(?<=\s)/).flatMap((word) => {
    if (word.length <= LONG_NAME) return [word];
    const parts = word.split(/(?<=\w[._/]|::)(?=[\p{L}\d_])/u);
    return parts.flatMap((part, i): Child[] => (i === 0 ? [part] : [html("wbr"), part]));
  });
}

let names = 0;

/** An id that nothing else on the page has. */
export function freshId(prefix: string): string {
  names += 1;
  return `${prefix}-${names}`;
}

/** Drawings whose holders had no width so far. */
const undrawn = new Map<HTMLElement, () => void>();

/** Draws what is in sight now, without waiting for the browser to tell. */
export function drawWhatIsSeen(): void {
  for (const [holder, redraw] of undrawn) {
    if (holder.isConnected) redraw();
  }
}

/** Draws into `holder` at its width, again when the width or the theme changes. */
export function drawnToFit(holder: HTMLElement, draw: (width: number) => Element): () => void {
  let last = 0;
  const redraw = () => {
    const width = Math.floor(holder.clientWidth);
    if (width <= 0) return;
    undrawn.delete(holder);
    last = width;
    const drawing = draw(width);
    const height = drawing.getAttribute("height") ?? "0";
    // On paper, which has another width, it is scaled.
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    holder.replaceChildren(drawing);
  };
  undrawn.set(holder, redraw);
  new ResizeObserver(() => {
    if (Math.floor(holder.clientWidth) !== last) redraw();
  }).observe(holder);
  return redraw;
}

/** In the page, so that its styles are known, but out of sight; gone with the next frame. */
export function offstage(drawing: SVGSVGElement): SVGSVGElement {
  drawing.classList.add("offstage");
  document.body.append(drawing);
  requestAnimationFrame(() => drawing.remove());
  return drawing;
}

/** One of several: radio buttons in a row. */
export function choice(
  label: string,
  options: [string, string][],
  chosen: string,
  choose: (value: string) => void,
): HTMLElement {
  const name = freshId("choice");
  return html(
    "fieldset",
    { class: "choice" },
    html("legend", {}, label),
    ...options.map(([value, text]) => {
      const input = html("input", { type: "radio", name, value, checked: value === chosen });
      input.addEventListener("change", () => {
        if (input.checked) choose(value);
      });
      return html("label", {}, input, html("span", {}, text));
    }),
  );
}
