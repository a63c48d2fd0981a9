/** A view that is one long table: read a page at a time as its end comes into sight, and anew while nobody reads it. */

import { button, h, setText } from "./dom.js";
import { amount, count } from "./format.js";
import { LongTable } from "./table.js";
import { every, FollowsFleet } from "./view.js";

/** @import {ListOptions, Place} from "../ui_types.d.ts" */

/** Rows that are read at a time. */
export const PAGE = 200;
const REFRESH_MS = 5000;

/** @template Row @template {{next_cursor?: string|null}} Page */
export class ListView extends FollowsFleet {
  /** @param {HTMLElement} root @param {string} kind @param {Place} place @param {ListOptions<Row, Page>} options */
  constructor(root, kind, place, options) {
    super(root, kind, place);
    this.options = options;
    this.request = { path: options.path, parameters: options.parameters };
    this.rows = /** @type {Row[]} */ ([]);
    this.cursor = /** @type {string|null} */ (null);
    this.hasNews = false;
    this.total = h("span", { role: "status" });
    this.table = new LongTable(this.closed, { ...options, onNearEnd: () => this.#more() });
    this.table.setFoot("Loading …");
    every(this.closed, REFRESH_MS, () => this.#catchUp());
  }

  async changed() {
    this.hasNews = true;
    this.#catchUp();
  }

  /** No row moves under somebody who reads. */
  #catchUp() {
    if (this.hasNews && !this.requests.isRunning && !this.table.isHeld && this.table.isAtTop) this.refresh();
  }

  refresh() {
    this.hasNews = false;
    return this.#read(null);
  }

  #more() {
    if (this.cursor && !this.requests.isRunning) this.#read(this.cursor);
  }

  /** @param {string|null} cursor */
  #read(cursor) {
    const { path, parameters } = this.request;
    return this.read({ path, parameters: { ...parameters, cursor } }, (/** @type {Page} */ page) => {
      const { keyOf, rowsOf } = this.options;
      const all = [...(cursor === null ? [] : this.rows), ...rowsOf(page)];
      this.rows = [...new Map(all.map((row) => [keyOf(row), row])).values()];
      this.cursor = page.next_cursor ?? null;
      this.show(page);
    });
  }

  /** @param {unknown} error */
  onFailure(error) {
    this.cursor = null;
    this.table.setFoot();
    super.onFailure(error);
  }

  /** Is this row one of those that are looked for? @param {Row} row */
  fits(row) {
    return true;
  }

  /** Show the rows. @param {Page} [page] that was read just now */
  show(page) {
    const { rows, cursor, table, options } = this;
    const shown = rows.filter((row) => this.fits(row));
    const part = shown.length < rows.length ? `${count(shown.length)} of ` : "";
    setText(this.total, `${part}${amount(rows.length, options.noun)}${cursor ? " or more" : ""}`);
    table.show(shown, shown.length, false);
    if (cursor) table.setFoot(`${count(rows.length)} loaded`, button("Load more", () => this.#more()));
    else table.setFoot(shown.length ? "All shown" : options.nothing(rows.length > 0));
  }
}
