/**
 * What the server answers to the page, as JSON; at the end what modules of the page share. For `tsc` and editors only:
 * it is neither served nor installed.
 *
 * Times are seconds since the epoch unless the name says otherwise; `null`: there is none, or it is not known.
 */

/** What an element can be given as a child; nothing is made of null, undefined and false. */
export type Child = Node | string | number | null | undefined | false | readonly Child[];

export type State = "open" | "idle" | "running" | "paused" | "closed" | "erased" | "undone";

/** GET /ui/api/me */
export interface Me {
  signed_in: boolean;
  auth: "token" | "none";
  /** the only one that is shown, to who signed in with its token */
  run: string | null;
  release: string;
  now: number;
}

/** Why a rollout failed; lists have no message. */
export interface Failure {
  kind: "sandbox" | "agent" | "engine" | "timeout" | "other";
  message?: string;
  erased?: boolean;
}

/** A session in a list; `version` is its last event. */
export interface SessionRow {
  session_id: string;
  version: number;
  status: "open" | "closed" | "erased" | "undone";
  state: State;
  turns: number;
  run: string;
  group_id: string | null;
  attempt: number | null;
  reward: number | null;
  weight_version: number | null;
  staleness: number | null;
  engine: string | null;
  created_at: number;
  updated_at: number;
  running_since: number | null;
  closed_at: number | null;
  name: string | null;
  generation: number | null;
  evaluation: boolean;
  engine_errors: number;
  tool_errors: number;
  failed: Failure | null;
  note: string | null;
  tags: string[];
  /** added by the page */
  about?: Summary;
}

/** What a call or a text does, in a line. */
export interface Action {
  tool: string | null;
  text: string;
}

/** GET /ui/api/summaries, by session: its state after event `version` */
export interface Summary {
  version: number;
  task: string;
  actions: Action[];
  turns: number;
  tokens: number;
  output_tokens: number;
  finish_reason: string | null;
  started_at: number;
  ended_at: number | null;
  reward: number | null;
  components: Record<string, number>;
}

/** GET /ui/api/sessions */
export interface SessionPage {
  /** values of the asked-for keys of the metadata, by session and key */
  metadata: Record<string, Record<string, string>>;
  /** how many of the tasks begin */
  heads: string[];
  sessions: SessionRow[];
  next_cursor: string | null;
  total: number;
  total_is_exact: boolean;
}

/** Milliseconds. */
export interface Percentiles {
  p50: number | null;
  p99: number | null;
}

export interface Engine {
  url: string;
  run: string | null;
  state: "draining" | "serving";
  source: "settings" | "admin";
  health: string;
  since: number | null;
  last_error: string | null;
  in_flight: number;
  dialect: string | null;
  weight_version: string | null;
  weight_version_regressed: { before: string; after: string; at: number } | null;
  sessions: boolean | null;
  token_ids: "input_ids" | "kv_transfer_params" | "none" | null;
  logprobs_of: "raw" | "scaled" | "processed" | "logits" | null;
}

/** `held`: turns that wait at the gate. */
export interface Gate {
  paused: boolean;
  closings: number;
  since: number | null;
  lease_left_s: number | null;
  held: number;
  in_flight: number;
}

export interface FleetGate extends Gate {
  mode: string | null;
  paused_adapters: string[];
  paused_runs: string[];
  version: number;
  weight_version: string | null;
  held_for: "drain" | "restore" | null;
}

export interface Adapter extends Gate {
  name: string;
  version: string | null;
}

/** GET /ui/api/overview, and each second of the live stream; of a run, null is what the whole server alone has */
export interface Overview {
  at: number;
  sessions: {
    open: number;
    closed: number;
    erased: number;
    running: number;
    paused: number;
    idle: number;
    active: number;
    counted_at: number;
  };
  turns_per_s: number | null;
  overhead_ms: Percentiles | null;
  engine_ms: Percentiles | null;
  errors: Record<string, number> | null;
  errors_total: Record<string, number> | null;
  weight_version: number | null;
  gate: FleetGate;
  adapters: Adapter[];
  database: { bytes: number; wal_bytes: number | null; kind: "sqlite" | "postgresql" } | null;
  read_only: string | null;
  scope: string;
  engines: Engine[];
}

/** A group in the list of groups. */
export interface GroupRow {
  run: string;
  group_id: string;
  group_size: number | null;
  arrived: number;
  sessions: number;
  closed: number;
  failed: number;
  evaluation: boolean;
  rewarded: number;
  mean: number | null;
  std: number | null;
  min: number | null;
  max: number | null;
  zero_variance: boolean;
  missing_attempts: number[];
  state: "open" | "complete" | "leased" | "acknowledged";
}

/** A run in GET /runs. */
export interface ListedRun {
  run: string;
  status: "open" | "closed" | "erasing";
  limits: { live: number | null; tokens: number | null };
  metadata: Record<string, unknown> | null;
  note: string | null;
  sessions: { open: number; closed: number; erased: number };
  /** rollouts, by the kind of their failure */
  failed: Record<string, number>;
  turns: number;
  engine_errors: number;
  tool_errors: number;
  groups: { complete: number; handed_out: number; acknowledged: number };
  reward: Statistics | null;
  weight_versions: { newest: number | null; oldest_live: number | null };
  first_at: number | null;
  last_at: number | null;
}

/** GET /runs/{run} */
export interface RunFigures extends ListedRun {
  tokens: { prompt: number; generated: number };
  errors: Record<string, number>;
}

/** GET /runs */
export interface RunPage {
  runs: ListedRun[];
  next_cursor: string | null;
}

/** Sessions by their newest weights; `staleness`: how far behind their oldest are. */
export interface VersionFigures {
  version: number;
  sessions: number;
  open: number;
  turns: number;
  rewarded: number;
  mean_reward: number | null;
  engine_errors: number;
  tool_errors: number;
  failed: number;
  staleness: number | null;
}

/** `since`: when its first session was created */
export interface StuckGroup extends GroupRow {
  since: number;
}

export interface ShutGate {
  of: "server" | "run";
  adapter: string | null;
  reason: string;
  since: number | null;
  held: number;
}

/** GET /ui/api/runs/{run} */
export interface RunView {
  run: RunFigures;
  /** newest first */
  versions: VersionFigures[];
  failed: Record<string, number>;
  groups: { rewarded: number; flat: number; lowest: GroupRow[]; zero_variance: GroupRow[]; stuck: StuckGroup[] };
  gates: ShutGate[];
}

/** GET /groups */
export interface GroupPage {
  groups: GroupRow[];
  next_cursor: string | null;
}

export interface Attempt {
  session_id: string;
  attempt: number | null;
  status: string;
  finished: boolean;
  replaced: boolean;
  group_size: number | null;
  created_at: number;
  updated_at: number;
  evaluation: boolean;
  engine_errors: number;
  tool_errors: number;
  failed: Failure | null;
  reward: number | null;
}

export interface Statistics {
  count: number;
  mean: number;
  std: number;
  min: number;
  max: number;
  zero_variance: boolean;
}

/** GET /groups/{id} */
export interface Group {
  run: string;
  group_id: string;
  group_size: number | null;
  arrived: number;
  attempts: Attempt[];
  missing_attempts: number[];
  statistics: Statistics | null;
  complete: boolean;
  evaluation: boolean;
}

export interface Reward {
  reward: number;
  components: Record<string, number>;
}

/** Milliseconds in each stage of a turn. */
export interface Stages {
  gate: number;
  claim: number;
  prepare: number;
  engine: number;
  validate: number;
}

/** A committed turn, live or discarded; `seq` is the event that committed it. */
export interface Turn {
  turn: number;
  parent: number;
  segment: number;
  segment_cause: string | null;
  live: boolean;
  opened_at: number | null;
  committed_at: number;
  seq: number;
  fence: number;
  engine: string;
  dialect: string;
  protocol: string;
  adapter: string | null;
  finish_reason: string | null;
  timing: Stages | null;
  prompt_tokens: number;
  base_tokens: number;
  suffix_tokens: number;
  output_tokens: number;
  cached_tokens: number | null;
  trimmed: number;
  messages: number;
  weight_versions: { version: string; start: number; end: number }[];
  dispatched: string | null;
  parts: { engine: string; start: number; end: number }[];
  payloads: { kind: string; rows: number; tombstoned: boolean }[];
  discarded_by: number | null;
}

export interface FailedTurn {
  turn: number;
  fence: number;
  opened_at: number | null;
  ended_at: number;
  reason: string;
  status: number | null;
  detail: string | null;
  kind: "rejected" | "abandoned";
  reply_bytes: number | null;
  kept_bytes: number | null;
}

/** A turn of the tree: GET /sessions/{id}/tree. */
export interface TreeTurn {
  turn: number;
  parent: number;
  agent_id: string | null;
  state: "open" | "committed" | "undone";
  branch: number | null;
  cause: string | null;
  carries: number | null;
  superseded: boolean;
  messages: number | null;
  tokens: number | null;
  output_tokens: number | null;
  finish_reason: string | null;
  weight_versions: string[];
  exported: boolean;
  reason: string | null;
  loss_branches: number[];
  left_out: string[];
}

export interface TreeBranch {
  branch: number;
  cause: string | null;
  parent_branch: number | null;
  fork_turn: number | null;
  agent_id: string | null;
  /** only in GET /sessions/{id}/tree */
  title: string | null;
  leaf: number;
  turns: number;
  tokens: number;
  exported: boolean;
  reason: string | null;
}

export interface Tree {
  session_id: string;
  version: number;
  status: string;
  history: string | null;
  main_branch: number | null;
  branches: TreeBranch[];
  turns: TreeTurn[];
}

export interface OpenTurn {
  turn: number;
  parent: number;
  fence: number;
  incarnation: number;
  adapter: string | null;
  opened_at: number;
}

export interface Rollback {
  seq: number;
  at: number;
  to_turn: number;
  discarded: number[];
}

/** GET /ui/api/sessions/{id}: the state after event `seq` of `last_seq` */
export interface Annotation {
  name: string;
  seq: number;
  at: number;
  writer: string | null;
  size: number;
  value?: unknown;
  dtype?: string;
  over?: string;
  length?: number;
  absent?: number;
}

export interface Session {
  session_id: string;
  seq: number;
  last_seq: number;
  status: string;
  failed: Failure | null;
  engine_errors: number;
  tool_errors: number;
  state: State;
  erased: boolean;
  config: { run?: string | null; group_id: string | null; attempt: number | null; adapter: string | null } & Record<string, unknown>;
  /** of a fork: after turn `turn` of `session`; `loss`: the copied turns are in its loss */
  fork: { session: string; turn: number; turns: number; loss: boolean } | null;
  metadata: unknown;
  created_at: number;
  closed_at: number | null;
  reward: Reward | null;
  turn_rewards: Record<string, Reward>;
  note: string | null;
  tags: string[];
  affinity: { engine: string; control: string | null } | null;
  open_turns: OpenTurn[];
  /** null where there is at most one branch */
  tree: Tree | null;
  turns: Turn[];
  /** by turn, "0" the session's; a column has no value */
  annotations: Record<string, Annotation[]>;
  /** requests that a limit refused; they continue `turn` (0: none) */
  refused: { seq: number; at: number; turn: number; limit: string }[];
  failed_turns: FailedTurn[];
  rollbacks: Rollback[];
  /** those that have the session, as it was after event `seq`; the oldest first */
  checkpoints: { run: string; name: string; created_at: number; seq: number }[];
  problems: { part: string; message: string }[];
  /** what holds for it now: its own, that of its rollout's root; none in the state after an earlier event */
  budgets: Budget[];
  /** which was reached last */
  limit: string | null;
}

/** What is reserved by turns in flight is not left. */
export interface Budget {
  session_id: string;
  limits: { per?: "session" } & Partial<Record<LimitName, number>>;
  used: Record<"turns" | "tokens" | "seconds", number>;
  in_flight: Record<"turns" | "tokens", number>;
  left: Partial<Record<LimitName, number>>;
}

export type LimitName = "turns" | "tokens" | "context" | "seconds";

/** A message as an agent or an engine wrote it: any JSON, if it is an object perhaps with these fields. */
export interface ChatMessage {
  role?: unknown;
  name?: unknown;
  content?: unknown;
  reasoning_content?: unknown;
  reasoning?: unknown;
  refusal?: unknown;
  tool_calls?: unknown;
  function_call?: unknown;
  tool_call_id?: unknown;
}

/** A message in its place in the history; without one, `error` says why. `cut`: it has the first part of each text. */
export interface Entry {
  index: number;
  turn: number;
  agent_id?: string | null;
  sampled: boolean;
  message: unknown;
  error?: string;
  cut?: boolean;
  bytes?: number;
  failed?: boolean;
}

/** GET /ui/api/sessions/{id}/actions: what turns did in lines, and what their requests brought */
export interface TurnActions {
  turn: number;
  actions: { tool: string | null; text: string }[];
  results: { role: string; text: string; failed: boolean }[];
  failed: number;
  error: string | null;
}

/** GET /ui/api/sessions/{id}/turns; `state`: the stage of a turn in flight */
export interface TurnMessages {
  turn: number;
  messages: { sampled: boolean; bytes: number; cut: boolean; message: unknown; failed: boolean; error: string | null }[];
  state: string | null;
  engine: string | null;
}

/** GET /ui/api/sessions/{id}/conversation: up to `turn`, without the `omitted` oldest messages */
export interface Transcript {
  turn: number | null;
  messages: Entry[];
  params: Record<string, unknown> | null;
  tools: unknown[] | null;
  omitted: number;
  errors: Record<string, string>;
}

/** `version` is an index into the page's `versions`, -1 where the token was not sampled. */
export type Token = [
  at: number,
  id: number,
  sampled: number,
  lossMask: number,
  logprob: number | null,
  entropy: number | null,
  version: number,
  turn: number,
];

/** A turn's own tokens are [start, end), those that it sampled [output_start, end). */
export interface TurnRange {
  turn: number;
  start: number;
  output_start: number;
  end: number;
  /** why its sampled tokens are not in the row's loss */
  masked: string | null;
  /** sampled tokens that the next prompt does not have */
  trimmed: number;
  finish_reason: string | null;
}

/** Sampled tokens of a session: trained, or why not; `at`: where in the row those of no row would follow. */
export interface Share {
  reason: string;
  at: number | null;
  tokens: number;
  turns: number[];
}

/** Of the row's tokens, `counts[i]` are below `edges[i]` and not below the edge before. */
export interface Scale {
  kind: "logprob" | "entropy" | "column";
  name: string;
  edges: number[];
  counts: number[];
  mean: number;
}

/** One of the least likely sampled tokens, and the text around it. */
export interface Unlikely {
  at: number;
  turn: number;
  logprob: number;
  id: number;
  text: string | null;
  before: string;
  after: string;
}

export interface Outline {
  sampled: number;
  shares: Share[];
  scales: Scale[];
  least: Unlikely[];
}

export interface BranchTokens {
  branch: number;
  cause: string | null;
  tokens: number;
  prompt_tokens: number;
  exported: boolean;
}

/** From token `at` on, what was sampled was sampled under this weight version. */
export interface Boundary {
  at: number;
  version: string;
}

/** GET /ui/api/sessions/{id}/tokens */
export interface TokenPage {
  branch: number | null;
  branches: BranchTokens[];
  total: number;
  start: number;
  tokens: Token[];
  texts: (string | null)[] | null;
  /** is there one? */
  tokenizer: boolean;
  versions: string[];
  turns: TurnRange[];
  boundaries: Boundary[];
  /** annotations of one number per token, by name */
  columns: Record<string, (number | null)[]>;
  outline: Outline | null;
  error: string | null;
}

/** A branch of a session beside others, by its key: the session's id, or `id@branch`. */
export interface Rollout {
  key: string;
  name: string;
  session_id: string;
  status: string;
  reward: number | null;
  components: Record<string, number>;
  annotations: Annotation[];
  turns: number;
  tokens: number;
  output_tokens: number;
  branch: number | null;
  branches: { branch: number; cause: string | null; step: number }[];
  /** from the first rollout, in words, and the row where it begins */
  difference: string | null;
  differs_at: number | null;
}

export interface UnreadRollout {
  key: string;
  name: string;
  session_id: string;
  error: string;
}

/** Turn 0 is the task; `same`: as the first rollout's, in what it did and got. */
export interface Cell {
  turn: number;
  actions: Action[];
  results: string[];
  failed: boolean;
  output_tokens: number;
  finish_reason: string | null;
  same: boolean;
}

/** `step` is the first rollout's, null where that has none. */
export interface ComparedRow {
  step: number | null;
  cells: (Cell | null)[];
}

/** GET /ui/api/rollouts; `is_contrast`: the best and the worst are the first two */
export interface Comparison {
  total: number;
  is_contrast: boolean;
  columns: (Rollout | UnreadRollout)[];
  rows: ComparedRow[];
}

/** GET /ui/api/rollouts/texts, of each rollout; a part of a text is marked if the first one's lacks it */
export interface StepTexts {
  said: [boolean, string][];
  got: [boolean, string][];
}

/** `restores`: it keeps what a restore of that checkpoint replaced; `erased`: its sessions whose content is gone. */
export interface Checkpoint {
  run: string;
  name: string;
  state: "made" | "restoring";
  cut: "now" | "drain" | "restore";
  created_at: number;
  sessions: number;
  groups: number;
  restores: string | null;
  metadata: Record<string, unknown> | null;
  erased: number;
}

/** GET /checkpoints */
export interface CheckpointList {
  checkpoints: Checkpoint[];
  /** none: these are all */
  next_cursor?: null;
}

/** A session of a checkpoint as it was after event `seq`; `version` and `status` are what it is now. */
export interface SessionThen {
  session_id: string;
  seq: number;
  version: number;
  status: "open" | "closed" | "erased" | "undone";
  run: string;
  group_id: string | null;
}

/** GET /ui/api/checkpoints/{name} */
export interface CheckpointPage {
  checkpoint: Omit<Checkpoint, "erased">;
  sessions: SessionThen[];
  next_cursor: string | null;
}

export interface SearchHit {
  session_id: string;
  turn: number;
  message: number;
  role: string;
  tools: string[];
  finish_reason: string | null;
  at: number;
  status: string;
  run: string;
  group_id: string | null;
  snippet: string;
  /** in Unicode characters */
  marks: [start: number, end: number][];
}

/** GET /search */
export interface SearchPage {
  hits: SearchHit[];
  next_cursor: string | null;
  is_current: boolean;
}

/** A row that is not in the export. */
export interface Example {
  session_id: string;
  segment: number | null;
  turn: number | null;
  detail: string;
}

export interface Missing {
  reason: string;
  count: number;
  /** sampled tokens that it takes */
  lost_tokens: number;
  examples: Example[];
}

/** GET /ui/api/exports */
export interface ExportPreview {
  rows: number;
  sessions: number;
  tokens: number;
  trained_tokens: number;
  first_tokens: number[];
  missing: Missing[];
  scanned: number;
  complete: boolean;
  cursor: string | null;
}

/** A line of GET /sessions/{id}/events: any of the events, each with fields of its own. */
export interface LogEvent extends Record<string, unknown> {
  seq: number;
  at: number;
  type: string;
}

/** Fills a cell, again with each new version of its row. */
export type Fill<Row> = (cell: HTMLElement, row: Row) => void;

/** A column of a table. */
export interface Column<Row> {
  title: string;
  /** the title's tooltip */
  hint?: string;
  /** the server's name for this order; only such a column's header is a button */
  sort?: string;
  /** the order after the first click; by default "desc" */
  first?: "asc" | "desc";
  /** aligned to the right */
  number?: boolean;
  /** in CSS; columns without one share the rest */
  width?: string;
  /** names the row */
  isHeader?: boolean;
  fill: Fill<Row>;
}

export interface TableOptions<Row> {
  label: string;
  columns: Column<Row>[];
  keyOf: (row: Row) => string;
  onSort?: (sort: string, order: "asc" | "desc") => void;
  onNearEnd?: () => void;
  onInSight?: (rows: Row[]) => void;
}

/** A view that is a table, read a page at a time. */
export interface ListOptions<Row, Page> extends TableOptions<Row> {
  /** of one row */
  noun: string;
  path: string;
  /** of each request */
  parameters: Record<string, string | number | null>;
  rowsOf: (page: Page) => Row[];
  /** what stands in place of rows */
  nothing: (isFiltered: boolean) => Child;
}

/** Of a request, or of an address. */
export type Parameters = Record<string, string | number | boolean | null | undefined> | URLSearchParams;

/** The part of the address that a view needs, and the newest overview. */
export interface Place {
  /** the session's, the group's or the checkpoint's, "" for a list */
  id: string;
  query: URLSearchParams;
  overview: () => Overview | null;
}

/** Requests, or a GET of JSON, whose type is that of the parameter of what shows it. */
export type Asked<T> = ((signal: AbortSignal) => Promise<T>) | { path: string; parameters?: Parameters };

/** What the server's stream tells. */
export interface LiveListeners {
  onSessions: (rows: SessionRow[]) => void;
  onOverview: (overview: Overview) => void;
  /** changes may have been missed: read all anew */
  onReset: () => void;
  onState: (state: "connecting" | "live" | "lost") => void;
}

/**
 * A request: with a body it is a POST of JSON, unless it names another method. `engine` is the base URL of an engine
 * that is asked in place of this server, whose token it must not see.
 */
export interface Command {
  path: string;
  parameters?: Parameters;
  body?: unknown;
  method?: "PUT";
  engine?: string;
}
