/** All sessions: what is stuck, where, and how far behind. */

import { announce, button, failure, h, message, replace, setText, showDialog } from "./dom.js";
import { addressOf, FilterForm, needsPolling, PRESETS } from "./filters.js";
import { field, textField } from "./form.js";
import { compact, count, decimal } from "./format.js";
import { listHref, sessionsHref, setQuery, sideBySideHref } from "./route.js";
import { actionsCell, badgeCell, column, durationCell, errorColumns, groupColumn } from "./rows.js";
import { numberColumn, pickColumn, sessionColumn, sinceCell } from "./rows.js";
import { SessionList } from "./sessionlist.js";
import { isNarrow, LongTable } from "./table.js";
import { every, View } from "./view.js";
import { visibleText } from "./visible.js";

/** @import {Overview, SessionRow} from "../ui_types.d.ts" */
/** @import {ListQuery} from "./filters.js" */
/** @import {Column} from "./rows.js" */
/** @import {Place} from "./view.js" */

const POLL_MS = 2000;
/** Where this browser keeps the columns that somebody chose. */
const CHOSEN = "turnlog.columns";

export class SessionsView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { query }) {
    super(root);
    this.list = new SessionList(this.closed, () => this.#show());
    this.pick = pickColumn((picked) => this.#showPicked(picked));
    /** @type {{hidden: string[], metadata: string}} titles, and keys of metadata with commas in between */
    this.chosen = { hidden: HIDDEN, metadata: "", ...JSON.parse(localStorage.getItem(CHOSEN) ?? "{}") };
    this.table = new LongTable(this.closed, {
      label: "Sessions",
      columns: this.#shownColumns(""),
      keyOf: (/** @type {SessionRow} */ row) => row.session_id,
      onSort: (sort, order) => this.#open({ ...this.list.query, sort, order }),
      onNearEnd: () => this.list.error || this.list.more(),
      onInSight: (rows) => this.list.summaries.want(rows),
    });
    this.form = new FilterForm(this.closed, (filters) => {
      const { sort, order } = this.list.query;
      this.#open({ sort, order, ...filters });
    });
    this.total = h("span", { role: "status" });
    this.changes = button("Changes: show", () => this.refresh(), { class: "changed", hidden: true });
    this.compare = h("a", { href: sideBySideHref([]), hidden: true });
    this.judge = h("a", { "data-judge": true }, "Judge");
    this.presets = h("div", { class: "chips", role: "group", "aria-label": "Quick filters" });
    const tools = this.tools(() => {
      const { q: prefix, ...query } = this.list.query;
      return { path: "/sessions", parameters: { ...query, prefix, limit: 200 } };
    });
    const choose = button("Columns", () => this.#chooseColumns(), { class: "quiet" });
    this.fill("Sessions", this.presets, [this.compare, this.changes, this.total, this.judge, choose, tools], this.table.element);
    root.firstElementChild?.after(this.form.box);
    every(this.closed, POLL_MS, () => this.#poll());
    this.onQuery(query);
  }

  /** @param {string} sort @returns {Column<SessionRow>[]} those that are chosen, and the one that the list is sorted by */
  #shownColumns(sort) {
    const { hidden, metadata } = this.chosen;
    const keys = [...new Set(metadata.split(",").map((key) => key.trim()))].filter(Boolean);
    const shown = columns().filter((column) => !hidden.includes(column.title) || column.sort === sort);
    return [this.pick, ...shown, ...keys.map((key) => this.#metadataColumn(key))];
  }

  #chooseColumns() {
    const metadata = textField("metadata", { placeholder: "task, env.name" });
    metadata.value = this.chosen.metadata;
    const boxes = columns().slice(1).map(({ title }) => {
      const box = h("input", { type: "checkbox" });
      box.checked = !this.chosen.hidden.includes(title);
      return { title, box };
    });
    const onChange = () => {
      const hidden = boxes.filter(({ box }) => !box.checked).map(({ title }) => title);
      this.chosen = { hidden, metadata: metadata.value };
      localStorage.setItem(CHOSEN, JSON.stringify(this.chosen));
      this.#open(this.list.query);
    };
    showDialog(
      { "aria-label": "Columns", onchange: onChange },
      h("h2", null, "Columns"),
      h("div", { class: "choices" }, boxes.map(({ title, box }) => h("label", null, box, title))),
      h("div", { class: "filters" }, field("Keys of the metadata, at most six", metadata)),
    );
  }

  /** @param {string} key @returns {Column<SessionRow>} */
  #metadataColumn(key) {
    const text = (/** @type {SessionRow} */ row) => visibleText(this.list.metadata.get(row.session_id)?.[key] ?? "–");
    return column(visibleText(key), text, { hint: "Of the metadata", width: "130px" });
  }

  /** @param {Set<string>} picked */
  #showPicked(picked) {
    this.compare.hidden = !picked.size;
    this.compare.setAttribute("href", sideBySideHref([...picked]));
    setText(this.compare, `${count(picked.size)} side by side`);
  }

  /** @param {ListQuery} query show this, and say so in the address */
  async #open(query) {
    setQuery(addressOf(query));
    this.form.set(query);
    const columns = this.#shownColumns(query.sort);
    const titles = (/** @type {Column<SessionRow>[]|undefined} */ of) => of?.map(({ title }) => title).join();
    if (titles(columns) !== titles(this.table.columns)) this.table.setColumns(columns);
    this.table.setOrder(query.sort, query.order);
    this.table.scrollToTop();
    const here = sessionsHref(addressOf(query));
    this.judge.setAttribute("href", listHref("judge", addressOf(query)));
    const presets = PRESETS.map(({ title, query: preset }) => ({ title, href: sessionsHref(preset) }));
    replace(this.presets, presets.map(({ title, href }) => h("a", { href, "aria-current": href === here ? "true" : null }, title)));
    await this.list.open(query, this.chosen.metadata);
    if (!this.list.error) announce(`${count(this.list.total)} sessions`);
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    this.list.apply(rows);
  }

  /** @param {Overview} overview */
  onOverview(overview) {
    this.form.setEngines(overview.engines.map((engine) => engine.url));
  }

  onReset() {
    this.list.refresh();
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.#open(this.form.listQueryOf(query));
  }

  onFilterKey() {
    this.form.focus();
  }

  refresh() {
    this.table.scrollToTop();
    return this.list.refresh();
  }

  /** The list of newest changes follows by itself while nobody reads it; time and gates change what matches without an event. */
  #poll() {
    const { list, table } = this;
    if (list.isLoading || table.isHeld || !table.isAtTop) return;
    if ((list.hasNews && list.isByChange) || needsPolling(list.query)) list.refresh();
  }

  #show() {
    const { list, table } = this;
    table.show(list.rows, list.total, list.isLoading);
    table.element.classList.toggle("stale", list.isLoading && !list.isLoaded);
    const more = list.isTotalExact ? "" : "+";
    setText(this.total, list.isLoaded ? `${count(list.total)}${more} ${list.total === 1 ? "session" : "sessions"}` : "");
    this.changes.hidden = !list.hasNews || (list.isByChange && table.isAtTop);
    this.#showFoot();
    replace(this.problem, list.error !== null && failure(list.error, () => list.refresh()));
  }

  #showFoot() {
    const { list, table } = this;
    if (!list.isLoaded) table.setFoot(list.isLoading && "Loading …");
    else if (!list.byId.size) table.setFoot(nothing(list.query));
    else if (list.nextCursor) {
      const more = button("Load more", () => list.more());
      table.setFoot(`${count(list.byId.size)} of ${count(list.total)} loaded`, more);
    } else table.setFoot(`All ${count(list.byId.size)} shown`);
  }
}

/** @param {ListQuery} query @returns {HTMLElement} */
function nothing({ sort, order, run, ...filters }) {
  if (Object.keys(filters).length) {
    const all = h("a", { href: sessionsHref() }, "Show all sessions");
    return message("empty", "No session matches these filters.", h("p", null, all));
  }
  return message(
    "empty",
    run ? `There are no sessions in run ${visibleText(run)}.` : "There are no sessions yet.",
    h("p", null, "Create one, and give its ", h("code", null, "base_url"), " to an OpenAI client:"),
    h("code", null, `curl -sS -X POST ${new URL("sessions", new URL("../..", import.meta.url)).href}`),
  );
}

/** Before somebody chooses. */
const HIDDEN = ["Run", "Weights", "Staleness", "Engine", "Note and tags", "Created", "In turn", ...(isNarrow() ? ["Finish", "Attempt", "Tokens"] : [])];

/** @returns {Column<SessionRow>[]} */
function columns() {
  return [
    sessionColumn({ width: "156px" }),
    { title: "State", width: "88px", fill: badgeCell((row) => (row.failed ? "failed" : row.state), (row) => (row.failed ? "bad" : undefined)) },
    column("Task", (row) => visibleText(row.about?.task || "–"), { hint: "Its first user message, without the beginning that many of these tasks share" }),
    { title: "Last action", hint: "What its newest turn did", fill: actionsCell((row) => row.about?.actions ?? []) },
    numberColumn("Turns", (row) => count(row.turns), { width: "60px", sort: "turns" }),
    numberColumn("Tokens", (row) => compact(row.about?.tokens), { width: "66px", hint: "Length of the newest turn's sequence" }),
    { title: "Duration", hint: "From its creation to the end of its newest turn, or until now", width: "82px", number: true, fill: durationCell },
    column("Finish", (row) => visibleText(row.about?.finish_reason ?? "–"), { width: "76px", hint: "Why the newest turn ended" }),
    ...errorColumns(),
    numberColumn("Reward", (row) => decimal(row.reward), { width: "72px", sort: "reward" }),
    column("Run", (row) => row.run, { width: "112px" }),
    groupColumn("112px"),
    numberColumn("Attempt", (row) => count(row.attempt), { width: "72px" }),
    { title: "In turn", hint: "How long the open turn has been open", width: "84px", number: true, sort: "running_since", first: "asc", fill: sinceCell((row) => row.running_since, "for") },
    numberColumn("Weights", (row) => visibleText(String(row.weight_version ?? "–"))),
    numberColumn("Staleness", (row) => count(row.staleness), { hint: "Weight versions behind the newest", width: "90px", sort: "staleness" }),
    column("Engine", (row) => row.engine?.replace(/^https?:\/\//, "") ?? "–", { width: "160px" }),
    column("Note and tags", (row) => visibleText([...row.tags, row.note].filter(Boolean).join(", ")), { width: "160px" }),
    { title: "Created", width: "112px", number: true, sort: "created_at", fill: sinceCell((row) => row.created_at) },
    { title: "Changed", width: "96px", number: true, sort: "updated_at", fill: sinceCell((row) => row.updated_at) },
  ];
}
