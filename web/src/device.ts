/** Host and device side by side, the runtime's calls, and the matrix products by name. */

import { html } from "./dom";
import { capital, count, duration, sentences } from "./number_text";
import type { CallRow, DeviceView, GemmName, Page, ProductRow } from "./page_data";
import { exactShare, titledTable, type Cell, type Section, type Table } from "./plot";
import { tabs, type Tab } from "./tabs";

const UNDER_THE_PROFILER = "Times of the host are those under the profiler.";

export function deviceSection(page: Page): Section | null {
  const sides = [...(page.sides ?? [])].reverse();
  const found = sides.flatMap((side): Tab[] => {
    const { device } = side;
    if (!device) return [];
    const id = side === sides[0] ? "device-now" : "device-before";
    return [{ id, name: capital(side.name) || "Step", make: () => deviceOf(id, device) }];
  });
  if (found.length === 0) return null;
  return {
    id: "device",
    title: "Host and device",
    short: "Device",
    content: [tabs("Host and device", found)],
  };
}

function deviceOf(id: string, device: DeviceView): HTMLElement {
  const { products } = device;
  return html(
    "div",
    {},
    titledTable(`${id}-times`, device.name, sideBySide(device), UNDER_THE_PROFILER),
    device.host.calls.length > 0 &&
      titledTable(`${id}-calls`, "Calls of the runtime", callTable(device.host.calls)),
    products.length > 0 &&
      titledTable(
        `${id}-products`,
        "Matrix products",
        productTable(products),
        sentences([device.cores, "what the name of a kernel does not say is left empty"]),
      ),
  );
}

type Time = [what: string, count: number | null, us: number];

function hostTimes({ host, launches, occupancy_queries: queries }: DeviceView): Time[] {
  return [
    ["outermost ops", host.ops, host.ops_us],
    ["of them, launches", launches, host.launch_us],
    ["occupancy queries", queries, host.occupancy_us],
    ["waiting for the device", null, host.waiting_us],
  ];
}

function deviceTimes(device: DeviceView): Time[] {
  return [
    ["kernels and copies", device.kernels, device.launched_us],
    ["computing", null, device.compute_us],
    ["only copies or communication", null, device.non_compute_us],
    ["idle", null, device.idle_us],
  ];
}

function sideBySide(device: DeviceView): Table {
  const onDevice = deviceTimes(device);
  const times = ([what, number, us]: Time): Cell[] => [
    number === null ? what : `${what} (${count(number)})`,
    us,
  ];
  return {
    columns: [
      { name: "host" },
      { name: "time", show: duration },
      { name: "device" },
      { name: "time", show: duration },
    ],
    rows: hostTimes(device).map((one, i) => [...times(one), ...times(onDevice[i])]),
  };
}

function callTable(calls: CallRow[]): Table {
  return {
    columns: [{ name: "call" }, { name: "count", show: count }, { name: "time", show: duration }],
    rows: calls.map((call) => [call.name, call.count, call.us]),
  };
}

function productTable(products: ProductRow[]): Table {
  const whole = products.reduce((sum, row) => sum + row.us, 0);
  return {
    columns: [
      { name: "kernel" },
      { name: "count", show: count },
      { name: "time", show: duration },
      { name: "share", show: String },
      { name: "by", brief: true },
      { name: "tile", brief: true },
      { name: "layout", brief: true },
      { name: "type", brief: true },
      { name: "tensor cores", brief: true },
    ],
    rows: products.map((row) => [
      row.name,
      row.count,
      row.us,
      exactShare(row.us, whole),
      ...nameCells(row.gemm),
    ]),
  };
}

function nameCells(gemm: GemmName | null): Cell[] {
  if (gemm === null) return ["", "", "", "", ""];
  const cores = gemm.tensor_cores ?? null;
  return [
    gemm.maker,
    (gemm.tile ?? []).join("×"),
    gemm.layout ?? "",
    gemm.dtype ?? "",
    cores === null ? "" : cores ? "yes" : "no",
  ];
}
