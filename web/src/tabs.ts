/** Views of which one is seen at a time. A view is made when it is first asked for. */

import { html } from "./dom";
import { onPaper } from "./paper";

export interface Tab {
  id: string;
  name: string;
  make: () => HTMLElement;
}

export function tabs(label: string, all: Tab[]): HTMLElement {
  if (all.length === 1) {
    return html("div", { class: "views" }, html("div", { id: all[0].id }, all[0].make()));
  }
  const panels = all.map((tab) =>
    html("div", {
      id: tab.id,
      class: "view",
      role: "tabpanel",
      "aria-labelledby": `tab-${tab.id}`,
      hidden: true,
    }),
  );
  const buttons = all.map((tab, i) =>
    html(
      "button",
      {
        type: "button",
        role: "tab",
        id: `tab-${tab.id}`,
        "aria-controls": tab.id,
        click: () => show(i, false),
        keydown: (event: KeyboardEvent) => press(event, i),
      },
      tab.name,
    ),
  );
  let shown = 0;
  const fill = (i: number) => {
    if (panels[i].childElementCount === 0) panels[i].append(all[i].make());
  };
  const show = (chosen: number, focus: boolean) => {
    shown = chosen;
    all.forEach((_, i) => {
      panels[i].hidden = i !== chosen;
      buttons[i].setAttribute("aria-selected", String(i === chosen));
      buttons[i].tabIndex = i === chosen ? 0 : -1;
      if (i === chosen) fill(i);
    });
    if (focus) buttons[chosen].focus();
  };
  const press = (event: KeyboardEvent, at: number) => {
    const places: Record<string, number> = {
      ArrowRight: (at + 1) % all.length,
      ArrowLeft: (at + all.length - 1) % all.length,
      Home: 0,
      End: all.length - 1,
    };
    if (!(event.key in places)) return;
    event.preventDefault();
    show(places[event.key], true);
  };
  show(0, false);
  // Paper has no tabs to choose from: all views stand below each other.
  onPaper(
    () => {
      panels.forEach((panel, i) => {
        fill(i);
        panel.hidden = false;
      });
    },
    () => show(shown, false),
  );
  return html(
    "div",
    { class: "views" },
    html("div", { class: "tabs", role: "tablist", "aria-label": label }, ...buttons),
    ...panels,
  );
}
