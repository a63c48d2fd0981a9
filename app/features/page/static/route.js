/**
 * The page's addresses: `#/session/<id>?tab=tokens&seq=5`. Filters are in the query, so that a view can be shared. So is
 * the chosen run, which stays in every link; without one the views are of all runs.
 */

/** @import {Parameters} from "../ui_types.d.ts" */

/** The views, by their paths with `*` for a name. */
const VIEWS = /** @type {const} */ ({
  "": "sessions",
  sessions: "sessions",
  "session/*": "session",
  runs: "runs",
  groups: "groups",
  "group/*": "group",
  "group/*/rollouts": "rollouts",
  rollouts: "rollouts",
  search: "search",
  exports: "exports",
  checkpoints: "checkpoints",
  "checkpoint/*": "checkpoint",
  judge: "judge",
});

/**
 * The view that an address names; `id` is the session's, the group's or the checkpoint's, "" for a list.
 * @param {string} hash location.hash
 */
export function parse(hash) {
  const [path = "", search] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [first, raw, ...rest] = path.split("/");
  const pattern = /** @type {keyof typeof VIEWS} */ (raw ? [first, "*", ...rest].join("/") : path);
  const id = decoded(raw ?? "");
  return Object.hasOwn(VIEWS, pattern) && id !== null ? { name: VIEWS[pattern], id, query: new URLSearchParams(search) } : null;
}

/** Null: no whole number from `least` on. @param {string|null} text of the address @param {number} least */
export function wholeNumber(text, least) {
  const value = Number(text);
  return text !== null && text !== "" && Number.isInteger(value) && value >= least ? value : null;
}

/** @param {string} raw @returns {string|null} null for an invalid encoding */
function decoded(raw) {
  try {
    return decodeURIComponent(raw);
  } catch (error) {
    if (error instanceof URIError) return null;
    throw error;
  }
}

/** "?a=b", or nothing. @param {Parameters} [parameters] empty and null ones are left out */
export function queryOf(parameters = {}) {
  const query = new URLSearchParams();
  const entries = parameters instanceof URLSearchParams ? parameters.entries() : Object.entries(parameters);
  for (const [name, value] of entries) {
    if (value != null && value !== "" && value !== false) query.append(name, String(value));
  }
  const text = query.toString();
  return text && `?${text}`;
}

/** @returns {string|null} the run that is chosen; null: all runs */
export function chosenRun() {
  return new URLSearchParams(location.hash.split("?")[1]).get("run");
}

/** @param {Parameters} [parameters] @returns {string} as `queryOf`, with the chosen run unless another is named */
function queryOfRun(parameters = {}) {
  return queryOf(parameters instanceof URLSearchParams ? parameters : { run: chosenRun(), ...parameters });
}

/** @param {string} name of a list @param {Parameters} [parameters] @returns {string} */
export function listHref(name, parameters) {
  return `#/${name}${queryOfRun(parameters)}`;
}

/** @param {Parameters} [parameters] @returns {string} */
export function sessionsHref(parameters) {
  return listHref("", parameters);
}

/** @param {string} id @param {Parameters} [parameters] @returns {string} */
export function sessionHref(id, parameters) {
  return `#/session/${encodeURIComponent(id)}${queryOfRun(parameters)}`;
}

/** @param {string} id @param {string|null} [run] whose group it is; by default the chosen one's @returns {string} */
export function groupHref(id, run = chosenRun()) {
  return `#/group/${encodeURIComponent(id)}${queryOf({ run })}`;
}

/** @param {string} name @param {string} [of] the run that it is of, where another is chosen @returns {string} */
export function checkpointHref(name, of) {
  return `#/checkpoint/${encodeURIComponent(name)}${queryOfRun({ of })}`;
}

/** @param {string} id @param {Parameters} [parameters] @returns {string} the group's rollouts side by side */
export function rolloutsHref(id, parameters) {
  return `#/group/${encodeURIComponent(id)}/rollouts${queryOfRun(parameters)}`;
}

/** @param {string[]} keys sessions, or `session@branch` @returns {string} these side by side, compared with the first */
export function sideBySideHref(keys) {
  return listHref("rollouts", { sessions: keys.join(",") });
}

/** Change the query of the address, without a step in the history and without a new view. @param {Parameters} parameters */
export function setQuery(parameters) {
  const [path] = location.hash.split("?");
  history.replaceState(null, "", `${path || "#/"}${queryOfRun(parameters)}`);
}

/** Change these parameters of the address, and leave the others. @param {Record<string, string|number|null|undefined>} parameters */
export function changeQuery(parameters) {
  const query = new URLSearchParams(location.hash.split("?")[1]);
  for (const [name, value] of Object.entries(parameters)) {
    if (value == null) query.delete(name);
    else query.set(name, String(value));
  }
  setQuery(query);
}
