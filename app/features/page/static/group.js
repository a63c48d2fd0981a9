/** One group: its task, a row an attempt, and what is wrong with its rewards. */

import { get } from "./api.js";
import { rewardPlot } from "./chart.js";
import { copyCurl } from "./copy.js";
import { badge, bar, fact, flag, folded, h, message, renew, replace } from "./dom.js";
import { amount, compact, count, decimal, ranges } from "./format.js";
import { chosenRun, listHref, rolloutsHref, sessionsHref, setQuery, sideBySideHref } from "./route.js";
import { actionsCell, badgeCell, durationCell, errorColumns, pickColumn, sessionColumn, textCell } from "./rows.js";
import { readSummaries } from "./summaries.js";
import { isNarrow, LongTable } from "./table.js";
import { View } from "./view.js";
import { textBlock, visible, visibleText } from "./visible.js";

/** @import {Attempt, ChatMessage, Column, Entry, Group, Place, SessionPage, SessionRow, Statistics, Summary} from "../ui_types.d.ts" */
/** @typedef {Attempt & {state: string, about?: Summary, advantage: number|null, normalized: number|null}} Row */
/** @typedef {Column<Row> & {value?: (row: Row) => number|null|undefined}} ValueColumn */

const MOST_PLOTTED = 2000;
/** Rows whose state is read, and components of the reward that have a column. */
const MOST_STATES = 500;
const MOST_COMPONENTS = 6;
/** Messages of a task; the reply is behind them. */
const MOST_MESSAGES = 20;
/** As an export's `advantage=grpo` adds it to the standard deviation. */
const EPSILON = 1e-6;

export class GroupView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { id, query }) {
    super(root, "group", id);
    this.path = `/groups/${encodeURIComponent(id)}`;
    this.run = chosenRun();
    /** @type {Row[]} */
    this.rows = [];
    this.facts = h("div", { class: "facts" });
    this.task = h("div");
    this.plot = h("div");
    /** @type {string[]} components of the reward that have a column */
    this.names = [];
    const pick = pickColumn((all) => {
      const picked = this.rows.map((row) => row.session_id).filter((one) => all.has(one));
      this.side.setAttribute("href", picked.length ? sideBySideHref(picked) : rolloutsHref(this.id, { run: this.run }));
      this.side.textContent = picked.length ? `${count(picked.length)} side by side` : "Side by side";
    });
    this.columns = (/** @type {string[]} */ names) => [pick, ...columns(names)];
    this.table = new LongTable(this.closed, {
      label: "Attempts",
      columns: this.columns([]),
      keyOf: (/** @type {Row} */ row) => row.session_id,
      onSort: (sort, order) => {
        setQuery({ sort, order });
        this.onQuery(new URLSearchParams({ sort, order }));
      },
    });
    this.holder = h("div", { class: "holder", hidden: true }, this.table.element);
    this.side = h("a", null, "Side by side");
    this.list = h("a", null, "In the session list");
    this.export = h("a", null, "Export");
    this.judge = h("a", { "data-judge": true }, "Judge");
    this.#linkToRun();
    replace(
      root,
      bar(h("h1", { dir: "auto" }, visible(id)), [this.side, this.list, this.export, this.judge, copyCurl(() => ({ path: this.path, parameters: { run: this.run } }))]),
      this.problem,
      this.facts,
      h("div", { class: "panels" }, this.task, this.plot),
      this.holder,
    );
    this.onQuery(query);
    this.refresh();
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.sort = query.get("sort") ?? "Attempt";
    this.order = query.get("order") === "desc" ? "desc" : "asc";
    this.#showRows();
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    if (rows.some((row) => row.group_id === this.id && [null, row.run].includes(this.run))) this.changed();
  }

  #linkToRun() {
    const { id, run } = this;
    this.side.setAttribute("href", rolloutsHref(id, { run }));
    this.list.setAttribute("href", sessionsHref({ run, group_id: id }));
    this.export.setAttribute("href", listHref("exports", { run, group_id: id }));
    this.judge.setAttribute("href", listHref("judge", { run, group_id: id }));
  }

  refresh() {
    return this.read(
      async (signal) => {
        const [group, page] = await Promise.all([
          get(this.path, { run: this.run }, signal),
          get("/ui/api/sessions", { run: this.run, group_id: this.id, limit: MOST_STATES }, signal),
        ]);
        const { attempts } = /** @type {Group} */ (group);
        const about = await readSummaries(attempts.map((one) => one.session_id), signal);
        const first = attempts.find(({ session_id: id }) => about[id]?.task);
        if (first && !this.task.childElementCount) await this.#readTask(first.session_id, signal);
        return { group: /** @type {Group} */ (group), states: /** @type {SessionPage} */ (page).sessions, about };
      },
      ({ group, states, about }) => {
        const state = new Map(states.map((row) => [row.session_id, row.state]));
        if (this.run === null) {
          this.run = group.run;
          this.#linkToRun();
        }
        replace(this.facts, facts(group));
        this.rows = group.attempts.map((one) => ({
          ...one,
          state: state.get(one.session_id) ?? one.status,
          about: about[one.session_id],
          ...advantage(one, group.statistics),
        }));
        renew(this.plot, [group.attempts, group.statistics], () => plot(group.attempts, group.statistics));
        this.#showRows();
      },
    );
  }

  /** The task stands in the first turn of any attempt. @param {string} id @param {AbortSignal} signal */
  async #readTask(id, signal) {
    const path = `/sessions/${encodeURIComponent(id)}/messages`;
    const { messages } = /** @type {{messages: Entry[]}} */ (await get(path, { limit: MOST_MESSAGES }, signal));
    const before = messages.slice(0, messages.findIndex(({ sampled }) => sampled));
    const asked = before.map(({ message: said }) => /** @type {ChatMessage} */ (said ?? {}));
    const blocks = asked.map(({ role, content }) => {
      const block = textBlock(typeof content === "string" ? content : JSON.stringify(content ?? null, null, 2));
      return role === "user" ? block : folded(visibleText(String(role)), block);
    });
    if (blocks.length) replace(this.task, h("details", { class: "panel", open: true }, h("summary", null, "Task"), blocks));
  }

  #showRows() {
    if (!this.rows.length) return;
    const names = [...new Set(this.rows.flatMap(({ about }) => Object.keys(about?.components ?? {})))].slice(0, MOST_COMPONENTS);
    if (names.join() !== this.names.join()) this.table.setColumns(this.columns(names));
    this.names = names;
    this.holder.hidden = false;
    const { table, sort, order } = this;
    const value = this.columns(names).map((column) => /** @type {ValueColumn} */ (column)).find((column) => column.sort === sort)?.value;
    const rank = (/** @type {Row} */ row) => (value ? (value(row) ?? null) : null);
    const sign = order === "desc" ? -1 : 1;
    const rows = [...this.rows].sort((a, b) => {
      const [one, other] = [rank(a), rank(b)];
      return one === null || other === null ? Number(one === null) - Number(other === null) : sign * (one - other);
    });
    table.setOrder(sort ?? "", order ?? "asc");
    table.show(rows, rows.length, false);
    table.setFoot(amount(rows.length, "attempt"));
  }
}

/** @param {Attempt} attempt @param {Statistics|null} statistics */
function advantage({ reward, status, failed }, statistics) {
  if (reward === null || failed || !statistics || status === "erased" || status === "undone") return { advantage: null, normalized: null };
  const { mean, std, zero_variance: isFlat } = statistics;
  return { advantage: isFlat ? 0 : reward - mean, normalized: isFlat ? 0 : (reward - mean) / (std + EPSILON) };
}

/** @param {Attempt[]} attempts @param {Statistics|null} statistics @returns {Element} */
function plot(attempts, statistics) {
  if (!statistics) {
    return message("empty", "No session has a reward yet.", h("code", null, "PUT /sessions/{id}/reward"));
  }
  const shown = attempts.length > MOST_PLOTTED ? attempts.slice(0, MOST_PLOTTED) : attempts;
  const note = "A dot is a session and leads to it; an empty one is still open.";
  const cut = shown.length < attempts.length ? ` The first ${count(MOST_PLOTTED)} of ${count(attempts.length)}.` : "";
  const content = [rewardPlot([...shown], statistics), h("p", { class: "muted" }, note, cut)];
  return h("details", { class: "panel", open: true }, h("summary", null, "Rewards"), content);
}

/** @param {Group} group */
function facts(group) {
  const { attempts, statistics, missing_attempts: missing } = group;
  const closed = attempts.filter((one) => one.status !== "open").length;
  const isFlat = statistics?.zero_variance && statistics.count > 1;
  return [
    fact("Attempts", count(attempts.length)),
    fact("Closed", count(closed)),
    fact("Rewarded", count(statistics?.count ?? 0)),
    fact("Mean", decimal(statistics?.mean)),
    fact("Std. dev. (sample)", decimal(statistics?.std)),
    fact("Min, max", `${decimal(statistics?.min)}, ${decimal(statistics?.max)}`),
    fact("State", group.complete ? badge("complete", "good") : badge("not complete", "muted")),
    isFlat && fact("Variance", flag("zero: all rewards are equal, a group-relative advantage is 0")),
    missing.length > 0 && fact("Missing attempts", flag(ranges(missing))),
  ];
}

/** @param {string[]} names of components of the reward @returns {ValueColumn[]} */
function columns(names) {
  /** @type {(title: string, value: (row: Row) => number|null|undefined, more?: Partial<ValueColumn> & {text?: (value: number|null|undefined) => string}) => ValueColumn} */
  const number = (title, value, { text = count, ...more } = {}) => ({
    title: visibleText(title),
    width: "76px",
    number: true,
    sort: title,
    value,
    fill: textCell((row) => text(value(row))),
    ...more,
  });
  const every = [
    number("Attempt", (row) => row.attempt, { first: "asc", width: "76px" }),
    sessionColumn({ width: "140px" }),
    { title: "State", width: "94px", fill: badgeCell((one) => (one.failed ? "failed" : one.state), (one) => (one.failed ? "bad" : undefined)) },
    { title: "Last action", hint: "What its newest turn did", fill: actionsCell((one) => one.about?.actions ?? []) },
    number("Turns", (one) => one.about?.turns, { width: "60px" }),
    number("Tokens", (one) => one.about?.tokens, { text: compact, hint: "Of live turns, each once", width: "68px" }),
    number("Sampled", (one) => one.about?.output_tokens, { text: compact, width: "80px", hint: "Tokens that its turns sampled" }),
    number("Duration", ({ about }) => (about?.ended_at == null ? null : about.ended_at - about.started_at), {
      width: "84px",
      hint: "From its creation to the end of its newest turn",
      fill: durationCell,
    }),
    { title: "Finish", hint: "Why the newest turn ended", width: "72px", fill: textCell((one) => visibleText(one.about?.finish_reason ?? "–")) },
    ...errorColumns(),
    number("Reward", (one) => one.reward, { text: decimal }),
    number("Advantage", (one) => one.advantage, { text: decimal, hint: "Reward minus the group's mean", width: "92px" }),
    number("÷ std. dev.", (one) => one.normalized, {
      text: decimal,
      hint: "The advantage divided by the sample's standard deviation + 1e-6, as an export's advantage=grpo gives it",
      width: "96px",
    }),
    ...names.map((name) => number(name, (one) => one.about?.components[name], { text: decimal, hint: "Component of the reward" })),
  ];
  return every.filter(({ title }) => !isNarrow() || !["Sampled", "Finish", "÷ std. dev."].includes(title));
}
