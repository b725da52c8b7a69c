/** The section of the timelines, one for each side that has one. */

import { html } from "./dom";
import { capital, count, duration, sentences } from "./number_text";
import type { Page, PageSide, Timeline } from "./page_data";
import { figureOf, type Section, type Table } from "./plot";
import { tabs, type Tab } from "./tabs";
import { TimelineView } from "./timeline_view";

export function timelineSection(page: Page): Section | null {
  const sides = [...(page.sides ?? [])].reverse();
  const found = sides.flatMap((side): Tab[] => {
    const { timeline } = side;
    if (!timeline) return [];
    const id = side === sides[0] ? "timeline-now" : "timeline-before";
    const name = side.name ? capital(side.name) : "Step";
    return [{ id, name, make: () => timelineOf(id, side, timeline) }];
  });
  if (found.length === 0) return null;
  return {
    id: "timeline",
    title: "Timeline",
    short: "Timeline",
    content: [tabs("Timelines", found)],
  };
}

function timelineOf(id: string, side: PageSide, timeline: Timeline): HTMLElement {
  const hosts = timeline.lanes.filter((lane) => !lane.device).length;
  const devices = timeline.lanes.length - hosts;
  const spans = timeline.lanes.reduce((sum, lane) => sum + lane.start_us.length, 0);
  const merged = timeline.lanes.reduce((sum, lane) => sum + (lane.merged ?? 0), 0);
  const lanes = [
    hosts > 0 ? `${count(hosts)} host ${hosts === 1 ? "thread" : "threads"}` : "",
    devices > 0 ? `${count(devices)} device ${devices === 1 ? "stream" : "streams"}` : "",
  ].filter((one) => one !== "");
  const title = `What ran when: ${duration(timeline.end_us)}${side.name ? `, ${side.name}` : ""}`;
  const view = new TimelineView(timeline, side.modules, `Timeline of ${title}`);
  const note = [
    timeline.note ?? "",
    merged > 0
      ? `${count(merged)} spans too short to see were joined with their neighbours; no time is lost.`
      : "",
  ];
  return html(
    "div",
    {},
    figureOf({
      id: `${id}-plot`,
      title,
      unit: `${lanes.join(", ")}; ${count(spans)} spans`,
      body: [view.element],
      table: () => tableOfSpans(side, timeline),
      drawing: () => view.drawing(),
      note: sentences(note),
    }),
  );
}

/** The longest first. */
function tableOfSpans(side: PageSide, timeline: Timeline): Table {
  const rows = timeline.lanes.flatMap((lane) =>
    lane.start_us.map((start, i) => [
      timeline.names[lane.name_index[i]],
      lane.device ? `${lane.name} (device)` : lane.name,
      lane.module[i] >= 0 ? side.modules[lane.module[i]].path : "",
      start,
      lane.duration_us[i],
    ]),
  );
  rows.sort((a, b) => Number(b[4]) - Number(a[4]));
  return {
    columns: [
      { name: "op" },
      { name: "lane" },
      { name: "module" },
      { name: "from, µs", show: duration },
      { name: "time, µs", show: duration },
    ],
    rows,
  };
}
