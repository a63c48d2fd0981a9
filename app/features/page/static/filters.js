/** The filters of the session list: how the address spells them, the form above the list, and which rows match. */

import { h, STATES } from "./dom.js";
import { checkbox, choice, chosen, field, numberField, QueryForm, textField } from "./form.js";
import { serverNow } from "./format.js";

/** @import {SessionRow} from "../ui_types.d.ts" */
/** @import {Values} from "./form.js" */
/** @typedef {Values & {sort: string, order: string}} ListQuery the filters that are set, and the order */

export const DEFAULT_ORDER = { sort: "updated_at", order: "desc" };

/** The most wanted lists, each an address of its own. */
export const PRESETS = [
  { title: "All", query: {} },
  { title: "Stuck for a minute", query: { stuck_s: "60", sort: "running_since", order: "asc" } },
  { title: "Paused", query: { state: "paused" } },
  { title: "Closed, no reward", query: { state: "closed", unrewarded: "true" } },
  { title: "Tool errors", query: { min_tool_errors: "1", sort: "tool_errors", order: "desc" } },
  { title: "Staleness 2 or more", query: { min_staleness: "2", sort: "staleness", order: "desc" } },
];

/** @param {ListQuery} query @returns {Values} without the default order, for a short address */
export function addressOf(query) {
  const { sort, order, ...filters } = query;
  return sort === DEFAULT_ORDER.sort && order === DEFAULT_ORDER.order ? filters : query;
}

/** Does time or a gate change what matches, without an event? @param {ListQuery} query @returns {boolean} */
export function needsPolling({ state = "", stuck_s, min_staleness }) {
  return Boolean(stuck_s || min_staleness || ["paused", "running", "idle"].includes(state));
}

/** As the server decides it. @param {SessionRow} row @param {ListQuery} query */
export function matches(row, query) {
  const reaches = (/** @type {string} */ name, /** @type {number|null} */ value) => !query[name] || (value !== null && value >= Number(query[name]));
  return (
    (!query.q || row.session_id.startsWith(query.q)) &&
    (!query.state || (query.state === "open" ? row.status : row.state) === query.state) &&
    (query.sort !== "running_since" || row.running_since !== null) &&
    (!query.run || row.run === query.run) &&
    (!query.group_id || row.group_id === query.group_id) &&
    (!query.group_prefix || row.group_id?.startsWith(query.group_prefix) === true) &&
    (!query.tag || row.tags.includes(query.tag)) &&
    (!query.engine || row.engine === query.engine) &&
    reaches("min_reward", row.reward) &&
    (!query.max_reward || (row.reward !== null && row.reward <= Number(query.max_reward))) &&
    (query.unrewarded !== "true" || row.reward === null) &&
    reaches("min_engine_errors", row.engine_errors) &&
    reaches("min_tool_errors", row.tool_errors) &&
    reaches("min_staleness", row.staleness) &&
    (!query.stuck_s || (row.running_since !== null && serverNow() - row.running_since > Number(query.stuck_s)))
  );
}

/**
 * Does a row belong among the loaded ones, in the list's order? Otherwise it is on a later page.
 * @param {SessionRow} row
 * @param {SessionRow} last of the loaded ones
 * @param {ListQuery} query
 */
export function isBefore(row, last, query) {
  const column = /** @type {"created_at"|"updated_at"|"reward"|"turns"|"engine_errors"|"tool_errors"|"staleness"|"running_since"} */ (query.sort);
  const [own, other] = [row[column], last[column]];
  if (own === null || other === null) return own !== null;
  return query.order === "asc" ? own < other : own > other;
}

/** The form above the session list; its names are the parameters of GET /ui/api/sessions. */
export class FilterForm extends QueryForm {
  /** @param {AbortSignal} closed @param {(filters: Values) => void} onChange */
  constructor(closed, onChange) {
    const engines = h("select", { name: "engine", class: "wide" }, h("option", { value: "" }, "any"));
    const form = h(
      "form",
      { class: "filters", role: "search", "aria-label": "Filter sessions" },
      field("Session id begins with", textField("q")),
      field("State", choice("state", Object.keys(STATES))),
      chosen("run"),
      field("Group", textField("group_id")),
      field("Group begins with", textField("group_prefix")),
      field("Tag", textField("tag")),
      field("Annotated", textField("annotated", { placeholder: "verdict" })),
      field("Not annotated", textField("unannotated", { placeholder: "verdict" })),
      field("Engine", engines),
      field("Reward from", numberField("min_reward", { step: "any" })),
      field("to", numberField("max_reward", { step: "any" })),
      checkbox("unrewarded", "no reward"),
      field("Engine errors from", numberField("min_engine_errors", { min: "0", step: "1" })),
      field("Tool errors from", numberField("min_tool_errors", { min: "0", step: "1" })),
      field("Staleness from", numberField("min_staleness", { min: "0", step: "1", placeholder: "versions" })),
      field("Stuck longer than", numberField("stuck_s", { min: "0", step: "any", placeholder: "seconds" })),
      // A text without the sign is no filter yet.
      field("Metadata key=value", textField("metadata", { placeholder: "task=chess", pattern: "[^=]+=.*" })),
    );
    super(closed, onChange, "input", form);
    this.engines = engines;
  }

  /** @param {URLSearchParams} query @returns {ListQuery} */
  listQueryOf(query) {
    const { sort, order } = DEFAULT_ORDER;
    return { ...this.queryOf(query), sort: query.get("sort") || sort, order: query.get("order") || order };
  }

  /** @param {ListQuery} query */
  set(query) {
    if (query.engine) this.setEngines([query.engine]);
    super.set(query, document.activeElement);
  }

  /** @param {string[]} urls that can be chosen */
  setEngines(urls) {
    const known = new Set([...this.engines.options].map((option) => option.value));
    for (const url of urls) if (!known.has(url)) this.engines.append(h("option", { value: url }, url));
  }
}
