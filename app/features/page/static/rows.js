/** Table rows that are kept by key and filled in place: unchanged rows are not touched, so focus and selection stay. */

import { arrange, badge, h, replace, scrollRegion, setBadge, setText } from "./dom.js";
import { count, duration, setSince, since } from "./format.js";
import { groupHref, sessionHref } from "./route.js";
import { actionText, visibleText } from "./visible.js";

/** @import {Action, Fill, Summary} from "../ui_types.d.ts" */

/** @template Row @typedef {import("../ui_types.d.ts").Column<Row>} Column */
/** @template Row @typedef {{row: Row|null, element: HTMLTableRowElement, cells: HTMLElement[]}} Line null: not filled yet */

/** @template Row */
export class Rows {
  /** @param {HTMLElement} body the tbody @param {Column<Row>[]} columns @param {(row: Row) => string} keyOf */
  constructor(body, columns, keyOf) {
    this.body = body;
    this.columns = columns;
    this.keyOf = keyOf;
    this.lines = /** @type {Map<string, Line<Row>>} */ (new Map());
  }

  /**
   * Have exactly these rows, in this order.
   * @param {Row[]} rows
   * @param {(element: HTMLTableRowElement, row: Row, index: number) => void} [decorate]
   */
  show(rows, decorate) {
    const lines = rows.map((row, index) => {
      const key = this.keyOf(row);
      const line = this.lines.get(key) ?? this.#newLine(key);
      if (line.row !== row) line.cells.forEach((cell, at) => this.columns[at]?.fill(cell, row));
      line.row = row;
      decorate?.(line.element, row, index);
      return line;
    });
    arrange(this.body, lines.map(({ element }) => element));
    this.lines = new Map(lines.map((line) => [line.element.dataset.key ?? "", line]));
  }

  /** @param {string} key @returns {Line<Row>} */
  #newLine(key) {
    const cells = this.columns.map(newCell);
    return { row: null, element: h("tr", { dataset: { key } }, cells), cells };
  }
}

/** @template Row @param {Column<Row>} column @returns {HTMLElement} */
function newCell(column) {
  const kind = column.number ? "number" : column.width === "auto" ? null : "clip";
  return column.isHeader ? h("th", { scope: "row", class: kind }) : h("td", { class: kind });
}

/**
 * The header's row.
 * @template {Omit<Column<any>, "fill">} Title @param {Title[]} columns @param {(column: Title) => void} [onSort]
 */
export function headerRow(columns, onSort) {
  return h(
    "tr",
    null,
    columns.map((column) => {
      const press = column.sort && onSort && (() => onSort(column));
      return h(
        "th",
        { scope: "col", class: column.number ? "number" : null, title: column.hint, dataset: { sort: column.sort ?? "" } },
        press ? h("button", { type: "button", onclick: press }, column.title) : h("span", null, column.title),
      );
    }),
  );
}

/**
 * A table of some rows, all of them in the document.
 * @template Row @param {string} label @param {Column<Row>[]} columns @param {(row: Row) => string} keyOf
 */
export function smallTable(label, columns, keyOf) {
  const body = h("tbody");
  const table = h("table", { class: "small", "aria-label": label }, h("thead", null, headerRow(columns)), body);
  return { element: scrollRegion(label, table), rows: new Rows(body, columns, keyOf) };
}

/** @template Row @param {(row: Row) => string} text @returns {Fill<Row>} */
export function textCell(text) {
  return (cell, row) => {
    const now = text(row);
    setText(cell, now);
    cell.title = cell.classList.contains("clip") ? now : "";
  };
}

/**
 * A column of text.
 * @template Row @param {string} title @param {(row: Row) => string} text @param {Partial<Column<Row>>} [more]
 * @returns {Column<Row>}
 */
export function column(title, text, more) {
  return { title, fill: textCell(text), ...more };
}

/** @type {typeof column} */
export function numberColumn(title, text, more) {
  return column(title, text, { width: "76px", number: true, ...more });
}

/**
 * @template {{session_id: string}} Row @param {Partial<Column<Row>>} more @param {(row: Row) => string} [href]
 * @returns {Column<Row>}
 */
export function sessionColumn(more, href = (row) => sessionHref(row.session_id)) {
  return { title: "Session", isHeader: true, fill: linkCell((row) => row.session_id, href), ...more };
}

/** @template {{run?: string, group_id: string|null}} Row @param {string} width @returns {Column<Row>} */
export function groupColumn(width) {
  const fill = linkCell((/** @type {Row} */ row) => row.group_id && visibleText(row.group_id), (row) => groupHref(row.group_id ?? "", row.run));
  return { title: "Group", width, fill };
}

/**
 * @template Row @param {(row: Row) => string|null} text null: nothing @param {(row: Row) => string} href
 * @returns {Fill<Row>}
 */
export function linkCell(text, href) {
  return (cell, row) => {
    const now = text(row);
    if (now == null) return setText(cell, "–");
    const link = cell.querySelector("a") ?? replace(cell).appendChild(h("a"));
    link.setAttribute("href", href(row));
    setText(link, now);
    cell.title = now;
  };
}

/** @template Row @param {(row: Row) => string} state @param {(row: Row) => string|undefined} [tone] @returns {Fill<Row>} */
export function badgeCell(state, tone) {
  return (cell, row) => {
    const found = /** @type {HTMLElement|null} */ (cell.firstElementChild);
    if (found) setBadge(found, state(row), tone?.(row));
    else cell.append(badge(state(row), tone?.(row)));
  };
}

/**
 * Boxes that pick sessions; `onPick` gets the ids of all that are picked.
 * @template {{session_id: string}} Row @param {(picked: Set<string>) => void} onPick
 * @returns {Column<Row>}
 */
export function pickColumn(onPick) {
  const picked = new Set();
  /** @type {Fill<Row>} */
  const fill = (cell, { session_id: id }) => {
    let box = cell.querySelector("input");
    if (!box) {
      const made = h("input", { type: "checkbox", "aria-label": `pick ${id}` });
      made.addEventListener("change", () => {
        picked[made.checked ? "add" : "delete"](id);
        onPick(picked);
      });
      cell.replaceChildren((box = made));
    }
    box.checked = picked.has(id);
  };
  return { title: "Pick", hint: "Show these side by side", width: "44px", fill };
}

/** @template Row @param {(row: Row) => number|null} at @param {"ago"|"for"} [style] @returns {Fill<Row>} */
export function sinceCell(at, style = "ago") {
  return (cell, row) => {
    const found = /** @type {HTMLElement|null} */ (cell.firstElementChild);
    if (found) setSince(found, at(row), style);
    else cell.replaceChildren(since(at(row), style));
  };
}

/**
 * What somebody did, in a line: calls as code, text as text.
 * @template Row @param {(row: Row) => readonly Action[]} actions
 * @returns {Fill<Row>}
 */
export function actionsCell(actions) {
  return (cell, row) => {
    const done = actions(row);
    textCell(() => done.map(actionText).join(" · ") || "–")(cell, row);
    cell.classList.toggle("code", done[0]?.tool != null);
  };
}

/**
 * How long a session took so far, from its creation to the end of its newest turn.
 * @template {{about?: Summary, state: string}} Row @param {HTMLElement} cell @param {Row} row
 */
export function durationCell(cell, row) {
  const { started_at: start, ended_at: end = null } = row.about ?? {};
  const isRunning = row.state === "running" || row.state === "paused";
  if (start !== undefined && isRunning) sinceCell(() => start, "for")(cell, row);
  else textCell(() => (start === undefined || end === null ? "–" : duration(end - start)))(cell, row);
}

/** How many errors there were of either kind. @template {{engine_errors: number, tool_errors: number}} Row */
export function errorColumns() {
  const column = (/** @type {string} */ title, /** @type {"engine_errors"|"tool_errors"} */ sort, /** @type {string} */ hint) => {
    /** @type {Column<Row>["fill"]} */
    const fill = (cell, row) => cell.replaceChildren(row[sort] ? badge(count(row[sort]), "bad") : "0");
    return { title, width: "102px", number: true, sort, hint, value: (/** @type {Row} */ row) => row[sort], fill };
  };
  return [
    column("Engine errors", "engine_errors", "Turns that ended without a commit, and requests that a limit refused"),
    column("Tool errors", "tool_errors", "Results of calls that failed"),
  ];
}
