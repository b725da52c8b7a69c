/** What a page shows, as `page_records.py` says it. Fields with a default may be missing. */

export interface NotMeasured {
  not_measured: string;
}
/** JSON has no NaN and no infinity. */
export type Measured = number | "nan" | "inf" | "-inf";
export type Interval = [Measured, Measured];

export type Fate = "welded" | "part" | "left" | "not measured" | "";
export type FrameKind = "module" | "op" | "kernel" | "phase" | "rest";
export const FRAME_KINDS: FrameKind[] = ["module", "op", "kernel", "phase", "rest"];
export type FrameState = "both" | "new" | "gone" | "welded";

export interface Split {
  arithmetic_us?: number;
  traffic_us?: number;
  launch_us?: number;
  round_trip_us?: number;
  host_us?: number;
  slow_us?: number;
  unexplained_us?: number;
}

export interface Finding {
  rule: string;
  title: string;
  cause: string;
  action: string;
  evidence: string[];
  waste: string;
  saved_us: number;
  bound: number;
  modules?: string[];
  once_us?: number;
}

export interface About {
  source: "live" | "trace";
  what: string;
  training?: boolean;
  inputs?: string;
  torch?: string;
  cpu?: string;
  threads?: number;
  fingerprint?: string;
  steps?: number;
  step_starts_us?: number[];
  rank?: number | null;
  load?: string;
}

export interface ModuleRow {
  path: string;
  kind: string;
  extra: string;
  parent: number;
  calls: number;
  forward_us: number | NotMeasured;
  backward_us: number | NotMeasured;
  time_us: number | NotMeasured;
  own_us: number | NotMeasured;
  launches: number;
  flops: number;
  moved_bytes: number;
  round_trip_bytes: number;
  roofline_us: number;
  bound: string;
  split: Split | NotMeasured;
  fate?: Fate;
  why?: string;
}

export interface Flame {
  total_us: number;
  names: string[];
  name: number[];
  parent: number[];
  own_us: number[];
  kind: number[];
  calls: number[];
  module: number[];
  merged?: number;
  note?: string;
}

export interface FlameDiff {
  names: string[];
  name: number[];
  parent: number[];
  before_us: number[];
  after_us: number[];
  kind: number[];
  state: FrameState[];
}

export interface Lane {
  name: string;
  device: boolean;
  start_us: number[];
  duration_us: number[];
  name_index: number[];
  depth: number[];
  module: number[];
  merged?: number;
}

export interface Timeline {
  end_us: number;
  names: string[];
  lanes: Lane[];
  note?: string;
}

export interface CallRow {
  name: string;
  count: number;
  us: number;
}

export interface HostTimes {
  ops: number;
  ops_us: number;
  launch_us: number;
  occupancy_us: number;
  waiting_us: number;
  calls: CallRow[];
}

export interface GemmName {
  maker: string;
  tile?: number[] | null;
  stages?: number | null;
  layout?: string | null;
  dtype?: string | null;
  tensor_cores?: boolean | null;
}

export interface ProductRow {
  name: string;
  gemm: GemmName | null;
  count: number;
  us: number;
}

export interface DeviceView {
  name: string;
  host: HostTimes;
  launches: number;
  occupancy_queries: number;
  kernels: number;
  launched_us: number;
  compute_us: number;
  non_compute_us: number;
  idle_us: number;
  products: ProductRow[];
  cores: string;
}

export interface Roof {
  name: string;
  gflops?: number | null;
  gbps?: number | null;
}

export interface RoofPoint {
  name: string;
  block: boolean;
  phase: string;
  calls: number;
  time_us: number;
  flops: number;
  moved_bytes: number;
  of_roofline: number | null;
  bound: string;
}

export interface AliveBytes {
  bytes: number;
  count: number;
  module: string;
  op: string;
  phase: string;
}

export interface MemoryView {
  peak_bytes: number;
  allocations: number;
  allocated_bytes: number;
  at_us: number[];
  bytes: number[];
  at_peak: AliveBytes[];
}

export interface PageSide {
  name: string;
  about: About;
  step_us: number | NotMeasured;
  account: Split | NotMeasured;
  explained: number | NotMeasured;
  modules: ModuleRow[];
  flame?: Flame | null;
  device_flame?: Flame | null;
  timeline?: Timeline | null;
  device?: DeviceView | null;
  roofs?: Roof[];
  points?: RoofPoint[];
  memory?: MemoryView | null;
  findings?: Finding[];
  faults_per_step?: number | NotMeasured | null;
  notices?: string[];
}

export interface BlockRow {
  path: string;
  what: string;
  outcome: string;
  serves: string;
  reason: string;
  speedup?: Measured | NotMeasured | null;
  interval?: Interval | null;
}

export interface CurvePoint {
  x: number;
  speedup: Measured | NotMeasured;
  interval: Interval | null;
  verdict: string;
}

export interface Curve {
  name: string;
  points: CurvePoint[];
}

export interface CurvePlot {
  title: string;
  source: "plan" | "bench";
  curves: Curve[];
}

export interface MapCell {
  row: number;
  column: number;
  best: string;
  speedup: Measured | NotMeasured;
}

export interface CrossoverMap {
  title: string;
  rows: string[];
  columns: string[];
  cells: MapCell[];
}

export interface KernelRow {
  name: string;
  category: string;
  count: number;
  us: number;
}

export interface LaunchedRow {
  cell: string;
  side: string;
  kernels: number | NotMeasured;
  kinds: string;
  kernel_us: number | NotMeasured;
  launch_us: number | NotMeasured;
  host_us: number | NotMeasured | null;
  call_us: number | NotMeasured;
  verdict: "as expected" | "differs" | "not measured" | "";
  rows?: KernelRow[];
}

export interface HistoryPoint {
  run: number;
  name: string;
  kind: string;
  created: string;
  commit: string;
  speedup: Measured | NotMeasured;
  interval: Interval | null;
  verdict: string;
}

export interface HistoryPlot {
  title: string;
  points: HistoryPoint[];
}

export interface ErrorRow {
  block: string;
  tensor: string;
  eager: Measured | NotMeasured;
  fused: Measured | NotMeasured;
  of_allowed: Measured | NotMeasured;
  ok: boolean;
}

export interface Strip {
  name: string;
  ratios: Measured[];
  control: Measured[];
  speedup: Measured | NotMeasured;
  interval: Interval | null;
  verdict: string;
}

export interface Page {
  title: string;
  verdict: string;
  sides?: PageSide[];
  diff?: FlameDiff | null;
  not_comparable?: string[];
  blocks?: BlockRow[];
  curves?: CurvePlot[];
  maps?: CrossoverMap[];
  launched?: LaunchedRow[];
  history?: HistoryPlot[];
  errors?: ErrorRow[];
  strips?: Strip[];
  environment?: [string, string][];
  command?: string;
  notes?: string[];
  redacted?: boolean;
}

export function isMissing(value: unknown): value is NotMeasured {
  return typeof value === "object" && value !== null && "not_measured" in value;
}

/** The number, or null where there is none: not measured, NaN, or infinite. */
export function finite(value: Measured | NotMeasured | null | undefined): number | null {
  return typeof value === "number" ? value : null;
}

/** Steps that the times of a side cover. */
export function stepsOf(side: PageSide): number {
  return Math.max(1, side.about.steps ?? 1);
}

/** Whether it is known to which modules ops belong. */
export function namesModules({ modules }: PageSide): boolean {
  return modules.some((row) => row.path !== "" && row.kind !== "Optimizer");
}

/** Whether nothing tells where a step begins, so that times are those of everything recorded. */
export function isWholeTrace({ about }: PageSide): boolean {
  return about.source === "trace" && (about.step_starts_us ?? []).length === 0;
}
