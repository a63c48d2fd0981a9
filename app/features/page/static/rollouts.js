/** Rollouts side by side: those of a group, or those that the address names. A row is a step of each. */

import { get } from "./api.js";
import { copyCurl } from "./copy.js";
import { difference, divergence } from "./diff.js";
import { badge, bar, button, h, refill, replace, scrollRegion, setText } from "./dom.js";
import { amount, compact, count, decimal } from "./format.js";
import { choice } from "./form.js";
import { chosenRun, groupHref, sessionHref, setQuery, wholeNumber } from "./route.js";
import { View } from "./view.js";
import { actionText, named, parsed, visible, visibleText } from "./visible.js";

/** @import {ChatMessage, Child, Entry, Group, Mark, Rollout, SessionRow} from "../ui_types.d.ts" */
/** @import {Divergence} from "./diff.js" */
/** @import {Place} from "./view.js" */

/** Columns at a time, and rollouts that are read at once; a larger group has pages. */
const COLUMNS = 12;
const AT_ONCE = 4;
/** Steps in the document at first; a button adds as many. */
const STEPS = 100;
/** Of a text that has less in common with the other, no words are marked: all of it differs. */
const LEAST_SAME = 0.4;

/** @type {Record<string, (column: Column) => number>} what comes first is what the others are compared with */
const SORTS = {
  attempt: () => 0,
  best: ({ head }) => -(head?.reward ?? -Infinity),
  worst: ({ head }) => head?.reward ?? Infinity,
  longest: ({ head }) => -(head?.tokens ?? 0),
};

/** A rollout; `key` is its session, or `session@branch`, `head` is null until it is read. */
/** @typedef {{key: string, sessionId: string, branch: number|null, head: Rollout|null, error: unknown}} Column */
/** @typedef {{said: string, results: string}} Content of a step: the reply, and what came back */

export class RolloutsView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { id, query }) {
    super(root, "group", id);
    /** @type {string[]} every rollout, in the order of attempts or of the address */
    this.keys = [];
    this.from = 0;
    /** @type {Map<string, Column>} */
    this.byKey = new Map();
    /** @type {Set<string>} sessions that changed since they were read */
    this.stale = new Set();
    /** @type {Map<string, Promise<Content>>} by what decides it */
    this.contents = new Map();
    /** @type {Map<number, boolean>} steps that somebody unfolded or folded */
    this.unfolded = new Map();
    this.isWhole = false;
    this.most = STEPS;
    this.order = choice("order", Object.keys(SORTS).slice(1), "attempt");
    this.order.addEventListener("change", () => this.#go(0));
    this.total = h("span", { role: "status" });
    this.jump = button("First difference", () => this.body.querySelector(".unequal")?.scrollIntoView({ block: "center" }));
    this.pages = h("span");
    this.head = h("tr");
    this.body = h("tbody");
    this.table = h("table", { class: "sidebyside", "aria-label": "Rollouts side by side" }, h("thead", null, this.head), this.body);
    this.element = scrollRegion("Rollouts side by side", this.table);
    this.element.classList.add("fill");
    const copy = copyCurl(() => ({ path: `/ui/api/sessions/${encodeURIComponent(this.columns[0]?.sessionId ?? "")}/rollout` }));
    replace(
      root,
      bar(h("h1", null, id ? ["Rollouts of ", h("a", { href: groupHref(id) }, named(id))] : "Rollouts"), [
        h("label", null, "Order ", this.order),
        this.jump,
        this.total,
        this.pages,
        copy,
      ]),
      this.problem,
      this.element,
    );
    this.onQuery(query);
  }

  /** @returns {Column[]} those of this page, in order */
  get columns() {
    const place = SORTS[this.order.value || "attempt"] ?? (() => 0);
    const found = this.keys.slice(this.from, this.from + COLUMNS).map((key) => this.byKey.get(key) ?? newColumn(key));
    return found.sort((a, b) => place(a) - place(b) || 0);
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.order.value = query.get("sort") ?? "";
    this.from = wholeNumber(query.get("from"), 0) ?? 0;
    this.asked = (query.get("sessions") ?? "").split(",").filter(Boolean);
    this.byKey.clear();
    this.unfolded.clear();
    this.refresh();
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    const isNew = (/** @type {SessionRow} */ row) => row.group_id === this.id && !this.keys.includes(row.session_id);
    const changed = rows.filter((row) => this.columns.some(({ sessionId, head }) => sessionId === row.session_id && head && row.version > head.version));
    for (const row of changed) this.stale.add(row.session_id);
    if (changed.length || (this.id && rows.some(isNew))) this.changed();
  }

  refresh() {
    const request = async (/** @type {AbortSignal} */ signal) => {
      const path = `/groups/${encodeURIComponent(this.id)}`;
      const group = this.id ? /** @type {Group} */ (await get(path, { run: chosenRun() }, signal)) : null;
      this.keys = group ? group.attempts.map((one) => one.session_id) : (this.asked ?? []);
      const page = this.keys.slice(this.from, this.from + COLUMNS).map((key) => this.byKey.get(key) ?? newColumn(key));
      const unread = page.filter(({ head, error, sessionId }) => (!head && !error) || this.stale.has(sessionId));
      while (unread.length) {
        this.#show();
        await Promise.all(unread.splice(0, AT_ONCE).map((column) => this.#readHead(column, signal)));
      }
    };
    return this.read(request, () => this.#show());
  }

  /** @param {Column} column @param {AbortSignal} signal */
  async #readHead(column, signal) {
    try {
      const path = `/ui/api/sessions/${encodeURIComponent(column.sessionId)}/rollout`;
      column.head = /** @type {Rollout} */ (await get(path, { branch: column.branch }, signal));
      column.error = null;
      this.stale.delete(column.sessionId);
    } catch (error) {
      if (signal.aborted || !(error instanceof Error)) throw error;
      column.error = error;
    }
    this.byKey.set(column.key, column);
  }

  /** @param {number} from */
  #go(from) {
    this.from = from;
    setQuery({ sessions: this.id ? null : this.keys.join(","), sort: this.order.value, from: from || null });
    this.unfolded.clear();
    this.refresh();
  }

  #show() {
    const { columns } = this;
    const [first] = columns;
    const differences = columns.map(({ head }) => (head && first?.head ? divergence(head, first.head, nameOf(first)) : null));
    const steps = Math.max(0, ...columns.map(({ head }) => head?.marks.length ?? 0));
    const places = differences.flatMap((one) => (one ? [rowOf(one)] : []));
    const earliest = places.length ? Math.min(...places) : null;
    const common = earliest ?? (columns.length > 1 ? steps : 0);
    this.table.style.setProperty("--columns", String(columns.length));
    replace(this.head, h("th", { scope: "col" }, h("span", null, "Step")), columns.map((column, at) => this.#head(column, differences[at] ?? null, at)));
    /** @type {HTMLElement[]} */
    const rows = [];
    if (common > 0) rows.push(this.#fold(common, columns.length));
    const begin = this.isWhole ? 0 : common;
    for (let step = begin; step < Math.min(steps, begin + this.most); step += 1) {
      rows.push(this.#row(step, differences, this.unfolded.get(step) ?? step === earliest));
    }
    const left = steps - begin - this.most;
    const more = () => {
      this.most += STEPS;
      this.#show();
    };
    if (left > 0) rows.push(h("tr", null, h("th", { colspan: columns.length + 1 }, button(`${count(left)} more steps`, more))));
    refill(this.body, rows);
    this.#showBar(columns, steps, earliest);
  }

  /** @param {Column[]} columns @param {number} steps @param {number|null} earliest */
  #showBar(columns, steps, earliest) {
    setText(this.total, `${amount(columns.length, "rollout")}, ${count(steps)} steps`);
    this.jump.disabled = earliest === null;
    const page = (/** @type {number} */ from, /** @type {string} */ label) =>
      button(label, () => this.#go(from), { disabled: from < 0 || from >= this.keys.length });
    replace(
      this.pages,
      this.keys.length > COLUMNS && [
        page(this.from - COLUMNS, "previous"),
        page(this.from + COLUMNS, "next"),
        ` ${count(this.from + 1)} to ${count(this.from + columns.length)} of ${count(this.keys.length)}`,
      ],
      !this.keys.length && !this.requests.isRunning && "No rollout is named.",
    );
  }

  /** @param {number} common @param {number} columns */
  #fold(common, columns) {
    const toggle = () => {
      this.isWhole = !this.isWhole;
      this.#show();
    };
    const steps = common === 1 ? "Step 1 is" : `Steps 1 to ${count(common)} are`;
    const press = button(this.isWhole ? "fold" : "show", toggle, { "data-step": "fold", "aria-expanded": String(this.isWhole) });
    return h("tr", { class: "common" }, h("th", { colspan: columns + 1, scope: "row" }, `${steps} the same in all. `, press));
  }

  /** @param {number} step @param {(Divergence|null)[]} differences @param {boolean} isOpen */
  #row(step, differences, isOpen) {
    const toggle = () => {
      this.unfolded.set(step, !isOpen);
      this.#show();
    };
    const label = { "aria-expanded": String(isOpen), "aria-label": `Step ${step + 1}: whole texts`, "data-step": step };
    const cells = this.columns.map((column, at) => {
      const mark = column.head?.marks[step];
      const isUnequal = differences[at] !== null && rowOf(/** @type {Divergence} */ (differences[at])) === step;
      if (!mark) return h("td", { class: isUnequal ? "unequal" : null }, column.head?.marks.length === step && h("p", { class: "note" }, "ended"));
      return h("td", { class: isUnequal ? "unequal" : null }, isOpen ? this.#whole(column, step) : short(column, step, mark));
    });
    return h("tr", null, h("th", { scope: "row" }, button(`${isOpen ? "▾" : "▸"} ${step + 1}`, toggle, { class: "link", ...label })), cells);
  }

  /** The whole texts; what is not in the first column's is marked, and of two columns also what is only in the first's. */
  /** @param {Column} column @param {number} step */
  #whole(column, step) {
    const box = h("div", null, "Loading …");
    const { columns } = this;
    const other = column === columns[0] ? (columns.length === 2 ? columns[1] : undefined) : columns[0];
    Promise.all([this.#content(column, step), other && this.#content(other, step)]).then(
      ([mine, theirs]) => {
        const mark = column === columns[0] ? "del" : "ins";
        const text = (/** @type {"said"|"results"} */ part, kind = "") =>
          mine[part] && h("div", { class: `text ${kind}`, dir: "auto", tabindex: "0" }, marked(mine[part], theirs?.[part] ?? mine[part], mark));
        replace(box, foot(column, step), text("said", "saidtext"), mine.results && h("p", { class: "note" }, "then"), text("results"));
      },
      (error) => {
        if (!this.closed.aborted) setText(box, String(error instanceof Error ? error.message : error));
      },
    );
    return box;
  }

  /** @param {Column} column @param {number} step @returns {Promise<Content>} */
  #content({ key, sessionId, branch, head }, step) {
    const name = JSON.stringify([key, head?.branch, head?.marks[step]?.mark, head?.marks[step + 1]?.given]);
    const known = this.contents.get(name);
    if (known) return known;
    const path = `/ui/api/sessions/${encodeURIComponent(sessionId)}/rollout`;
    const made = get(path, { branch, start: step, limit: 2 }, this.closed).then((found) => {
      const [own, next] = /** @type {Rollout} */ (found).steps;
      return { said: textOf((own?.messages ?? []).slice(-1), false), results: textOf((next?.messages ?? []).slice(0, -1), true) };
    });
    this.contents.set(name, made);
    return made;
  }

  /** @param {Column} column @param {Divergence|null} differs @param {number} at @returns {HTMLElement} */
  #head(column, differs, at) {
    const { head, error, sessionId } = column;
    const name = h("a", { href: sessionHref(sessionId, { branch: column.branch }), title: column.key }, visible(nameOf(column)));
    if (!head) return h("th", { scope: "col" }, h("strong", null, name), h("p", { class: "note" }, error instanceof Error ? error.message : "Loading …"));
    const components = Object.entries(head.components).map(([part, value]) => ` ${visibleText(part)} ${decimal(value, 2)}`);
    const compared = differs ? `Step ${differs.step + 1}: ${nameOf(column)} ${differs.text}.` : at === 0 ? "The others are compared with this one." : "No difference.";
    return h(
      "th",
      { scope: "col" },
      h(
        "p",
        { class: "who" },
        h("strong", null, name),
        badge(head.status),
        h("span", { class: "reward" }, head.reward === null ? "no reward" : `reward ${decimal(head.reward)}`),
        h("span", { class: "note" }, components),
      ),
      h("p", { class: "note" }, `${amount(head.turns, "turn")}, ${compact(head.tokens)} tokens, ${compact(head.output_tokens)} sampled`),
      this.#branches(column),
      this.columns.length > 1 && h("p", { class: differs ? "differs" : "note" }, compared),
    );
  }

  /** @param {Column} column @returns {Child} */
  #branches(column) {
    const { head, sessionId } = column;
    if (!head?.branches.length) return null;
    const select = h(
      "select",
      { "aria-label": `branch of ${sessionId}` },
      head.branches.map(({ branch, cause, step }) =>
        h("option", { value: branch }, `branch ${branch}${cause ? `, ${cause}` : ""}${step ? ` after step ${step}` : ""}`),
      ),
    );
    select.value = String(head.branch);
    select.addEventListener("change", () => {
      column.branch = Number(select.value);
      this.stale.add(sessionId);
      this.refresh();
    });
    return h("p", null, select);
  }
}

/** @param {string} key @returns {Column} */
function newColumn(key) {
  const [sessionId = "", branch] = key.split("@");
  return { key, sessionId, branch: wholeNumber(branch ?? null, 0), head: null, error: null };
}

/** @param {Column} column @returns {string} */
function nameOf({ key, sessionId, head }) {
  if (key !== sessionId) return `branch ${head?.branch ?? "–"}`;
  return head?.attempt == null ? sessionId : `attempt ${head.attempt}`;
}

/** The row that shows a difference: results stand below the step that asked for them. @param {Divergence} differs */
function rowOf({ step, kind }) {
  return kind === "given" ? Math.max(0, step - 1) : step;
}

/** @param {Column} column @param {number} step @returns {Child} */
function foot({ sessionId, head }, step) {
  const mark = head?.marks[step];
  if (!mark) return null;
  const isOdd = !["stop", "tool_calls", "end_turn", "tool_use"].includes(mark.finish_reason ?? "stop");
  return h(
    "p",
    { class: "who" },
    h("a", { href: sessionHref(sessionId, { turn: mark.turn, branch: head?.branch }) }, `turn ${mark.turn}`),
    h("span", { class: "note" }, `${compact(mark.output_tokens)} tokens`),
    isOdd && badge(visibleText(String(mark.finish_reason)), "warn"),
  );
}

/** A step in a few lines: what was done, then what came back. @param {Column} column @param {number} step @param {Mark} mark */
function short(column, step, mark) {
  const next = column.head?.marks[step + 1];
  return [
    foot(column, step),
    mark.actions.map((action) => h("p", { class: action.tool === null ? "action" : "action code" }, actionText(action))),
    next?.asked.map((line) => h("p", { class: "result" }, next.failed && badge("", "bad"), "→ ", visible(line))),
  ];
}

/** @param {string} text @param {string} other @param {"del"|"ins"} kind @returns {Child} with the words that are not in the other */
function marked(text, other, kind) {
  const parts = difference(other, text).filter((part) => part.kind !== "removed");
  const same = parts.reduce((sum, part) => sum + (part.kind === "same" ? part.text.length : 0), 0);
  if (same < Math.max(text.length, other.length) * LEAST_SAME) return visible(text);
  return parts.map((part) => (part.kind === "same" ? visible(part.text) : h(kind, null, visible(part.text))));
}

/** @param {Entry[]} entries @param {boolean} withRoles @returns {string} their messages as one text */
function textOf(entries, withRoles) {
  const texts = entries.map(({ message, error }) => {
    if (error !== undefined) return `[${error}]`;
    const fields = /** @type {ChatMessage} */ (message ?? {});
    const reasoning = fields.reasoning_content ?? fields.reasoning;
    const calls = Array.isArray(fields.tool_calls) ? fields.tool_calls.map(callText) : [];
    const parts = [withRoles && `${fields.role ?? "?"}:`, reasoning && `(reasoning) ${plain(reasoning)}`, plain(fields.content), ...calls];
    return parts.filter(Boolean).join("\n");
  });
  return texts.join("\n\n");
}

/** @param {any} call @returns {string} arguments a line each, their texts as they are */
function callText(call) {
  const { name = "?", arguments: given = "" } = call?.function ?? {};
  const value = typeof given === "string" ? parsed(given) : given;
  if (value === null || typeof value !== "object") return `calls ${name} ${given}`;
  return [`calls ${name}`, ...Object.entries(value).map(([key, one]) => `  ${key}: ${plain(one)}`)].join("\n");
}

/** @param {unknown} content @returns {string} */
function plain(content) {
  return content == null ? "" : typeof content === "string" ? content : JSON.stringify(content, null, 2);
}
