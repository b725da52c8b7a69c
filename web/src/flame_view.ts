/** A flame as a drawing to walk through: zoom, search, keys. The root is at the top. */

import { button, drawnToFit, freshId, html, svg } from "./dom";
import { search, type Frames, type Matches } from "./flame_frames";
import { brief, count, duration, share } from "./number_text";
import { hideTooltip, showTooltip } from "./tooltip";
import { hatching } from "./hatching";

const ROW = 21;
/** Frames narrower than this are not drawn; their time is still in the frame around them. */
const LEAST_PIXELS = 0.5;
const LEAST_LABEL = 26;

export class FlameView {
  readonly element: HTMLElement;
  private frames: Frames;
  private root = 0;
  private cursor = 0;
  private matches: Matches | null = null;
  private drawn: number[] = [];
  private scale = 1;
  /** Of its own: a pattern in a view that is hidden draws nothing in another. */
  private readonly hatch = freshId("gone");
  private readonly holder = html("div", { class: "flame-drawing" });
  private readonly crumbs = html("ol", { class: "crumbs", "aria-label": "Zoomed into" });
  private readonly said = html("p", { class: "flame-said", role: "status" });
  private readonly found = html("span", { class: "found", role: "status" });
  private readonly field: HTMLInputElement;
  private readonly redraw: () => void;

  constructor(
    frames: Frames,
    private readonly label: string,
    controls: HTMLElement[] = [],
  ) {
    this.frames = frames;
    this.field = html("input", {
      type: "search",
      placeholder: "linear, gelu, h.0 …",
      autocomplete: "off",
      spellcheck: "false",
      input: () => this.seek(),
    });
    const field = html("label", { class: "search" }, html("span", {}, "Search"), this.field);
    const out = button("Whole step", () => this.zoom(0, true), { class: "quiet" });
    this.element = html(
      "div",
      { class: "flame" },
      html("div", { class: "controls" }, ...controls, field, this.found, out),
      this.crumbs,
      this.holder,
      this.said,
    );
    this.listen();
    this.redraw = drawnToFit(this.holder, (width) => this.draw(width));
    this.sayHelp();
  }

  drawing(): SVGSVGElement | null {
    return this.holder.querySelector("svg");
  }

  /** Other widths or colours of the same frames. */
  show(frames: Frames): void {
    this.frames = frames;
    while (this.root > 0 && frames.width[this.root] <= 0) this.root = frames.parent[this.root];
    this.cursor = this.root;
    this.seek();
    this.redraw();
    this.sayHelp();
  }

  private sayHelp(): void {
    this.said.textContent =
      "Click a frame, or press Enter on it, to zoom in. Arrows move, Escape or Backspace zooms out.";
  }

  private seek(): void {
    const { frames } = this;
    this.matches = search(frames, this.field.value);
    const { matches } = this;
    this.found.textContent =
      matches === null
        ? ""
        : `${count(matches.count)} ${matches.count === 1 ? "frame" : "frames"}, ` +
          `${duration(matches.time)}, ${share(matches.time, frames.width[0])} of the step`;
    this.redraw();
  }

  private draw(width: number): SVGSVGElement {
    const { frames, root } = this;
    const from = frames.start[root];
    const span = frames.width[root];
    this.scale = span > 0 ? width / span : 0;
    this.drawn = [];
    let deepest = 0;
    const parts: Element[] = [];
    const labels: Element[] = [];
    const above = new Set(this.path(root));
    for (let i = 0; i < frames.parent.length; i++) {
      const inside = frames.depth[i] > frames.depth[root];
      if (!above.has(i) && !inside) continue;
      const x = inside ? (frames.start[i] - from) * this.scale : 0;
      const w = inside ? frames.width[i] * this.scale : width;
      if (w < LEAST_PIXELS || x < -0.01 || x + w > width + 0.01) continue;
      this.drawn.push(i);
      deepest = Math.max(deepest, frames.depth[i]);
      const style = this.styleOf(i, !inside && i !== root);
      parts.push(this.frame(i, x, w, style));
      const text =
        w >= LEAST_LABEL
          ? fitted(frames.labelOf(i), (w - 10) * (style.includes("strong") ? 0.86 : 0.96))
          : "";
      const y = (frames.depth[i] + 0.5) * ROW;
      if (text !== "") labels.push(svg("text", { x: x + 5, y, class: style }, text));
    }
    const height = (deepest + 1) * ROW;
    this.showCrumbs();
    return svg(
      "svg",
      { width, height, role: "tree", "aria-label": this.label },
      hatching(this.hatch, "hatch-gone"),
      ...parts,
      // Apart from the frames, whose names for screen readers are not cut.
      svg("g", { class: "labels", "aria-hidden": "true" }, ...labels),
    );
  }

  private styleOf(i: number, above: boolean): string {
    const { frames, matches } = this;
    const seen = matches === null ? "" : matches.frames[i] === 1 ? " match" : " dim";
    const kind = frames.classOf(i);
    const more = kind.includes("welded") ? " strong" : kind === "state-new" ? " on-new" : "";
    return `${seen}${more}${above ? " above" : ""}`;
  }

  private frame(i: number, x: number, w: number, style: string): SVGGElement {
    const { frames } = this;
    const y = frames.depth[i] * ROW;
    const gap = w > 3 ? 1 : 0;
    const group = svg("g", {
      class: `frame ${frames.classOf(i)}${style}`,
      role: "treeitem",
      "aria-level": frames.depth[i] + 1,
      "aria-label": frames.linesOf(i).slice(0, 2).map(brief).join(", "),
      "aria-selected": String(i === this.cursor),
      tabindex: i === this.cursor ? 0 : -1,
      "data-frame": i,
    });
    const box = {
      x,
      y,
      width: Math.max(LEAST_PIXELS, w - gap),
      height: ROW - 1,
      rx: w > 6 ? 2 : 0,
    };
    group.append(svg("rect", box));
    if (frames.classOf(i) === "state-gone") {
      group.append(svg("rect", { ...box, class: "over", fill: `url(#${this.hatch})` }));
    }
    return group;
  }

  private path(frame: number): number[] {
    const found = [];
    for (let i = frame; i >= 0; i = this.frames.parent[i]) found.unshift(i);
    return found;
  }

  private showCrumbs(): void {
    const path = this.path(this.root);
    this.crumbs.hidden = path.length < 2;
    this.crumbs.replaceChildren(
      ...path.map((frame, i) => {
        const name = brief(this.frames.nameOf(frame));
        const last = i === path.length - 1;
        const inside = last
          ? html("span", { "aria-current": "true" }, name)
          : button(name, () => this.zoom(frame, false));
        return html("li", {}, inside);
      }),
    );
  }

  private zoom(frame: number, focus: boolean): void {
    if (this.frames.width[frame] <= 0) return;
    this.root = frame;
    this.cursor = frame;
    hideTooltip();
    this.redraw();
    if (focus) this.focus(frame);
    else this.say(frame);
  }

  private say(frame: number): void {
    this.said.textContent = this.frames
      .linesOf(frame)
      .filter((line) => line !== "")
      .map(brief)
      .join(" · ");
  }

  private elementOf(frame: number): SVGGElement | null {
    return this.holder.querySelector(`[data-frame="${frame}"]`);
  }

  private focus(frame: number): void {
    const old = this.elementOf(this.cursor);
    old?.setAttribute("tabindex", "-1");
    old?.setAttribute("aria-selected", "false");
    this.cursor = frame;
    const fresh = this.elementOf(frame);
    fresh?.setAttribute("tabindex", "0");
    fresh?.setAttribute("aria-selected", "true");
    fresh?.focus();
    this.say(frame);
  }

  private listen(): void {
    const frameAt = (event: Event) => {
      const group = event.target instanceof Element ? event.target.closest("[data-frame]") : null;
      return group === null ? null : Number(group.getAttribute("data-frame"));
    };
    this.holder.addEventListener("click", (event) => {
      const frame = frameAt(event);
      if (frame !== null) this.zoom(frame, true);
    });
    this.holder.addEventListener("focusin", (event) => {
      const frame = frameAt(event);
      if (frame !== null && frame !== this.cursor) this.focus(frame);
      else if (frame !== null) this.say(frame);
    });
    this.holder.addEventListener("pointermove", (event) => {
      const frame = frameAt(event);
      if (frame === null) hideTooltip();
      else showTooltip(event.clientX, event.clientY, this.frames.linesOf(frame));
    });
    this.holder.addEventListener("pointerleave", hideTooltip);
    this.holder.addEventListener("keydown", (event) => {
      const frame = frameAt(event);
      if (frame !== null && this.press(event, frame)) event.preventDefault();
    });
  }

  /** Whether the key meant something. */
  private press(event: KeyboardEvent, frame: number): boolean {
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    const { parent } = this.frames;
    switch (event.key) {
      case "Enter":
      case " ":
        this.zoom(frame, true);
        return true;
      case "Escape":
      case "Backspace":
        this.zoom(Math.max(0, parent[this.root]), true);
        return true;
      case "Home":
        this.focus(this.root);
        return true;
      case "ArrowUp":
        if (parent[frame] >= 0) this.focus(parent[frame]);
        return true;
      case "ArrowDown":
        return this.move(this.drawn.find((i) => parent[i] === frame));
      case "ArrowRight":
        return this.move(this.beside(frame, 1));
      case "ArrowLeft":
        return this.move(this.beside(frame, -1));
      default:
        return false;
    }
  }

  private move(frame: number | undefined): boolean {
    if (frame !== undefined) this.focus(frame);
    return true;
  }

  private beside(frame: number, step: number): number | undefined {
    const { depth, start } = this.frames;
    const row = this.drawn.filter((i) => depth[i] === depth[frame]);
    row.sort((a, b) => start[a] - start[b]);
    return row[row.indexOf(frame) + step];
  }
}

const ruler = document.createElement("canvas").getContext("2d");
const widths = new Map<string, number>();

function widthOf(text: string): number {
  let width = widths.get(text);
  if (width === undefined) {
    if (ruler !== null && widths.size === 0)
      ruler.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    width = ruler?.measureText(text).width ?? text.length * 7;
    widths.set(text, width);
  }
  return width;
}

/** In a font of another size than the 12 pixels of labels. */
export function textWidth(text: string, size: number): number {
  return (widthOf(text) * size) / 12;
}

/** As much of a text as fits, with an ellipsis; "" if that would say nothing. */
export function fitted(text: string, room: number): string {
  const whole = widthOf(text);
  if (whole <= room) return text;
  const kept = Math.floor((room / whole) * text.length) - 1;
  return kept < 2 ? "" : `${text.slice(0, kept)}…`;
}
