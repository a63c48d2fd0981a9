/** A grid whose rows are turns and whose columns are rollouts: only the cells in sight are in the document. */

import { h, replace } from "./dom.js";

/** @import {Child} from "../ui_types.d.ts" */

const LABEL_PX = 44;
const COLUMN_PX = 340;
/** Cells beyond the ones in sight. */
const OVER = 1;

/** Rows and columns that a key goes on. @type {Record<string, [number, number]>} */
const STEPS = {
  ArrowDown: [1, 0],
  ArrowUp: [-1, 0],
  ArrowRight: [0, 1],
  ArrowLeft: [0, -1],
  Home: [-Infinity, 0],
  End: [Infinity, 0],
};

/**
 * @typedef {object} GridOptions
 * @property {string} label
 * @property {(column: number) => Child} head what stands above a column
 * @property {(column: number, row: number) => Child} cell
 * @property {(column: number, row: number) => string} keyOf of a cell: it is filled again only when this changes
 * @property {(column: number) => string} headKeyOf
 */

export class RolloutGrid {
  /** @param {AbortSignal} closed @param {GridOptions} options */
  constructor(closed, options) {
    this.options = options;
    this.rows = 0;
    this.columns = 0;
    this.rowPx = 240;
    this.frame = 0;
    /** @type {[row: number, column: number]} where the focus is, or goes first */
    this.at = [0, 0];
    /** @type {Map<string, HTMLElement>} rows and cells in the document */
    this.parts = new Map();
    this.head = h("div", { class: "gridhead", role: "row" });
    this.body = h("div", { class: "gridbody", role: "rowgroup" });
    this.element = h(
      "div",
      { class: "rolloutgrid", role: "table", "aria-label": options.label, tabindex: "0" },
      h("div", { role: "rowgroup", class: "gridheadgroup" }, this.head),
      this.body,
    );
    const sizes = new ResizeObserver(() => this.#renderSoon());
    sizes.observe(this.element);
    this.element.addEventListener("scroll", () => this.#renderSoon(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
    this.body.addEventListener("focusin", (event) => this.#focused(event));
    closed.addEventListener("abort", () => {
      cancelAnimationFrame(this.frame);
      sizes.disconnect();
    });
  }

  /** A phone shows one column and the beginning of the next. */
  get columnPx() {
    return Math.min(COLUMN_PX, Math.max(220, this.element.clientWidth - LABEL_PX - 40));
  }

  /** @param {number} rows @param {number} columns */
  show(rows, columns) {
    this.rows = rows;
    this.columns = columns;
    this.element.setAttribute("aria-rowcount", String(rows + 1));
    this.element.setAttribute("aria-colcount", String(columns + 1));
    this.#renderSoon();
  }

  /** @param {number} row */
  scrollToRow(row) {
    this.element.scrollTop = row * this.rowPx;
  }

  #renderSoon() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#render());
  }

  #render() {
    const { columnPx, rowPx, rows, columns, element } = this;
    const firstColumn = Math.max(0, Math.floor(element.scrollLeft / columnPx) - OVER);
    const endColumn = Math.min(columns, Math.ceil((element.scrollLeft + element.clientWidth) / columnPx) + OVER);
    const firstRow = Math.max(0, Math.floor(element.scrollTop / rowPx) - OVER);
    const endRow = Math.min(rows, Math.ceil((element.scrollTop + element.clientHeight) / rowPx) + OVER);
    const width = LABEL_PX + columns * columnPx;
    for (const box of [this.head, this.body]) box.style.setProperty("width", `${width}px`);
    this.body.style.setProperty("height", `${rows * rowPx}px`);
    element.style.setProperty("--row", `${rowPx}px`);
    element.style.setProperty("--column", `${columnPx}px`);
    /** @type {Set<string>} */
    const wanted = new Set();
    const corner = this.#part(wanted, "corner", this.head, "columnheader", "gridlabel");
    if (!corner.textContent) corner.textContent = "step";
    for (let column = firstColumn; column < endColumn; column += 1) {
      const box = this.#part(wanted, `head ${column}`, this.head, "columnheader", "gridcolumn");
      this.#place(box, column);
      this.#fill(box, this.options.headKeyOf(column), () => this.options.head(column));
    }
    for (let row = firstRow; row < endRow; row += 1) this.#renderRow(wanted, row, firstColumn, endColumn);
    for (const [key, part] of this.parts) {
      if (wanted.has(key)) continue;
      part.remove();
      this.parts.delete(key);
    }
  }

  /** @param {Set<string>} wanted @param {number} row @param {number} firstColumn @param {number} endColumn */
  #renderRow(wanted, row, firstColumn, endColumn) {
    const line = this.#part(wanted, `row ${row}`, this.body, "row", "gridrow");
    line.style.setProperty("top", `${row * this.rowPx}px`);
    line.setAttribute("aria-rowindex", String(row + 2));
    const label = this.#part(wanted, `label ${row}`, line, "rowheader", "gridlabel");
    if (!label.textContent) label.textContent = String(row + 1);
    for (let column = firstColumn; column < endColumn; column += 1) {
      const box = this.#part(wanted, `cell ${row} ${column}`, line, "cell", "gridcell");
      this.#place(box, column);
      box.dataset.at = `${row} ${column}`;
      box.setAttribute("tabindex", row === this.at[0] && column === this.at[1] ? "0" : "-1");
      this.#fill(box, this.options.keyOf(column, row), () => this.options.cell(column, row));
    }
  }

  /** @param {HTMLElement} box @param {number} column */
  #place(box, column) {
    box.style.setProperty("left", `${LABEL_PX + column * this.columnPx}px`);
    box.setAttribute("aria-colindex", String(column + 2));
  }

  /** @param {HTMLElement} box @param {string} key @param {() => Child} make */
  #fill(box, key, make) {
    if (box.dataset.key === key) return;
    const inside = box.contains(document.activeElement) && document.activeElement?.getAttribute("data-key");
    box.dataset.key = key;
    replace(box, make());
    const again = inside && box.querySelector(`[data-key="${CSS.escape(inside)}"]`);
    if (again instanceof HTMLElement && again !== box) again.focus({ preventScroll: true });
  }

  /**
   * @param {Set<string>} wanted
   * @param {string} key
   * @param {HTMLElement} parent
   * @param {string} role
   * @param {string} kind a class
   * @returns {HTMLElement}
   */
  #part(wanted, key, parent, role, kind) {
    wanted.add(key);
    let part = this.parts.get(key);
    if (!part) {
      part = h("div", { class: kind, role });
      this.parts.set(key, part);
      parent.append(part);
    }
    return part;
  }

  /** @param {FocusEvent} event */
  #focused(event) {
    const cell = /** @type {HTMLElement} */ (event.target).closest(".gridcell");
    if (!(cell instanceof HTMLElement)) return;
    const [row = 0, column = 0] = (cell.dataset.at ?? "").split(" ").map(Number);
    this.at = [row, column];
    for (const other of this.body.querySelectorAll('.gridcell[tabindex="0"]')) other.setAttribute("tabindex", "-1");
    cell.setAttribute("tabindex", "0");
  }

  /** Arrows go from cell to cell, Enter into the session at that turn. @param {KeyboardEvent} event */
  #onKey(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target !== this.element && !target.classList.contains("gridcell")) return;
    if (event.key === "Enter") {
      target.querySelector("a")?.click();
      return;
    }
    const [row, column] = target === this.element ? [this.at[0], this.at[1]] : this.at;
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    this.#goTo(Math.max(0, Math.min(this.rows - 1, row + step[0])), Math.max(0, Math.min(this.columns - 1, column + step[1])));
  }

  /** @param {number} row @param {number} column */
  #goTo(row, column) {
    const { element, rowPx, columnPx } = this;
    const [top, left] = [row * rowPx, column * columnPx];
    const below = element.clientHeight - this.head.offsetHeight - rowPx;
    const right = element.clientWidth - LABEL_PX - columnPx;
    element.scrollTop = Math.min(top, Math.max(element.scrollTop, top - Math.max(0, below)));
    element.scrollLeft = Math.min(left, Math.max(element.scrollLeft, left - Math.max(0, right)));
    this.at = [row, column];
    cancelAnimationFrame(this.frame);
    this.#render();
    this.parts.get(`cell ${row} ${column}`)?.focus({ preventScroll: true });
  }
}
