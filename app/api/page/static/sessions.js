/** All sessions: what is stuck, where, and how far behind. */

import { ApiError, curl } from "./api.js";
import { copyButton } from "./copy.js";
import { announce, count, decimal, failure, h, message, replace, setText } from "./dom.js";
import { filterForm } from "./filterform.js";
import { addressOf, isFiltered, needsPolling, PRESETS, wishOf } from "./filters.js";
import { groupHref, sessionHref, sessionsHref, setQuery } from "./route.js";
import { badgeCell, linkCell, sinceCell, textCell } from "./rows.js";
import { SessionList } from "./sessionlist.js";
import { LongTable } from "./table.js";
import { visibleText } from "./visible.js";

const POLL_MS = 5000;

/**
 * @param {HTMLElement} root
 * @param {{query: URLSearchParams, overview: () => any}} params
 */
export function view(root, params) {
  const view = new SessionsView(root, params);
  view.open(wishOf(params.query));
  return view;
}

class SessionsView {
  /** @param {HTMLElement} root @param {{overview: () => any}} params */
  constructor(root, params) {
    this.overview = params.overview;
    this.list = new SessionList(() => this.#show());
    this.versionShown = params.overview()?.weight_version ?? null;
    this.table = new LongTable({
      label: "Sessions",
      columns: columns(() => this.overview()?.weight_version ?? null),
      keyOf: (row) => row.session_id,
      onSort: (sort, order) => this.open({ ...this.list.wish, sort, order }),
      onNearEnd: () => this.list.error || this.list.more(),
      onRest: () => this.#show(),
    });
    this.table.isDim = (row) => this.list.gone.has(row.session_id);
    this.form = filterForm((filters) => {
      const { sort, order } = this.list.wish;
      this.open({ sort, order, ...filters });
    });
    this.total = h("span", { role: "status" });
    this.changed = h("button", { type: "button", class: "changed", hidden: true, onclick: () => this.#refresh() });
    this.presets = h("div", { class: "chips", role: "group", "aria-label": "Quick filters" });
    this.problem = h("div");
    const copy = copyButton(() => curl("/ui/api/sessions", { ...this.list.wish, limit: 200 }));
    const again = h("button", { type: "button", class: "quiet", onclick: () => this.#refresh() }, "Refresh");
    replace(
      root,
      h("h1", { class: "visually-hidden" }, "Sessions"),
      this.form.element,
      h("div", { class: "bar" }, this.presets, h("span", { class: "spacer" }), this.changed, this.total, again, copy),
      this.problem,
      this.table.element,
    );
    this.timer = setInterval(() => this.#poll(), POLL_MS);
  }

  /** @param {import("./filters.js").Wish} wish show this, and say so in the address */
  async open(wish) {
    setQuery(addressOf(wish));
    this.form.set(wish);
    this.table.setOrder(wish.sort, wish.order);
    this.table.scrollToTop();
    replace(this.presets, presetLinks(wish));
    await this.list.open(wish);
    if (!this.list.error) announce(`${count(this.list.total)} sessions`);
  }

  close() {
    clearInterval(this.timer);
    this.list.close();
    this.table.close();
  }

  /** @param {any[]} rows */
  onSessions(rows) {
    this.list.take(rows);
  }

  /** @param {any} overview */
  onOverview(overview) {
    this.form.setEngines(overview.engines.map((/** @type {any} */ engine) => engine.url));
    if (overview.weight_version === this.versionShown) return;
    this.versionShown = overview.weight_version;
    this.table.refill();
  }

  onReset() {
    this.list.refresh();
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.open(wishOf(query));
  }

  onFilterKey() {
    this.form.focus();
  }

  #refresh() {
    this.table.scrollToTop();
    this.list.refresh();
  }

  /** What hangs on the time or on gates is not told by events. */
  async #poll() {
    const { list, table } = this;
    if (document.hidden || list.isLoading) return;
    if (needsPolling(list.wish) && !table.isHeld) list.refresh();
    else if (list.isTotalOld) await list.recount().catch(ignoreRefusal);
  }

  #show() {
    const { list, table } = this;
    if (table.isAtTop && !table.isHeld && !list.isLoading) list.settle();
    table.show(list.rows, list.total, list.isLoading);
    table.element.classList.toggle("stale", list.isLoading && !list.isLoaded);
    const more = list.isTotalExact ? "" : "+";
    setText(this.total, list.isLoaded ? `${count(list.total)}${more} ${list.total === 1 ? "session" : "sessions"}` : "");
    this.#showChanged();
    this.#showFoot();
    replace(this.problem, list.error !== null && failure(list.error, () => list.refresh()));
  }

  #showChanged() {
    const { arrived, gone } = this.list;
    const parts = [arrived.size && `${count(arrived.size)} new`, gone.size && `${count(gone.size)} no longer match`];
    const text = `${parts.filter(Boolean).join(", ")}: show`;
    this.changed.hidden = !arrived.size && !gone.size;
    setText(this.changed, text);
  }

  #showFoot() {
    const { list, table } = this;
    if (!list.isLoaded) table.setFoot(list.isLoading && "Loading …");
    else if (!list.rows.length) table.setFoot(nothing(list.wish));
    else if (list.nextCursor) {
      const button = h("button", { type: "button", onclick: () => list.more() }, "Load more");
      table.setFoot(`${count(list.rows.length)} of ${count(list.total)} loaded`, button);
    } else table.setFoot(`All ${count(list.rows.length)} shown`);
  }
}

/** A count that fails is asked for again; the banner says that the server is away. @param {unknown} error */
function ignoreRefusal(error) {
  if (!(error instanceof ApiError)) throw error;
}

/** @param {import("./filters.js").Wish} wish @returns {HTMLElement} */
function nothing(wish) {
  if (isFiltered(wish)) {
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

/** @param {import("./filters.js").Wish} wish @returns {HTMLElement[]} */
function presetLinks(wish) {
  const now = sessionsHref(addressOf(wish));
  return PRESETS.map(({ title, query }) => {
    const href = sessionsHref(query);
    return h("a", { href, "aria-current": href === now ? "true" : null }, title);
  });
}

/** @param {string} engine @returns {string} without what all have in common */
function shortEngine(engine) {
  return engine.replace(/^https?:\/\//, "");
}

/**
 * Of a session by the newest weights now, which the row as it was sent could not know.
 * @param {any} row
 * @param {number|null} newest
 * @returns {number|null}
 */
function staleness(row, newest) {
  const own = row.weight_version;
  if (newest === null || own === null || !/^\d{1,15}$/.test(String(own))) return row.staleness;
  return Math.max(0, Number(newest) - Number(own));
}

/** @param {() => number|null} newest @returns {import("./rows.js").Column[]} */
function columns(newest) {
  return [
    { title: "Session", isHeader: true, fill: linkCell((row) => row.session_id, (row) => sessionHref(row.session_id)) },
    { title: "State", width: "100px", fill: badgeCell((row) => row.state) },
    {
      title: "In turn",
      hint: "How long the open turn has been open",
      width: "84px",
      number: true,
      sort: "claimed_since",
      first: "asc",
      fill: sinceCell((row) => row.claimed_since, "for"),
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
      width: "80px",
      number: true,
      isExtra: true,
      fill: textCell((row) => visibleText(String(row.weight_version ?? "–"))),
    },
    {
      title: "Behind",
      hint: "Weight versions behind the newest",
      width: "80px",
      number: true,
      sort: "staleness",
      fill: textCell((row) => count(staleness(row, newest()))),
    },
    { title: "Engine", width: "12%", fill: textCell((row) => (row.engine ? shortEngine(row.engine) : "–")) },
    { title: "Changed", width: "100px", number: true, sort: "updated_at", fill: sinceCell((row) => row.updated_at) },
    {
      title: "Created",
      width: "100px",
      number: true,
      isExtra: true,
      sort: "created_at",
      fill: sinceCell((row) => row.created_at),
    },
  ];
}
