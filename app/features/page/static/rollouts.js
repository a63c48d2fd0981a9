/** Rollouts side by side: those of a group, or those that the address names. A row is a step of each. */

import { get } from "./api.js";
import { copyCurl } from "./copy.js";
import { bar, button, h, replace, setText } from "./dom.js";
import { count, decimal } from "./format.js";
import { groupHref, setQuery, wholeNumber } from "./route.js";
import { columnHead, turnCell } from "./rolloutcell.js";
import { firstDifference, RolloutData } from "./rolloutdata.js";
import { RolloutDiff } from "./rolloutdiff.js";
import { RolloutGrid } from "./rolloutgrid.js";
import { noGroup, View } from "./view.js";
import { named } from "./visible.js";

/** @import {Child, Group, SessionRow} from "../ui_types.d.ts" */
/** @import {Column} from "./rolloutdata.js" */
/** @import {Place} from "./view.js" */

/** Columns at a time; a larger group has pages. */
const COLUMNS = 64;

const SORTS = {
  attempt: "attempt",
  best: "reward, highest first",
  worst: "reward, lowest first",
  longest: "most tokens first",
};

export class RolloutsView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { id, query }) {
    super(root);
    this.id = id;
    /** @type {string[]} every rollout, in the order of attempts or of the address */
    this.ids = [];
    /** @type {Map<string, number|null>} as the group's list says, before a rollout is read */
    this.rewards = new Map();
    this.from = 0;
    this.sort = "attempt";
    /** @type {string[]} */
    this.chosen = [];
    this.asked = "";
    this.data = new RolloutData(this.closed, () => this.#showSoon());
    this.columns = /** @type {Column[]} */ ([]);
    this.differences = /** @type {(number|null)[]} */ ([]);
    this.frame = 0;
    this.grid = new RolloutGrid(this.closed, {
      label: "Rollouts side by side",
      head: (column) => this.#head(column),
      cell: (column, row) => this.#cell(column, row),
      headKeyOf: (column) => this.#headKey(column),
      keyOf: (column, row) => this.#cellKey(column, row),
    });
    this.diff = new RolloutDiff(this.data, () => this.#choose([]));
    this.sortField = options("Order", SORTS, (value) => {
      this.sort = value;
      this.#remember();
      this.#show();
    });
    this.total = h("span", { role: "status" });
    this.jump = button("First difference", () => this.#jump());
    this.pages = h("span");
    replace(
      root,
      bar(
        h("h1", null, id ? ["Rollouts of ", h("a", { href: groupHref(id) }, named(id))] : "Rollouts"),
        copyCurl(() => ({
          path: `/ui/api/sessions/${encodeURIComponent(this.columns[0]?.sessionId ?? "")}/rollout`,
          parameters: { limit: 20 },
        })),
      ),
      h(
        "div",
        { class: "bar" },
        h("label", null, "Order ", this.sortField),
        this.jump,
        this.total,
        this.pages,
      ),
      this.problem,
      this.diff.element,
      this.grid.element,
    );
    this.closed.addEventListener("abort", () => cancelAnimationFrame(this.frame));
    this.onQuery(query);
  }

  /** @param {string} code */
  absent(code) {
    return code === "not_found" ? noGroup(this.id) : null;
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    const sort = query.get("sort") ?? "";
    this.sort = sort in SORTS ? sort : "attempt";
    this.sortField.value = this.sort;
    this.chosen = listOf(query.get("diff")).slice(0, 2);
    this.from = wholeNumber(query.get("from"), 0) ?? 0;
    this.named = listOf(query.get("sessions"));
    this.refresh();
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    for (const row of rows) {
      for (const column of this.data.columns) {
        const isIt = column.sessionId === row.session_id && column.head;
        if (isIt && row.version > isIt.version) this.data.refresh(column);
      }
    }
    if (this.id && rows.some((row) => row.group_id === this.id && !this.ids.includes(row.session_id))) this.changed();
  }

  refresh() {
    const request = async (/** @type {AbortSignal} */ signal) => {
      if (!this.id) return null;
      return /** @type {Group} */ (await get(`/groups/${encodeURIComponent(this.id)}`, {}, signal));
    };
    return this.read(request, (group) => {
      this.ids = group ? group.attempts.map((one) => one.session_id) : this.named ?? [];
      this.rewards = new Map(group?.attempts.map((one) => [one.session_id, one.reward]));
      this.#open();
    });
  }

  /** Those of this page: they are read anew only where they are others. */
  #open() {
    const page = this.ids.slice(this.from, this.from + COLUMNS);
    const asked = page.join(",");
    if (asked !== this.asked) this.data.open(page);
    this.asked = asked;
    this.#show();
  }

  #remember() {
    setQuery({
      sessions: this.id ? null : this.ids.join(","),
      sort: this.sort === "attempt" ? null : this.sort,
      diff: this.chosen.join(","),
      from: this.from || null,
    });
  }

  #showSoon() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#show());
  }

  #show() {
    this.columns = this.#sorted();
    const first = this.columns[0]?.head;
    this.differences = this.columns.map(({ head }) => (head && first ? firstDifference(head, first) : null));
    const pair = this.chosen.map((id) => this.data.column(id)).filter((one) => one !== undefined);
    const [one, other] = pair;
    this.diff.show(one && other ? [one, other] : null);
    this.grid.element.hidden = Boolean(one && other);
    const steps = Math.max(0, ...this.columns.map(({ head }) => head?.marks.length ?? 0));
    this.grid.show(steps, this.columns.length);
    this.#showBar(steps);
  }

  /** @param {number} steps */
  #showBar(steps) {
    const rewards = this.columns.map((one) => this.#reward(one)).filter((one) => one !== null);
    const range = rewards.length ? `, rewards ${decimal(Math.min(...rewards))} to ${decimal(Math.max(...rewards))}` : "";
    const chosen = this.chosen.length === 1 ? "; choose another one for the diff" : "";
    const word = this.columns.length === 1 ? "rollout" : "rollouts";
    setText(this.total, `${count(this.columns.length)} ${word}, ${count(steps)} steps${range}${chosen}`);
    this.jump.disabled = !this.differences.some((one) => one !== null);
    const page = (/** @type {number} */ to, /** @type {string} */ label) =>
      button(label, () => this.#goTo(to), { disabled: to < 0 || to >= this.ids.length });
    replace(
      this.pages,
      this.ids.length > COLUMNS && [
        page(this.from - COLUMNS, "previous"),
        page(this.from + COLUMNS, "next"),
        ` ${count(this.from + 1)} to ${count(this.from + this.columns.length)} of ${count(this.ids.length)}`,
      ],
      !this.ids.length && !this.requests.isRunning && "No rollout is named.",
    );
  }

  /** @param {number} from */
  #goTo(from) {
    this.from = from;
    this.#remember();
    this.#open();
  }

  /** @param {Column} column @returns {number|null} */
  #reward({ sessionId, head }) {
    return head ? head.reward : (this.rewards.get(sessionId) ?? null);
  }

  /** @returns {Column[]} those without a reward come last */
  #sorted() {
    const columns = [...this.data.columns];
    if (this.sort === "longest") return columns.sort((a, b) => (b.head?.tokens ?? 0) - (a.head?.tokens ?? 0));
    if (this.sort === "attempt") return columns;
    const sign = this.sort === "best" ? -1 : 1;
    const rank = (/** @type {Column} */ one) => {
      const reward = this.#reward(one);
      return reward === null ? Number.MAX_VALUE : sign * reward;
    };
    return columns.sort((a, b) => rank(a) - rank(b));
  }

  /** To the first step in which any rollout differs from the first. */
  #jump() {
    const places = this.differences.filter((one) => one !== null);
    if (places.length) this.grid.scrollToRow(Math.min(...places));
  }

  /** @param {string[]} ids */
  #choose(ids) {
    this.chosen = ids;
    this.#remember();
    this.#show();
  }

  /** @param {number} at */
  #headKey(at) {
    const column = this.columns[at];
    const key = [column?.key, column?.head?.version, column?.head?.branch, String(column?.error ?? ""), at === 0];
    return JSON.stringify([...key, this.differences[at], this.chosen.includes(column?.key ?? "")]);
  }

  /** @param {number} at @returns {Child} */
  #head(at) {
    const column = this.columns[at];
    if (!column) return null;
    const id = column.key;
    return columnHead(column, {
      isReference: at === 0,
      differsFrom: this.differences[at] ?? null,
      isChosen: this.chosen.includes(id),
      onChoose: (isChosen) => {
        const others = this.chosen.filter((one) => one !== id);
        this.#choose(isChosen ? [...others, id].slice(-2) : others);
      },
      onBranch: (branch) => this.data.choose(column, branch),
    });
  }

  /** @param {number} at @param {number} row */
  #cellKey(at, row) {
    const column = this.columns[at];
    const mark = column?.head?.marks[row];
    if (!column || !mark) return "none";
    const step = this.data.step(column, row);
    const state = step instanceof Error ? "failed" : step ? "read" : "loading";
    return `${column.key} ${mark[0]} ${mark[1]} ${state} ${this.differences[at] === row}`;
  }

  /** @param {number} at @param {number} row @returns {Child} */
  #cell(at, row) {
    const column = this.columns[at];
    return column && turnCell(column, row, this.data.step(column, row), this.differences[at] === row);
  }
}

/** @param {string|null} text @returns {string[]} ids, which have no comma */
function listOf(text) {
  return (text ?? "").split(",").filter(Boolean);
}

/** @param {string} label @param {Record<string, string>} values @param {(value: string) => void} onChange */
function options(label, values, onChange) {
  const select = h(
    "select",
    { "aria-label": label },
    Object.entries(values).map(([value, text]) => h("option", { value }, text)),
  );
  select.addEventListener("change", () => onChange(select.value));
  return select;
}
