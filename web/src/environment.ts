/** What it ran on, and the command that repeats it. */

import { html, type Child } from "./dom";
import type { Page } from "./page_data";
import { copyButton, type Section } from "./plot";

/** A command that shows what was measured before; it measures nothing. */
const SHOWS = /^torchweld (?:report\b|bench\b.* --show\b|profile \S+\.json(?:\.gz)?\b)/;

export function environmentSection(page: Page): Section | null {
  const entries = page.environment ?? [];
  const command = page.command ?? "";
  if (entries.length === 0 && command === "") return null;
  const content: Child[] = [];
  if (command !== "") {
    content.push(
      html("h3", {}, SHOWS.test(command) ? "To make this page again" : "To repeat it"),
      html(
        "div",
        { class: "command" },
        html(
          "pre",
          { tabindex: 0, role: "region", "aria-label": "Command" },
          html("code", {}, command),
        ),
        copyButton("Copy", () => command),
      ),
    );
  }
  if (entries.length > 0) {
    const rows = entries.map(([name, value]) =>
      html("tr", {}, html("th", { scope: "row" }, name), html("td", {}, value)),
    );
    content.push(html("table", { class: "environment" }, html("tbody", {}, ...rows)));
  }
  return { id: "environment", title: "Environment", short: "Environment", content };
}
