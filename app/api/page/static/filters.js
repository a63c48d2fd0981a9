/** The filters of the session list: how they are written in the address, and which rows they let through. */

import { serverNow } from "./dom.js";

export const STATES = ["open", "idle", "claimed", "gated", "closed", "erased"];

/** The filters' names are the parameters' of GET /ui/api/sessions. */
export const FILTERS = [
  "q",
  "state",
  "group_id",
  "engine",
  "min_reward",
  "max_reward",
  "unrewarded",
  "min_staleness",
  "stuck_s",
];
const NUMBERS = new Set(["min_reward", "max_reward", "min_staleness", "stuck_s"]);
export const DEFAULT_ORDER = { sort: "updated_at", order: "desc" };

/** What one looks for most, each an address of its own. */
export const PRESETS = [
  { title: "All", query: {} },
  { title: "Stuck for a minute", query: { state: "claimed", stuck_s: "60", sort: "claimed_since", order: "asc" } },
  { title: "Held at a gate", query: { state: "gated" } },
  { title: "Closed, no reward", query: { state: "closed", unrewarded: "true" } },
  { title: "2 or more versions behind", query: { min_staleness: "2", sort: "staleness", order: "desc" } },
];

/**
 * @typedef {Record<string, string>} Wish the filters that are set, and `sort` and `order`
 */

/** @param {URLSearchParams} query @returns {Wish} */
export function wishOf(query) {
  /** @type {Wish} */
  const wish = { ...DEFAULT_ORDER };
  for (const name of [...FILTERS, "sort", "order"]) {
    const value = query.get(name);
    if (value) wish[name] = value;
  }
  return wish;
}

/** @param {Wish} wish @returns {Record<string, string>} without what is so by default, for a short address */
export function addressOf(wish) {
  const { sort, order, ...filters } = wish;
  return sort === DEFAULT_ORDER.sort && order === DEFAULT_ORDER.order ? filters : wish;
}

/** @param {Wish} wish @returns {boolean} */
export function isFiltered(wish) {
  return FILTERS.some((name) => wish[name]);
}

/** Does what matches change without an event, with time or at a gate? @param {Wish} wish @returns {boolean} */
export function needsPolling(wish) {
  return Boolean(wish.stuck_s || wish.min_staleness || ["gated", "claimed", "idle"].includes(wish.state));
}

/**
 * As the server judges it.
 * @param {any} row
 * @param {Wish} wish
 * @returns {boolean}
 */
export function matches(row, wish) {
  const number = (/** @type {string} */ name) => (NUMBERS.has(name) && wish[name] ? Number(wish[name]) : null);
  const [least, most] = [number("min_reward"), number("max_reward")];
  const [behind, stuck] = [number("min_staleness"), number("stuck_s")];
  return (
    (!wish.q || row.session_id.startsWith(wish.q)) &&
    (!wish.state || isInState(row, wish.state)) &&
    (wish.sort !== "claimed_since" || row.claimed_since !== null) &&
    (!wish.group_id || row.group_id === wish.group_id) &&
    (!wish.engine || row.engine === wish.engine) &&
    (least === null || (row.reward !== null && row.reward >= least)) &&
    (most === null || (row.reward !== null && row.reward <= most)) &&
    (wish.unrewarded !== "true" || row.reward === null) &&
    (behind === null || (row.staleness !== null && row.staleness >= behind)) &&
    (stuck === null || (row.claimed_since !== null && serverNow() - row.claimed_since > stuck))
  );
}

/** A turn that goes on behind a gate is claimed and held at once. @param {any} row @param {string} wanted */
function isInState(row, wanted) {
  if (wanted === "open") return row.state !== "closed" && row.state !== "erased";
  if (wanted === "claimed") return row.claimed_since !== null;
  return row.state === wanted;
}

/**
 * Does a row belong among those that are loaded, in the list's order? One that does not is on a later page.
 * @param {any} row
 * @param {any} last of those that are loaded
 * @param {Wish} wish
 * @returns {boolean}
 */
export function isBefore(row, last, wish) {
  const [own, its] = [row[wish.sort], last[wish.sort]];
  if (own === null || its === null) return own !== null;
  return wish.order === "asc" ? own < its : own > its;
}

/** @param {any} a @param {any} b @returns {number} newest change first, as the server orders it */
export function newestFirst(a, b) {
  return b.updated_at - a.updated_at || (a.session_id < b.session_id ? 1 : -1);
}
