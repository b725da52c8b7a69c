/** Views of which one is seen at a time. A view is made when it is first asked for. */

import { html } from "./dom";

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
  const show = (chosen: number, focus: boolean) => {
    all.forEach((tab, i) => {
      panels[i].hidden = i !== chosen;
      buttons[i].setAttribute("aria-selected", String(i === chosen));
      buttons[i].tabIndex = i === chosen ? 0 : -1;
      if (i === chosen && panels[i].childElementCount === 0) panels[i].append(tab.make());
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
  return html(
    "div",
    { class: "views" },
    html("div", { class: "tabs", role: "tablist", "aria-label": label }, ...buttons),
    ...panels,
  );
}
