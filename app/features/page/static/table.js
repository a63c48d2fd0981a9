/** A long table: only the rows in sight are in the document. Its headers sort it, j and k walk through it. */

import { h, replace, scrollRegion } from "./dom.js";
import { isForPage } from "./keys.js";
import { headerRow, Rows } from "./rows.js";

/** @import {Child, Column, TableOptions} from "../ui_types.d.ts" */

const ROW_PX = 28;
const HEAD_PX = 30;
const OVERSCAN = 12;
/** So many rows before the end of the loaded ones, the next page is asked for. */
const NEAR_ROWS = 40;
/** A pointer that has not moved for so long is not about to click. */
const POINTED_MS = 3000;

/** Has the window no room for columns that are wanted less? */
export const isNarrow = () => innerWidth < 1400;

/** The least width of a column that shares what the others leave. */
const SHARED_PX = 150;

/** @param {{width?: string}[]} columns @returns {string} the width below which the table scrolls */
function leastWidth(columns) {
  const widths = columns.map(({ width = "" }) => (width.endsWith("px") ? Number.parseInt(width, 10) : width.endsWith("%") ? 110 : SHARED_PX));
  return `${widths.reduce((sum, one) => sum + one, 0)}px`;
}

/** @template Row */
export class LongTable {
  /** @param {AbortSignal} closed @param {TableOptions<Row>} options */
  constructor(closed, options) {
    this.options = options;
    this.rows = /** @type {Row[]} */ ([]);
    this.current = /** @type {string|null} */ (null);
    this.isBusy = true;
    this.pointedAt = -POINTED_MS;
    this.above = h("td");
    this.below = h("td");
    this.body = h("tbody");
    this.widths = h("colgroup");
    this.head = h("thead");
    this.table = h(
      "table",
      { class: "virtual", "aria-label": options.label },
      this.widths,
      this.head,
      h("tbody", { "aria-hidden": "true" }, h("tr", { class: "spacer" }, this.above)),
      this.body,
      h("tbody", { "aria-hidden": "true" }, h("tr", { class: "spacer" }, this.below)),
    );
    this.foot = h("div", { class: "foot" });
    this.element = scrollRegion(options.label, this.table, this.foot);
    this.element.classList.add("fill");
    this.lines = new Rows(this.body, options.columns, options.keyOf);
    this.setColumns(options.columns);
    this.frame = 0;
    this.#listen(closed);
  }

  /** @param {Column<Row>[]} columns */
  setColumns(columns) {
    this.columns = columns;
    this.table.style.minWidth = leastWidth(columns);
    replace(this.widths, columns.map(({ width }) => h("col", { style: width ? { width } : null })));
    replace(this.head, headerRow(columns, (column) => this.#press(column)));
    replace(this.body);
    this.lines = new Rows(this.body, columns, this.options.keyOf);
  }

  get isAtTop() {
    return this.element.scrollTop < ROW_PX;
  }

  /** Is the user about to click a row, or in one? Then rows must not move. @returns {boolean} */
  get isHeld() {
    return performance.now() - this.pointedAt < POINTED_MS || this.body.contains(document.activeElement);
  }

  /** @param {Row[]} rows @param {number} total how many the server has @param {boolean} isBusy are more being loaded? */
  show(rows, total, isBusy) {
    this.rows = rows;
    this.isBusy = isBusy;
    this.table.setAttribute("aria-rowcount", String(total + 1));
    this.#renderSoon();
  }

  /** @param {...Child} children below the last row */
  setFoot(...children) {
    replace(this.foot, ...children);
  }

  /** @param {string} sort @param {string} order */
  setOrder(sort, order) {
    for (const cell of this.head.querySelectorAll("th")) {
      const isIt = cell.dataset.sort === sort && sort !== "";
      cell.ariaSort = isIt ? (order === "asc" ? "ascending" : "descending") : null;
    }
  }

  scrollToTop() {
    this.element.scrollTop = 0;
  }

  /** @param {AbortSignal} closed */
  #listen(closed) {
    const sizes = new ResizeObserver(() => this.#renderSoon());
    sizes.observe(this.element);
    closed.addEventListener("abort", () => {
      cancelAnimationFrame(this.frame);
      sizes.disconnect();
    });
    this.element.addEventListener("scroll", () => this.#renderSoon(), { passive: true });
    document.addEventListener("keydown", (event) => this.#onKey(event), { signal: closed });
    this.body.addEventListener("pointermove", () => (this.pointedAt = performance.now()));
    this.body.addEventListener("pointerleave", () => (this.pointedAt = -POINTED_MS));
    this.body.addEventListener("focusin", (event) => {
      const line = /** @type {Element} */ (event.target).closest("tr");
      this.#choose(line?.dataset.key ?? null);
    });
  }

  #renderSoon() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#render());
  }

  #render() {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor((scrollTop - HEAD_PX) / ROW_PX) - OVERSCAN);
    const end = Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / ROW_PX) + OVERSCAN);
    this.above.style.height = `${Math.min(first, this.rows.length) * ROW_PX}px`;
    this.below.style.height = `${Math.max(0, this.rows.length - end) * ROW_PX}px`;
    this.lines.show(this.rows.slice(first, end), (element, row, index) => {
      element.setAttribute("aria-rowindex", String(first + index + 2));
      this.#markCurrent(element);
    });
    this.element.ariaBusy = String(this.isBusy);
    this.options.onInSight?.(this.rows.slice(first, end));
    if (end > this.rows.length - NEAR_ROWS) this.options.onNearEnd?.();
  }

  /** @param {HTMLTableRowElement} element */
  #markCurrent(element) {
    element.ariaCurrent = element.dataset.key === this.current ? "true" : null;
  }

  /** @param {string|null} key */
  #choose(key) {
    this.current = key;
    for (const line of this.lines.lines.values()) this.#markCurrent(line.element);
  }

  /** @param {Column<Row>} column */
  #press(column) {
    const cell = [...this.head.querySelectorAll("th")].find((one) => one.dataset.sort === column.sort);
    const now = cell?.ariaSort;
    const turned = now === "ascending" ? "desc" : "asc";
    this.options.onSort?.(column.sort ?? "", now ? turned : (column.first ?? "desc"));
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    if (!isForPage(event) || !this.rows.length) return;
    const at = this.rows.findIndex((row) => this.options.keyOf(row) === this.current);
    const last = this.rows.length - 1;
    const isInside = this.element.contains(document.activeElement);
    /** @type {Record<string, number>} */
    const places = { j: Math.min(last, at + 1), k: Math.max(0, at - 1), ...(isInside && { Home: 0, End: last }) };
    const to = places[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#walk(to);
  }

  /** @param {number} index */
  #walk(index) {
    const top = index * ROW_PX;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + 2 * HEAD_PX + ROW_PX > scrollTop + clientHeight) {
      this.element.scrollTop = top + 2 * HEAD_PX + ROW_PX - clientHeight;
    }
    this.#render();
    const row = this.rows[index];
    const line = row && this.lines.lines.get(this.options.keyOf(row));
    this.#choose(line?.element.dataset.key ?? null);
    line?.element.querySelector("a")?.focus({ preventScroll: true });
  }
}
