/** Where in the page one is: `#/session/<id>/tokens?seq=5`. Filters are in the query, so that a view can be shared. */

/**
 * @typedef {object} Route
 * @property {string} name "sessions", "session", "tokens", "group", "groups", "exports"
 * @property {string|null} id the session's or the group's
 * @property {URLSearchParams} query
 */

const LISTS = new Set(["groups", "exports"]);

/**
 * @param {string} hash location.hash
 * @returns {Route|null} null: there is no such place
 */
export function parse(hash) {
  const cut = hash.indexOf("?");
  const path = (cut < 0 ? hash : hash.slice(0, cut)).replace(/^#\/?/, "");
  const query = new URLSearchParams(cut < 0 ? "" : hash.slice(cut + 1));
  const [name, raw, below, ...rest] = path.split("/");
  if (rest.length) return null;
  if (raw === undefined) {
    if (name === "" || name === "sessions") return { name: "sessions", id: null, query };
    return LISTS.has(name) ? { name, id: null, query } : null;
  }
  const id = decoded(raw);
  if (!id) return null;
  if (name === "group" && below === undefined) return { name, id, query };
  if (name !== "session") return null;
  if (below === undefined) return { name, id, query };
  return below === "tokens" ? { name: "tokens", id, query } : null;
}

/** @param {string} raw @returns {string|null} null for an encoding that is none */
function decoded(raw) {
  try {
    return decodeURIComponent(raw);
  } catch (error) {
    if (error instanceof URIError) return null;
    throw error;
  }
}

/**
 * @param {Record<string, unknown>|URLSearchParams} [parameters] empty and null ones are left out
 * @returns {string} "?a=b", or nothing
 */
export function queryOf(parameters = {}) {
  const query = new URLSearchParams();
  const entries = parameters instanceof URLSearchParams ? parameters.entries() : Object.entries(parameters);
  for (const [name, value] of entries) {
    if (value != null && value !== "" && value !== false) query.append(name, String(value));
  }
  const text = query.toString();
  return text && `?${text}`;
}

/** @param {Record<string, unknown>|URLSearchParams} [parameters] @returns {string} */
export function sessionsHref(parameters) {
  return `#/${queryOf(parameters)}`;
}

/** @param {string} id @param {Record<string, unknown>} [parameters] @returns {string} */
export function sessionHref(id, parameters) {
  return `#/session/${encodeURIComponent(id)}${queryOf(parameters)}`;
}

/** @param {string} id @param {Record<string, unknown>} [parameters] @returns {string} */
export function tokensHref(id, parameters) {
  return `#/session/${encodeURIComponent(id)}/tokens${queryOf(parameters)}`;
}

/** @param {string} id @returns {string} */
export function groupHref(id) {
  return `#/group/${encodeURIComponent(id)}`;
}

/**
 * Change the query of where one is, without a step in the history and without entering the view anew.
 * @param {Record<string, unknown>|URLSearchParams} parameters
 */
export function setQuery(parameters) {
  const path = location.hash.split("?")[0] || "#/";
  history.replaceState(null, "", `${path}${queryOf(parameters)}`);
}
