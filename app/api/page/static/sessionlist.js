/**
 * The rows of the session list: pages from the server, and changes that come in between.
 *
 * A changed row is shown in its place at once. Rows do not come, go or move while somebody reads: a row that no longer
 * matches is dimmed, new ones are counted, until the list is read anew. Only the list of newest changes follows by
 * itself, while its top is in sight and nobody is about to click a row.
 */

import { get } from "./api.js";
import { DEFAULT_ORDER, isBefore, matches, newestFirst } from "./filters.js";
import { LatestRequest } from "./view.js";

/** @import {SessionPage, SessionRow} from "../ui_types.d.ts" */
/** @import {ListQuery} from "./filters.js" */

const PAGE = 200;
const MOST_AT_ONCE = 500;
/** So many rows that came meanwhile are kept; then the list is read anew, with its newest rows only. */
export const MOST_ARRIVED = 1_000;

export class SessionList {
  /** @param {AbortSignal} closed @param {() => void} onChange show the list again */
  constructor(closed, onChange) {
    this.onChange = onChange;
    this.requests = new LatestRequest(closed);
    /** @type {ListQuery} */
    this.query = DEFAULT_ORDER;
    /** @type {SessionRow[]} */
    this.rows = [];
    /** @type {Map<string, SessionRow>} the rows by id */
    this.byId = new Map();
    /** @type {Map<string, SessionRow>} match, and are not in the list yet */
    this.arrived = new Map();
    /** Rows that came into the list since it was read. */
    this.grown = 0;
    /** @type {Set<string>} in the list, but no longer match */
    this.unmatched = new Set();
    /** @type {Map<string, SessionRow>} changes that came while a page was being loaded */
    this.changedMeanwhile = new Map();
    /** @type {Map<string, Record<string, string>>} values of the columns of metadata; they do not change */
    this.metadata = new Map();
    /** @type {string|null} */
    this.nextCursor = null;
    this.total = 0;
    this.isTotalExact = true;
    this.isLoaded = false;
    /** Only the server can count: rows have come from later pages. */
    this.isTotalOld = false;
    /** @type {unknown} */
    this.error = null;
  }

  get isLoading() {
    return this.requests.isRunning;
  }

  /** Are rows in the order of their last change? */
  get isByChange() {
    return this.query.sort === DEFAULT_ORDER.sort && this.query.order === DEFAULT_ORDER.order;
  }

  /** @param {ListQuery} query read the first page of this */
  async open(query) {
    this.query = query;
    this.isLoaded = false;
    await this.#read(null, PAGE);
  }

  /** Read anew as many rows as are loaded. */
  async refresh() {
    await this.#read(null, Math.min(MOST_AT_ONCE, Math.max(PAGE, this.rows.length)));
  }

  async more() {
    if (this.nextCursor && !this.isLoading) await this.#read(this.nextCursor, PAGE);
  }

  /** Read only the total. */
  async recount() {
    this.isTotalOld = false;
    const { query } = this;
    const page = /** @type {SessionPage} */ (await get("/ui/api/sessions", { ...query, limit: 1 }));
    if (this.query !== query || this.isLoading) return;
    this.total = page.total;
    this.isTotalExact = page.total_is_exact;
    this.onChange();
  }

  /** @param {SessionRow[]} rows that changed, in any list */
  apply(rows) {
    for (const row of rows) {
      if (this.isLoading) this.changedMeanwhile.set(row.session_id, row);
      this.#applyOne(row);
    }
    this.onChange();
  }

  /** Let rows come, go and move to their places; only in the list of newest changes. */
  rearrange() {
    if (!this.isByChange) return;
    this.grown += this.arrived.size;
    if (this.grown >= MOST_ARRIVED) {
      this.refresh();
      return;
    }
    if (this.nextCursor) this.isTotalOld ||= this.arrived.size + this.unmatched.size > 0;
    else this.total += this.arrived.size - this.unmatched.size;
    for (const id of this.unmatched) this.byId.delete(id);
    for (const [id, row] of this.arrived) this.byId.set(id, row);
    this.arrived.clear();
    this.unmatched.clear();
    this.rows = [...this.byId.values()].sort(newestFirst);
  }

  /** @param {SessionRow} row */
  #applyOne(row) {
    const id = row.session_id;
    const shown = this.byId.get(id);
    // Only the server knows metadata, which does not change: what is not listed may or may not match.
    const fits = matches(row, this.query) && (!this.query.metadata || shown !== undefined);
    if (!shown) {
      if (!fits || !this.#isWithin(row)) this.arrived.delete(id);
      else if (this.arrived.size < MOST_ARRIVED && !isOlder(row, this.arrived.get(id))) this.arrived.set(id, row);
      return;
    }
    if (isOlder(row, shown)) return;
    this.rows[this.rows.indexOf(shown)] = row;
    this.byId.set(id, row);
    if (fits) this.unmatched.delete(id);
    else this.unmatched.add(id);
  }

  /** Is its place among the loaded rows? @param {SessionRow} row */
  #isWithin(row) {
    const last = this.rows.at(-1);
    return !this.nextCursor || !last || isBefore(row, last, this.query);
  }

  /** @param {string|null} cursor @param {number} limit */
  async #read(cursor, limit) {
    this.changedMeanwhile.clear();
    const request = async (/** @type {AbortSignal} */ signal) => {
      this.onChange();
      return /** @type {SessionPage} */ (await get("/ui/api/sessions", { ...this.query, limit, cursor }, signal));
    };
    await this.requests.run(request, (page) => this.#keep(page, cursor === null), (error) => {
      this.error = error;
      this.onChange();
    });
  }

  /** @param {SessionPage} page @param {boolean} isFirst */
  #keep(page, isFirst) {
    if (isFirst) {
      this.byId.clear();
      this.arrived.clear();
      this.unmatched.clear();
      this.metadata.clear();
      this.grown = 0;
    }
    for (const [id, values] of Object.entries(page.metadata)) this.metadata.set(id, values);
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
    for (const row of this.changedMeanwhile.values()) this.#applyOne(row);
    this.error = null;
    this.onChange();
  }
}

/** @param {SessionRow} row @param {SessionRow|undefined} known @returns {boolean} */
function isOlder(row, known) {
  return known !== undefined && row.version < known.version;
}
