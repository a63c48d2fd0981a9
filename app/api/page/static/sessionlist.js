/**
 * The rows of the session list: pages from the server, and changes that come in between.
 *
 * A changed row is shown in its place at once. Rows do not come, go or move under the reader's eyes: what no longer
 * matches is dimmed, what is new is counted, until the list is read anew. Only the list of newest changes, while its top is seen
 * and nobody is about to click a row, follows by itself.
 */

import { get } from "./api.js";
import { DEFAULT_ORDER, isBefore, matches, newestFirst } from "./filters.js";

const PAGE = 200;
const MOST_AT_ONCE = 500;

export class SessionList {
  /** @param {() => void} onChange something is to be shown anew */
  constructor(onChange) {
    this.onChange = onChange;
    /** @type {import("./filters.js").Wish} */
    this.wish = { ...DEFAULT_ORDER };
    /** @type {any[]} */
    this.rows = [];
    /** @type {Map<string, any>} what is shown, by id */
    this.byId = new Map();
    /** @type {Map<string, any>} what would be, but is not in the list yet */
    this.arrived = new Map();
    /** @type {Set<string>} what is shown, but no longer matches */
    this.gone = new Set();
    /** @type {Map<string, any>|null} what changed while a page is on its way */
    this.meanwhile = null;
    /** @type {string|null} */
    this.nextCursor = null;
    this.total = 0;
    this.isTotalExact = true;
    this.isLoaded = false;
    /** Have rows come from later pages, so that only the server knows how many there are? */
    this.isTotalOld = false;
    /** @type {unknown} */
    this.error = null;
    /** @type {AbortController|null} */
    this.request = null;
  }

  get isLoading() {
    return this.request !== null;
  }

  /** Are rows in the order of their last change? */
  get isByChange() {
    return this.wish.sort === DEFAULT_ORDER.sort && this.wish.order === DEFAULT_ORDER.order;
  }

  /** @param {import("./filters.js").Wish} wish read the first page of this */
  async open(wish) {
    this.wish = wish;
    this.isLoaded = false;
    await this.#read(null, PAGE);
  }

  /** Read anew as many rows as there are; those that are still there stay. */
  async refresh() {
    await this.#read(null, Math.min(MOST_AT_ONCE, Math.max(PAGE, this.rows.length)));
  }

  async more() {
    if (this.nextCursor && !this.isLoading) await this.#read(this.nextCursor, PAGE);
  }

  /** Ask only how many there are. */
  async recount() {
    this.isTotalOld = false;
    const { wish } = this;
    const page = await get("/ui/api/sessions", { ...wish, limit: 1 });
    if (this.wish !== wish || this.isLoading) return;
    this.total = page.total;
    this.isTotalExact = page.total_is_exact;
    this.onChange();
  }

  close() {
    this.request?.abort();
  }

  /** @param {any[]} rows that changed, anywhere */
  take(rows) {
    for (const row of rows) {
      this.meanwhile?.set(row.session_id, row);
      this.#takeOne(row);
    }
    this.onChange();
  }

  /** Bring what arrived and what moved to its place; only where the order is that of the changes. */
  settle() {
    if (!this.isByChange) return;
    if (this.nextCursor) this.isTotalOld ||= this.arrived.size + this.gone.size > 0;
    else this.total += this.arrived.size - this.gone.size;
    for (const id of this.gone) this.byId.delete(id);
    for (const [id, row] of this.arrived) this.byId.set(id, row);
    this.arrived.clear();
    this.gone.clear();
    this.rows = [...this.byId.values()].sort(newestFirst);
  }

  /** @param {any} row */
  #takeOne(row) {
    const id = row.session_id;
    const fits = matches(row, this.wish);
    const shown = this.byId.get(id);
    if (!shown) {
      if (!fits || !this.#isWithin(row)) this.arrived.delete(id);
      else if (!isOlder(row, this.arrived.get(id))) this.arrived.set(id, row);
      return;
    }
    if (isOlder(row, shown)) return;
    this.#put(row);
    if (fits) this.gone.delete(id);
    else this.gone.add(id);
  }

  /** Is its place among the loaded rows? @param {any} row */
  #isWithin(row) {
    const last = this.rows.at(-1);
    return !this.nextCursor || !last || isBefore(row, last, this.wish);
  }

  /** @param {any} row of a session that is shown */
  #put(row) {
    const at = this.rows.indexOf(this.byId.get(row.session_id));
    this.byId.set(row.session_id, row);
    this.rows[at] = row;
  }

  /** @param {string|null} cursor @param {number} limit */
  async #read(cursor, limit) {
    this.request?.abort();
    const request = new AbortController();
    this.request = request;
    this.meanwhile = new Map();
    this.onChange();
    try {
      const page = await get("/ui/api/sessions", { ...this.wish, limit, cursor }, request.signal);
      this.#keep(page, cursor === null);
      this.error = null;
    } catch (error) {
      if (request.signal.aborted) return;
      this.error = error;
    }
    this.request = null;
    this.meanwhile = null;
    this.onChange();
  }

  /** @param {any} page @param {boolean} isFirst */
  #keep(page, isFirst) {
    if (isFirst) {
      this.byId = new Map();
      this.arrived.clear();
      this.gone.clear();
    }
    for (const row of page.sessions) {
      this.arrived.delete(row.session_id);
      if (!isOlder(row, this.byId.get(row.session_id))) this.byId.set(row.session_id, row);
    }
    this.rows = [...this.byId.values()];
    this.nextCursor = page.next_cursor;
    this.total = page.total;
    this.isTotalExact = page.total_is_exact;
    this.isLoaded = true;
    this.isTotalOld = false;
    for (const row of this.meanwhile?.values() ?? []) this.#takeOne(row);
  }
}

/** @param {any} row @param {any} known @returns {boolean} */
function isOlder(row, known) {
  return known !== undefined && row.version < known.version;
}
