/** A drawing as a file of its own: styles become attributes, so it looks the same anywhere. */

const KEPT = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "stroke-linejoin",
  "opacity",
  "font-size",
  "font-weight",
  "font-style",
  "text-anchor",
  "dominant-baseline",
  "paint-order",
];
const FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

export function standalone(drawing: SVGSVGElement, title: string): string {
  const copy = drawing.cloneNode(true) as SVGSVGElement;
  settle(drawing, copy);
  const width = Number(drawing.getAttribute("width"));
  const height = Number(drawing.getAttribute("height"));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("viewBox", `0 0 ${width} ${height}`);
  copy.setAttribute("font-family", FONTS);
  const back = document.createElementNS(copy.namespaceURI, "rect");
  back.setAttribute("width", String(width));
  back.setAttribute("height", String(height));
  back.setAttribute("fill", getComputedStyle(document.body).backgroundColor);
  const name = document.createElementNS(copy.namespaceURI, "title");
  name.textContent = title;
  copy.prepend(name, back);
  return new XMLSerializer().serializeToString(copy);
}

function settle(from: Element, to: Element): void {
  const style = getComputedStyle(from);
  if (style.display === "none") {
    to.remove();
    return;
  }
  for (const name of KEPT) {
    const value = style.getPropertyValue(name);
    if (value !== "" && value !== "none 0px") to.setAttribute(name, value.replaceAll('"', "'"));
  }
  for (const name of ["class", "tabindex", "style", "role"]) to.removeAttribute(name);
  for (const name of to.getAttributeNames()) {
    if (name.startsWith("aria-") || name.startsWith("data-")) to.removeAttribute(name);
  }
  const inside = [...to.children];
  [...from.children].forEach((child, i) => settle(child, inside[i]));
}
