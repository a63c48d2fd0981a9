/**
 * The rows of the session list: pages from the server, and changes that come in between.
 *
 * A changed row is shown in its place at once. Rows do not come, go or move until the list is read anew.
 */

import { DEFAULT_ORDER, isBefore, matches } from "./filters.js";
import { Summaries } from "./summaries.js";
import { LatestRequest } from "./view.js";

/** @import {SessionPage, SessionRow} from "../ui_types.d.ts" */
/** @import {ListQuery} from "./filters.js" */

const PAGE = 200;
const MOST_AT_ONCE = 500;

export class SessionList {
  /** @param {AbortSignal} closed @param {() => void} onChange show the list again */
  constructor(closed, onChange) {
    this.onChange = onChange;
    this.requests = new LatestRequest(closed);
    this.summaries = new Summaries(closed, (ids) => {
      for (const row of ids.map((id) => this.byId.get(id))) if (row) this.#set(row);
      onChange();
    });
    /** @type {ListQuery} */
    this.query = DEFAULT_ORDER;
    this.columns = "";
    /** @type {Map<string, SessionRow>} by id, in their order */
    this.byId = new Map();
    /** Rows would come, go or move if the list were read anew. */
    this.hasNews = false;
    /** @type {Map<string, Record<string, string>>} values of the columns of metadata; they do not change */
    this.metadata = new Map();
    /** @type {string[]} how many of the tasks begin */
    this.heads = [];
    /** @type {string|null} */
    this.nextCursor = null;
    this.total = 0;
    this.isTotalExact = true;
    this.isLoaded = false;
    /** @type {unknown} */
    this.error = null;
  }

  get rows() {
    return [...this.byId.values()];
  }

  get isLoading() {
    return this.requests.isRunning;
  }

  /** Are rows in the order of their last change? */
  get isByChange() {
    return this.query.sort === DEFAULT_ORDER.sort && this.query.order === DEFAULT_ORDER.order;
  }

  /** @param {ListQuery} query @param {string} columns keys of metadata; read the first page of this */
  async open(query, columns) {
    this.query = query;
    this.columns = columns;
    this.isLoaded = false;
    await this.#read(null, PAGE);
  }

  /** Read anew as many rows as are loaded. */
  async refresh() {
    await this.#read(null, Math.min(MOST_AT_ONCE, Math.max(PAGE, this.byId.size)));
  }

  async more() {
    if (this.nextCursor && !this.isLoading) await this.#read(this.nextCursor, PAGE);
  }

  /** @param {SessionRow[]} rows that changed, in any list */
  apply(rows) {
    const last = this.rows.at(-1);
    for (const row of rows) {
      const shown = this.byId.get(row.session_id);
      if (shown && row.version < shown.version) continue;
      if (shown) this.#set(row);
      // Only the server knows metadata and annotations: what is not listed may or may not match.
      const fits = matches(row, this.query) && (shown !== undefined || !["metadata", "annotated", "unannotated"].some((name) => this.query[name]));
      const isWithin = !this.nextCursor || !last || isBefore(row, last, this.query);
      this.hasNews ||= this.isLoading || (shown ? !fits || this.isByChange : fits && isWithin);
    }
    this.onChange();
  }

  /** @param {SessionRow} row */
  #set(row) {
    const known = this.summaries.known.get(row.session_id);
    const head = this.heads.find((one) => known?.task.startsWith(one));
    const about = known && head ? { ...known, task: `… ${known.task.slice(head.length)}` } : known;
    this.byId.set(row.session_id, { ...row, about });
  }

  /** @param {string|null} cursor @param {number} limit */
  async #read(cursor, limit) {
    if (cursor === null) this.hasNews = false;
    const request = { path: "/ui/api/sessions", parameters: { ...this.query, columns: this.columns, limit, cursor } };
    const keep = (/** @type {SessionPage} */ page) => this.#keep(page, cursor === null);
    const reading = this.requests.run(request, keep, (error) => {
      this.error = error;
      this.onChange();
    });
    this.onChange();
    await reading;
  }

  /** @param {SessionPage} page @param {boolean} isFirst */
  #keep(page, isFirst) {
    if (isFirst) {
      this.byId.clear();
      this.metadata.clear();
    }
    this.heads = page.heads;
    for (const [id, values] of Object.entries(page.metadata)) this.metadata.set(id, values);
    for (const row of page.sessions) this.#set(row);
    this.nextCursor = page.next_cursor;
    this.total = page.total;
    this.isTotalExact = page.total_is_exact;
    this.isLoaded = true;
    this.error = null;
    this.onChange();
  }
}
