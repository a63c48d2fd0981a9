/** All sessions: what is stuck, where, and how far behind. */

import { copyCurl } from "./copy.js";
import { announce, bar, button, chip, failure, h, message, replace, setText } from "./dom.js";
import { addressOf, columnsField, columnsOf, FilterForm, isFiltered, listQueryOf, needsPolling, PRESETS } from "./filters.js";
import { count, decimal } from "./format.js";
import { groupHref, sessionHref, sessionsHref, setQuery, sideBySideHref } from "./route.js";
import { badgeCell, linkCell, pickCell, sinceCell, textCell } from "./rows.js";
import { SessionList } from "./sessionlist.js";
import { LongTable } from "./table.js";
import { View } from "./view.js";
import { visibleText } from "./visible.js";

/** @import {Overview, SessionRow} from "../ui_types.d.ts" */
/** @import {ListQuery} from "./filters.js" */
/** @import {Column} from "./rows.js" */
/** @import {Place} from "./view.js" */

const POLL_MS = 2000;

export class SessionsView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { query }) {
    super(root);
    this.list = new SessionList(this.closed, () => this.#show());
    /** @type {Set<string>} the sessions that are to be shown side by side */
    this.picked = new Set();
    this.table = this.#newTable([]);
    this.form = new FilterForm(this.closed, (filters) => {
      const { sort, order } = this.list.query;
      this.#open({ sort, order, ...filters });
    }, columnsField());
    this.total = h("span", { role: "status" });
    this.changes = button("Changes: show", () => this.refresh(), { class: "changed", hidden: true });
    this.compare = h("a", { href: "#/rollouts", hidden: true });
    this.presets = h("div", { class: "chips", role: "group", "aria-label": "Quick filters" });
    const copy = copyCurl(() => ({ path: "/ui/api/sessions", parameters: { ...this.list.query, limit: 200 } }));
    const again = button("Refresh", () => this.refresh(), { class: "quiet" });
    replace(
      root,
      h("h1", { class: "visually-hidden" }, "Sessions"),
      this.form.box,
      bar(this.presets, [this.compare, this.changes, this.total, again, copy]),
      this.problem,
      this.table.element,
    );
    this.every(POLL_MS, () => this.#poll());
    this.#open(listQueryOf(query));
  }

  /** @param {string[]} keys of metadata @returns {LongTable<SessionRow>} */
  #newTable(keys) {
    this.tableLife?.abort();
    /** Ends the table: another choice of columns makes another one. */
    this.tableLife = new AbortController();
    this.keys = keys;
    return new LongTable(AbortSignal.any([this.closed, this.tableLife.signal]), {
      label: "Sessions",
      columns: [this.#pickColumn(), ...columns(), ...keys.map((key) => this.#metadataColumn(key))],
      keyOf: (row) => row.session_id,
      onSort: (sort, order) => this.#open({ ...this.list.query, sort, order }),
      onNearEnd: () => this.list.error || this.list.more(),
    });
  }

  /** @param {string} key @returns {Column<SessionRow>} */
  #metadataColumn(key) {
    return {
      title: visibleText(key),
      hint: "Of the metadata",
      width: "130px",
      fill: textCell((row) => visibleText(this.list.metadata.get(row.session_id)?.[key] ?? "–")),
    };
  }

  /** @returns {Column<SessionRow>} */
  #pickColumn() {
    return {
      title: "Pick",
      hint: "Show these side by side",
      width: "44px",
      fill: pickCell(
        (row) => row.session_id,
        (id) => this.picked.has(id),
        (id, isPicked) => {
          if (isPicked) this.picked.add(id);
          else this.picked.delete(id);
          this.compare.hidden = !this.picked.size;
          this.compare.setAttribute("href", sideBySideHref([...this.picked]));
          setText(this.compare, `${count(this.picked.size)} side by side`);
        },
      ),
    };
  }

  /** @param {ListQuery} query show this, and say so in the address */
  async #open(query) {
    setQuery(addressOf(query));
    this.form.set(query);
    const keys = columnsOf(query);
    if (keys.join() !== this.keys?.join()) {
      const old = this.table;
      this.table = this.#newTable(keys);
      old.element.replaceWith(this.table.element);
    }
    this.table.setOrder(query.sort, query.order);
    this.table.scrollToTop();
    replace(this.presets, presetLinks(query));
    await this.list.open(query);
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
    this.#open(listQueryOf(query));
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
function nothing(query) {
  if (isFiltered(query)) {
    const all = h("a", { href: "#/" }, "Show all sessions");
    return message("empty", "No session matches these filters.", h("p", null, all));
  }
  return message(
    "empty",
    "There are no sessions yet.",
    h("p", null, "Create one, and give its ", h("code", null, "base_url"), " to an OpenAI client:"),
    h("code", null, `curl -sS -X POST ${new URL("sessions", new URL("../..", import.meta.url)).href}`),
  );
}

/** @param {ListQuery} query @returns {HTMLElement[]} */
function presetLinks(query) {
  const here = sessionsHref(addressOf(query));
  return PRESETS.map(({ title, query: preset }) => {
    const href = sessionsHref(preset);
    return chip(href, title, href === here);
  });
}

/** @param {string} engine @returns {string} without the scheme */
function shortEngine(engine) {
  return engine.replace(/^https?:\/\//, "");
}

/** @returns {Column<SessionRow>[]} */
function columns() {
  return [
    { title: "Session", isHeader: true, fill: linkCell((row) => row.session_id, (row) => sessionHref(row.session_id)) },
    { title: "State", width: "100px", fill: badgeCell((row) => row.state) },
    {
      title: "In turn",
      hint: "How long the open turn has been open",
      width: "84px",
      number: true,
      sort: "running_since",
      first: "asc",
      fill: sinceCell((row) => row.running_since, "for"),
    },
    { title: "Turns", width: "70px", number: true, sort: "turns", fill: textCell((row) => count(row.turns)) },
    {
      title: "Group",
      fill: linkCell(
        (row) => row.group_id && visibleText(row.group_id),
        (row) => (row.group_id ? groupHref(row.group_id) : "#/"),
        (row) => (row.attempt === null ? "" : ` #${row.attempt}`),
      ),
    },
    { title: "Reward", width: "86px", number: true, sort: "reward", fill: textCell((row) => decimal(row.reward)) },
    {
      title: "Weights",
      width: "74px",
      number: true,
      isExtra: true,
      fill: textCell((row) => visibleText(String(row.weight_version ?? "–"))),
    },
    {
      title: "Staleness",
      hint: "Weight versions behind the newest",
      width: "80px",
      number: true,
      sort: "staleness",
      fill: textCell((row) => count(row.staleness)),
    },
    { title: "Engine", width: "12%", fill: textCell((row) => (row.engine ? shortEngine(row.engine) : "–")) },
    { title: "Changed", width: "112px", number: true, sort: "updated_at", fill: sinceCell((row) => row.updated_at) },
    {
      title: "Note and tags",
      width: "140px",
      isLuxury: true,
      fill: textCell((row) => visibleText([...row.tags, row.note].filter(Boolean).join(", "))),
    },
    {
      title: "Created",
      width: "112px",
      number: true,
      isExtra: true,
      sort: "created_at",
      fill: sinceCell((row) => row.created_at),
    },
  ];
}
