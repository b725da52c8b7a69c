/** Spans by lane and depth, ready to be found by time. Data in, data out. */

import type { Timeline } from "./page_data";

/** Spans of one lane at one depth, by start; they do not overlap. */
export interface SpanRow {
  lane: number;
  depth: number;
  /** Numbers of spans in the lane. */
  spans: Int32Array;
}

export interface Span {
  lane: number;
  span: number;
}

export function spanRows(timeline: Timeline): SpanRow[] {
  const rows: SpanRow[] = [];
  timeline.lanes.forEach((lane, number) => {
    const depths: number[][] = [];
    lane.depth.forEach((depth, i) => {
      (depths[depth] ??= []).push(i);
    });
    depths.forEach((spans, depth) => {
      rows.push({ lane: number, depth, spans: Int32Array.from(spans) });
    });
    if (lane.depth.length === 0) rows.push({ lane: number, depth: 0, spans: new Int32Array() });
  });
  return rows;
}

/** The first span of a row that ends after a time. */
export function firstAfter(timeline: Timeline, row: SpanRow, us: number): number {
  const { start_us: start, duration_us: length } = timeline.lanes[row.lane];
  let low = 0;
  let high = row.spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    const span = row.spans[middle];
    if (start[span] + length[span] <= us) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The span at a time; `slack` finds one too short to hit. */
export function spanAt(timeline: Timeline, row: SpanRow, us: number, slack: number): number | null {
  const { start_us: start } = timeline.lanes[row.lane];
  const at = firstAfter(timeline, row, us - slack);
  if (at >= row.spans.length) return null;
  return start[row.spans[at]] <= us + slack ? row.spans[at] : null;
}
