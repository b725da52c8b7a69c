/** The small bar that stays on top: where one is and where one can go; and the theme. */

import { choice, html } from "./dom";

const THEME = "torchweld-theme";

export function navigation(entries: [string, string][]): HTMLElement {
  const links = entries.map(([id, name]) => html("a", { href: `#${id}` }, name));
  follow(entries, links);
  return html(
    "nav",
    { class: "top", "aria-label": "Sections" },
    html("ul", {}, ...links.map((link) => html("li", {}, link))),
  );
}

/** Marks the section that is being read. */
function follow(entries: [string, string][], links: HTMLElement[]): void {
  const mark = () => {
    const limit = innerHeight * 0.35;
    let current = 0;
    entries.forEach(([id], i) => {
      const section = document.getElementById(id);
      if (section !== null && section.getBoundingClientRect().top < limit) current = i;
    });
    links.forEach((link, i) => {
      if (i === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
  };
  let waiting = false;
  addEventListener(
    "scroll",
    () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        mark();
      });
    },
    { passive: true },
  );
  requestAnimationFrame(mark);
}

export function themeSwitch(): HTMLElement {
  const kept = recall();
  apply(kept);
  return choice(
    "Theme",
    [
      ["auto", "Auto"],
      ["light", "Light"],
      ["dark", "Dark"],
    ],
    kept,
    (theme) => {
      apply(theme);
      keep(theme);
    },
  );
}

function apply(theme: string): void {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new Event("theme"));
}

/** A page in a frame may have no storage; then the choice lasts as long as the page. */
function recall(): string {
  try {
    const theme = localStorage.getItem(THEME);
    return theme === "light" || theme === "dark" ? theme : "auto";
  } catch {
    return "auto";
  }
}

function keep(theme: string): void {
  try {
    localStorage.setItem(THEME, theme);
  } catch {
    // Nothing is lost but the choice.
  }
}
