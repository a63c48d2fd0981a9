/** Rollouts side by side: those of a group, or those that the address names. Their steps are aligned with the first one's. */

import { get } from "./api.js";
import { copyButton } from "./copy.js";
import { badge, bar, button, h, icon, refill, replace, scrollRegion, setText } from "./dom.js";
import { amount, compact, count, decimal } from "./format.js";
import { choice } from "./form.js";
import { chosenRun, groupHref, sessionHref, setQuery, wholeNumber } from "./route.js";
import { inWords } from "./verdicts.js";
import { View } from "./view.js";
import { actionText, named, visible, visibleText } from "./visible.js";

/** @import {Cell, Child, ComparedRow, Comparison, Group, Rollout, SessionRow, StepTexts, UnreadRollout} from "../ui_types.d.ts" */
/** @import {Place} from "./view.js" */

/** Rollouts of a page, and of one request, which orders them; and its characters. The server has these limits. */
const COLUMNS = 12;
const [MOST, CHARACTERS] = [250, 15_000];
/** Rows in the document at first; a button adds as many. */
const ROWS = 100;
const USUAL_ENDS = new Set([null, "stop", "tool_calls", "end_turn", "tool_use"]);

/** @typedef {ComparedRow & {at: number}} Row with its place */

export class RolloutsView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { id, query }) {
    super(root, "group", id);
    /** @type {string[]} every rollout, a session's id or `id@branch`, in the order of attempts or of the address */
    this.keys = [];
    /** @type {Map<string, string>} keys of the branches that somebody chose, by those of `keys` */
    this.chosen = new Map();
    this.start = 0;
    /** @type {Comparison|null} */
    this.data = null;
    /** @type {Map<string, Promise<StepTexts[]>>} by what decides them */
    this.texts = new Map();
    /** @type {Map<string, boolean>} columns that somebody opened or folded, by key */
    this.opened = new Map();
    /** @type {Map<number|string, boolean>} rows that somebody opened or folded, and `same 3`: equal ones from row 3 on */
    this.unfolded = new Map();
    this.most = ROWS;
    this.order = choice("order", ["attempt", "best", "worst", "longest"], "best against worst");
    this.order.addEventListener("change", () => this.#go(0));
    this.total = h("span", { role: "status" });
    this.jump = button("First difference", () => this.body.querySelector(".unequal")?.scrollIntoView({ block: "center" }));
    this.pages = h("span");
    this.head = h("tr");
    this.body = h("tbody");
    this.table = h("table", { class: "sidebyside", "aria-label": "Rollouts side by side" }, h("thead", null, this.head), this.body);
    const element = scrollRegion("Rollouts side by side", this.table);
    element.classList.add("fill");
    const command = () => ["turnlog diff", ...this.open.slice(0, 2).map((at) => this.columns[at]?.key)].join(" ");
    replace(
      root,
      bar(h("h1", null, id ? ["Rollouts of ", h("a", { href: groupHref(id) }, named(id))] : "Rollouts"), [
        h("label", null, "Order ", this.order),
        this.jump,
        this.total,
        this.pages,
        copyButton(command, "Copy as command"),
      ]),
      this.problem,
      element,
    );
    this.onQuery(query);
  }

  get columns() {
    return this.data?.columns ?? [];
  }

  /** @returns {number[]} the places of the columns whose steps are shown: of the best and the worst, unless somebody opened others */
  get open() {
    const isOpen = (/** @type {Rollout|UnreadRollout} */ { key }, /** @type {number} */ at) => !at || (this.opened.get(key) ?? (!this.data?.is_contrast || at < 2));
    return this.columns.flatMap((column, at) => (isOpen(column, at) ? [at] : []));
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.order.value = query.get("sort") ?? "";
    this.start = wholeNumber(query.get("from"), 0) ?? 0;
    if (!this.id) this.keys = (query.get("sessions") ?? "").split(",").filter(Boolean);
    this.unfolded.clear();
    this.refresh();
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    const ids = new Set(this.columns.map((one) => one.session_id));
    if (rows.some((row) => (this.id ? row.group_id === this.id : ids.has(row.session_id)))) this.changed();
  }

  refresh() {
    const request = async (/** @type {AbortSignal} */ signal) => {
      const group = `/groups/${encodeURIComponent(this.id)}`;
      if (this.id) this.keys = /** @type {Group} */ (await get(group, { run: chosenRun() }, signal)).attempts.map((one) => one.session_id);
      const query = new URLSearchParams({ start: String(this.start), order: this.order.value || "contrast" });
      for (const key of this.keys.slice(0, MOST)) if (String(query).length < CHARACTERS) query.append("rollout", this.chosen.get(key) ?? key);
      return this.keys.length ? /** @type {Comparison} */ (await get("/ui/api/rollouts", query, signal)) : null;
    };
    return this.read(request, (found) => {
      this.data = found;
      this.#show();
    });
  }

  /** @param {number} start */
  #go(start) {
    this.start = start;
    setQuery({ sessions: this.id ? null : this.keys.join(","), sort: this.order.value, from: start || null });
    this.unfolded.clear();
    this.refresh();
  }

  #show() {
    const { columns, open } = this;
    this.table.style.setProperty("--columns", String(open.length));
    this.table.style.setProperty("--shut", String(columns.length - open.length));
    refill(this.head, h("th", { scope: "col" }, h("span", null, "Step")), columns.map((column, at) => this.#head(column, at, open.includes(at))));
    /** @type {(() => HTMLElement)[]} */
    const lines = [];
    const earliest = Math.min(...open.map((at) => /** @type {Rollout} */ (columns[at]).differs_at ?? Infinity));
    const rows = (this.data?.rows ?? []).map((row, at) => ({ ...row, at })).filter(({ cells }) => open.some((at) => cells[at]));
    for (const part of parts(rows, ({ cells }) => open.length > 1 && open.every((at) => cells[at]?.same))) {
      const fold = `same ${part.rows[0]?.at}`;
      if (part.isSame) lines.push(() => this.#fold(part.rows, fold));
      if (!part.isSame || this.unfolded.get(fold)) lines.push(...part.rows.map((row) => () => this.#row(row, open, row.at === earliest)));
    }
    const more = () => ((this.most += ROWS), this.#show());
    const left = lines.length - this.most;
    const rest = left > 0 && h("tr", null, h("th", { colspan: columns.length + 1 }, button(`${count(left)} more rows`, more)));
    refill(this.body, lines.slice(0, this.most).map((make) => make()), rest);
    this.jump.disabled = earliest === Infinity;
    this.#showPages();
  }

  #showPages() {
    const { start, columns } = this;
    const total = this.data?.total ?? 0;
    setText(this.total, total < this.keys.length ? `the first ${count(total)} of ${amount(this.keys.length, "rollout")}` : amount(total, "rollout"));
    const page = (/** @type {number} */ from, /** @type {string} */ label) =>
      button(label, () => this.#go(from), { disabled: from < 0 || from >= total });
    replace(
      this.pages,
      total > COLUMNS && [
        page(start - COLUMNS, "previous"),
        page(start + COLUMNS, "next"),
        ` ${count(start + 1)} to ${count(start + columns.length)} of ${count(total)}`,
      ],
      !this.data && "No rollout was selected.",
    );
  }

  /** @param {string|number} what @param {boolean} isOpen */
  #toggle(what, isOpen) {
    this.unfolded.set(what, !isOpen);
    this.#show();
  }

  /** @param {Row[]} rows that are the same in all @param {string} fold */
  #fold(rows, fold) {
    const isOpen = this.unfolded.get(fold) ?? false;
    const steps = rows.filter(({ step }) => step).length;
    const text = `${steps ? amount(steps, "step") : "The task"} ${steps > 1 ? "are" : "is"} the same. `;
    const press = button(isOpen ? "fold" : "show", () => this.#toggle(fold, isOpen), { "data-step": fold, "aria-expanded": String(isOpen) });
    return h("tr", { class: "common" }, h("th", { colspan: this.columns.length + 1, scope: "row" }, text, press));
  }

  /** @param {Row} row @param {number[]} open @param {boolean} isFirst it has the first difference */
  #row(row, open, isFirst) {
    const isOpen = this.unfolded.get(row.at) ?? isFirst;
    const label = row.step === null ? "+" : row.step || "task";
    const name = row.step === null ? "An additional step" : row.step ? `Step ${row.step}` : "Task";
    const attributes = { class: "link", "aria-expanded": String(isOpen), "aria-label": `${name}: whole texts`, "data-step": row.at };
    const cells = this.columns.map((column, at) => {
      const cell = row.cells[at];
      if (!open.includes(at)) return h("td", { class: "shut" }, cell && (cell.same ? "=" : "≠"));
      const isUnequal = "differs_at" in column && column.differs_at === row.at;
      return h("td", { class: isUnequal ? "unequal" : cell ? null : "gap" }, cell && (isOpen ? "Loading …" : short(column, cell)));
    });
    if (isOpen) this.#fill(row, open, cells);
    return h("tr", null, h("th", { scope: "row" }, button([icon(isOpen ? "down" : "play"), ` ${label}`], () => this.#toggle(row.at, isOpen), attributes)), cells);
  }

  /** The whole texts; marked is what the first column lacks, and of two columns also what only the first has. @param {Row} row @param {number[]} open @param {HTMLElement[]} cells */
  #fill(row, open, cells) {
    const query = new URLSearchParams(open.map((at) => ["step", `${this.columns[at]?.key}/${row.cells[at]?.turn ?? ""}`]));
    const name = JSON.stringify([String(query), row.cells.map((cell) => cell?.results)]);
    const texts = /** @type {Promise<StepTexts[]>} */ (this.texts.get(name) ?? get("/ui/api/rollouts/texts", query, this.closed));
    this.texts.set(name, texts);
    texts.then(
      (all) => open.forEach((at, index) => {
        const [column, cell, box, text] = [this.columns[at], row.cells[at], cells[at], all[index]];
        if (column && cell && box && text) replace(box, whole(column, cell, text, at ? "ins" : "del"));
      }),
      (error) => {
        this.texts.delete(name);
        if (!this.closed.aborted) setText(/** @type {HTMLElement} */ (cells[open[0] ?? 0]), String(error instanceof Error ? error.message : error));
      },
    );
  }

  /** @param {Rollout|UnreadRollout} column @param {number} at @param {boolean} isOpen @returns {HTMLElement} */
  #head(column, at, isOpen) {
    const { key, session_id: id, name } = column;
    const link = h("strong", null, h("a", { href: sessionHref(id, { branch: key.split("@")[1] }), title: key }, visible(name)));
    if ("error" in column) return h("th", { scope: "col" }, link, h("p", { class: "note" }, visible(column.error)));
    const toggle = () => {
      this.opened.set(key, !isOpen);
      this.#show();
    };
    const attributes = { class: "link", "aria-expanded": String(isOpen), "aria-label": `Steps of ${name}`, "data-step": key };
    const reward = `${isOpen ? "reward " : ""}${decimal(column.reward)}`;
    const who = h(
      "p",
      { class: "who" },
      at > 0 && this.columns.length > 2 && button(icon(isOpen ? "down" : "play"), toggle, attributes),
      link,
      isOpen && badge(column.status),
      h("span", { class: "reward" }, column.reward === null ? "no reward" : reward),
    );
    if (!isOpen) return h("th", { scope: "col", class: "shut" }, who);
    const compared = column.difference ?? (at ? "No difference" : "The others are compared with this one");
    return h(
      "th",
      { scope: "col" },
      who,
      h("p", { class: "note" }, visible(verdictsOf(column))),
      h("p", { class: "note" }, `${amount(column.turns, "turn")}, ${compact(column.tokens)} tokens, ${compact(column.output_tokens)} sampled`),
      this.#branches(column),
      this.columns.length > 1 && h("p", { class: column.difference ? "differs" : "note" }, visible(`${compared}.`)),
    );
  }

  /** @param {Rollout} column @returns {Child} */
  #branches({ key, session_id: id, branch: current, branches }) {
    if (!branches.length) return null;
    const option = (/** @type {Rollout["branches"][number]} */ { branch, cause, step }) =>
      h("option", { value: branch }, `branch ${branch}${cause ? `, ${cause}` : ""}${step ? ` after step ${step}` : ""}`);
    const select = h("select", { "aria-label": `branch of ${id}` }, branches.map(option));
    select.value = String(current);
    select.addEventListener("change", () => {
      const own = this.keys.find((one) => (this.chosen.get(one) ?? one) === key);
      this.chosen.set(own ?? key, `${id}@${select.value}`);
      this.refresh();
    });
    return h("p", null, select);
  }
}

/** @param {Row[]} rows @param {(row: Row) => boolean} isSame @returns {{isSame: boolean, rows: Row[]}[]} neighbours that are alike in this are together */
function parts(rows, isSame) {
  /** @type {{isSame: boolean, rows: Row[]}[]} */
  const found = [];
  for (const row of rows) {
    const last = found.at(-1);
    if (last?.isSame === isSame(row)) last.rows.push(row);
    else found.push({ isSame: isSame(row), rows: [row] });
  }
  return found;
}

/** @param {Rollout} column @returns {string} its reward's components and its annotations */
function verdictsOf({ components, annotations }) {
  const rewarded = Object.entries(components).map(([part, value]) => `${part} ${decimal(value, 2)}`);
  return [...rewarded, ...annotations.map(({ name, value }) => `${name} ${inWords(value)}`)].join(" · ");
}

/** @param {Rollout|UnreadRollout} column @param {Cell} cell @returns {Child} */
function foot({ session_id: id, key }, { turn, output_tokens: tokens, finish_reason: finish }) {
  if (!turn) return null;
  return h(
    "p",
    { class: "who" },
    h("a", { href: sessionHref(id, { turn, branch: key.split("@")[1] }) }, `turn ${turn}`),
    h("span", { class: "note" }, `${compact(tokens)} tokens`),
    !USUAL_ENDS.has(finish) && badge(visibleText(String(finish)), "warn"),
  );
}

/** A step in a few lines: what was done, then what came back. @param {Rollout|UnreadRollout} column @param {Cell} cell @returns {Child} */
function short(column, cell) {
  return [
    foot(column, cell),
    cell.actions.map((action) => h("p", { class: action.tool === null ? "action" : "action code" }, actionText(action))),
    cell.results.map((line) => h("p", { class: "result" }, cell.failed && badge("", "bad"), "→ ", visible(line))),
  ];
}

/** @param {Rollout|UnreadRollout} column @param {Cell} cell @param {StepTexts} texts @param {"ins"|"del"} mark @returns {Child} */
function whole(column, cell, { said, got }, mark) {
  const block = (/** @type {[boolean, string][]} */ text, kind = "") => {
    const marked = text.map(([isNew, part]) => (isNew ? h(mark, null, visible(part)) : visible(part)));
    return text.length > 0 && h("div", { class: `text ${kind}`, dir: "auto", tabindex: "0" }, marked);
  };
  return [foot(column, cell), block(said, "saidtext"), got.length > 0 && h("p", { class: "note" }, "then"), block(got)];
}
