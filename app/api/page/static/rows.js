/** Table rows that are kept by key and filled in place: what did not change is not touched, so focus and selection stay. */

import { badge, h, setBadge, setSince, setText, since } from "./dom.js";

/**
 * @typedef {object} Column
 * @property {string} title
 * @property {string} [hint] what the title does not say
 * @property {string} [sort] the server's name for this order; only such a column's header is a button
 * @property {"asc"|"desc"} [first] the order that the first click gives; "desc" where it is left out
 * @property {boolean} [number] aligned to the right
 * @property {string} [width] of the column, in CSS; what is left over goes to those without one
 * @property {boolean} [isHeader] names the row
 * @property {boolean} [isExtra] left out where there is little room
 * @property {(cell: HTMLElement, row: any) => void} fill called again with each new version of the row
 */

export class Rows {
  /**
   * @param {HTMLElement} body the tbody
   * @param {Column[]} columns
   * @param {(row: any) => string} keyOf
   */
  constructor(body, columns, keyOf) {
    this.body = body;
    this.columns = columns;
    this.keyOf = keyOf;
    /** @type {Map<string, {row: any, element: HTMLTableRowElement, cells: HTMLElement[]}>} */
    this.lines = new Map();
  }

  /**
   * Have exactly these rows, in this order.
   * @param {any[]} rows
   * @param {(element: HTMLTableRowElement, row: any, index: number) => void} [dress]
   */
  show(rows, dress) {
    const wanted = new Set(rows.map(this.keyOf));
    for (const [key, line] of this.lines) {
      if (wanted.has(key)) continue;
      line.element.remove();
      this.lines.delete(key);
    }
    const focused = document.activeElement;
    let next = this.body.firstElementChild;
    rows.forEach((row, index) => {
      const line = this.#line(row);
      dress?.(line.element, row, index);
      if (line.element === next) next = next.nextElementSibling;
      else this.body.insertBefore(line.element, next);
    });
    if (focused instanceof HTMLElement && focused !== document.activeElement && this.body.contains(focused)) {
      focused.focus({ preventScroll: true });
    }
  }

  /** Fill every row again, for columns that hang on more than the row. */
  refill() {
    for (const line of this.lines.values()) this.#fill(line);
  }

  /** @param {any} row */
  #line(row) {
    const key = this.keyOf(row);
    let line = this.lines.get(key);
    if (!line) {
      const cells = this.columns.map(newCell);
      line = { row, element: h("tr", { dataset: { key } }, cells), cells };
      this.lines.set(key, line);
      this.#fill(line);
    } else if (line.row !== row) {
      line.row = row;
      this.#fill(line);
    }
    return line;
  }

  /** @param {{row: any, cells: HTMLElement[]}} line */
  #fill(line) {
    this.columns.forEach((column, index) => column.fill(line.cells[index], line.row));
  }
}

/** @param {Column} column @returns {HTMLElement} */
function newCell(column) {
  const kind = classOf(column, column.width === "auto" ? "" : "clip");
  return column.isHeader ? h("th", { scope: "row", class: kind }) : h("td", { class: kind });
}

/** @param {Column} column @param {string} [text] the class of a column of text @returns {string|null} */
function classOf(column, text = "") {
  return [column.number ? "number" : text, column.isExtra && "extra"].filter(Boolean).join(" ") || null;
}

/**
 * @param {Column[]} columns
 * @param {(column: Column) => void} [onSort]
 * @returns {HTMLTableRowElement} the header's row
 */
export function headerRow(columns, onSort) {
  return h(
    "tr",
    null,
    columns.map((column) => {
      const press = column.sort && onSort && (() => onSort(column));
      return h(
        "th",
        { scope: "col", class: classOf(column), title: column.hint, dataset: { sort: column.sort ?? "" } },
        press ? h("button", { type: "button", onclick: press }, column.title) : h("span", null, column.title),
      );
    }),
  );
}

/**
 * A table of some rows, all of them in the document.
 * @param {string} label
 * @param {Column[]} columns
 * @param {(row: any) => string} keyOf
 * @returns {{element: HTMLElement, rows: Rows}}
 */
export function smallTable(label, columns, keyOf) {
  const body = h("tbody");
  const table = h("table", { class: "small", "aria-label": label }, h("thead", null, headerRow(columns)), body);
  const element = h("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": label }, table);
  return { element, rows: new Rows(body, columns, keyOf) };
}

/** @param {(row: any) => string} text @returns {Column["fill"]} */
export function textCell(text) {
  return (cell, row) => {
    const now = text(row);
    setText(cell, now);
    cell.title = cell.classList.contains("clip") ? now : "";
  };
}

/**
 * @param {(row: any) => string|null} text null: nothing
 * @param {(row: any) => string} href
 * @param {(row: any) => string} [more] behind the link
 * @returns {Column["fill"]}
 */
export function linkCell(text, href, more) {
  return (cell, row) => {
    const now = text(row);
    if (now == null) return setText(cell, "–");
    let link = cell.querySelector("a");
    if (!link) {
      link = h("a", { href: href(row) });
      cell.replaceChildren(link, document.createTextNode(""));
    }
    link.setAttribute("href", href(row));
    setText(link, now);
    cell.title = now;
    const rest = /** @type {Text} */ (cell.lastChild);
    const wanted = more?.(row) ?? "";
    if (rest.data !== wanted) rest.data = wanted;
  };
}

/**
 * @param {(row: any) => string} state
 * @param {(row: any) => string|undefined} [tone]
 * @returns {Column["fill"]}
 */
export function badgeCell(state, tone) {
  return (cell, row) => {
    const found = /** @type {HTMLElement|null} */ (cell.firstElementChild);
    if (found) setBadge(found, state(row), tone?.(row));
    else cell.append(badge(state(row), tone?.(row)));
  };
}

/** @param {(row: any) => number|null} at @param {"ago"|"for"} [style] @returns {Column["fill"]} */
export function sinceCell(at, style = "ago") {
  return (cell, row) => {
    const found = /** @type {HTMLElement|null} */ (cell.firstElementChild);
    if (found) setSince(found, at(row), style);
    else cell.append(since(at(row), style));
  };
}
