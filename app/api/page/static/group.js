/** One group: its siblings' rewards, and what is wrong with them. */

import { curl, get } from "./api.js";
import { rewardPlot } from "./chart.js";
import { copyButton } from "./copy.js";
import { badge, count, decimal, failure, h, message, replace } from "./dom.js";
import { ranges } from "./groups.js";
import { queryOf, sessionHref, sessionsHref } from "./route.js";
import { badgeCell, linkCell, smallTable, textCell } from "./rows.js";
import { visible } from "./visible.js";

const REFRESH_MS = 1000;
const MOST_PLOTTED = 2000;

/**
 * @param {HTMLElement} root
 * @param {{id: string|null}} params
 */
export function view(root, params) {
  return new GroupView(root, String(params.id));
}

class GroupView {
  /** @param {HTMLElement} root @param {string} id */
  constructor(root, id) {
    this.id = id;
    this.path = `/groups/${encodeURIComponent(id)}`;
    this.request = new AbortController();
    this.timer = 0;
    this.facts = h("div", { class: "facts" });
    this.plot = h("div", { class: "panel" });
    this.table = smallTable("Sessions of the group", columns(), (one) => one.session_id);
    this.problem = h("div");
    this.shown = "";
    replace(
      root,
      h(
        "div",
        { class: "bar" },
        h("h1", { dir: "auto" }, visible(id)),
        h("span", { class: "spacer" }),
        h("a", { href: sessionsHref({ group_id: id }) }, "In the session list"),
        h("a", { href: `#/exports${queryOf({ group_id: id })}` }, "Export"),
        copyButton(() => curl(this.path)),
      ),
      this.problem,
      this.facts,
      h("div", { class: "panels" }, this.plot, this.table.element),
    );
    this.#read();
  }

  /** @param {any[]} rows */
  onSessions(rows) {
    if (!this.timer && rows.some((row) => row.group_id === this.id)) this.onReset();
  }

  onReset() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#read(), REFRESH_MS);
  }

  close() {
    clearTimeout(this.timer);
    this.request.abort();
  }

  async #read() {
    this.timer = 0;
    try {
      this.#show(await get(this.path, {}, this.request.signal));
      replace(this.problem);
    } catch (error) {
      if (this.request.signal.aborted) return;
      replace(this.problem, failure(error, () => this.#read()));
    }
  }

  /** @param {any} group */
  #show(group) {
    const { attempts, statistics } = group;
    replace(this.facts, facts(group));
    this.table.rows.show(attempts);
    const now = JSON.stringify([attempts, statistics]);
    if (now === this.shown) return;
    this.shown = now;
    replace(this.plot, h("h2", null, "Rewards"), plot(attempts, statistics));
  }
}

/** @param {any[]} attempts @param {any} statistics @returns {Element} */
function plot(attempts, statistics) {
  if (!statistics) return message("empty", "No session has a reward yet.", h("code", null, "PUT /sessions/{id}/reward"));
  const shown = attempts.length > MOST_PLOTTED ? attempts.slice(0, MOST_PLOTTED) : attempts;
  const note = "A dot is a session and leads to it; an empty one is still open.";
  const cut = shown.length < attempts.length ? ` The first ${count(MOST_PLOTTED)} of ${count(attempts.length)}.` : "";
  return h("div", null, rewardPlot([...shown], statistics), h("p", { class: "muted" }, note, cut));
}

/** @param {any} group @returns {HTMLElement[]} */
function facts(group) {
  const { attempts, statistics } = group;
  const missing = missingOf(attempts);
  const closed = attempts.filter((/** @type {any} */ one) => one.status !== "open").length;
  const rewarded = statistics?.count ?? 0;
  const found = [
    fact("Sessions", count(attempts.length)),
    fact("Closed", count(closed)),
    fact("Rewarded", count(rewarded)),
    fact("Mean", decimal(statistics?.mean)),
    fact("Deviation", decimal(statistics?.std)),
    fact("Least, most", `${decimal(statistics?.min)}, ${decimal(statistics?.max)}`),
    fact("State", group.complete ? badge("complete", "good") : badge("not complete", "muted")),
  ];
  if (statistics?.zero_variance && statistics.count > 1) {
    found.push(fact("Variance", h("span", { class: "flag" }, "▲ zero: all rewards are equal, a group-relative advantage is 0")));
  }
  if (missing.length) found.push(fact("Missing attempts", h("span", { class: "flag" }, `▲ ${ranges(missing)}`)));
  return found;
}

/** @param {string} label @param {import("./dom.js").Child} value @returns {HTMLElement} */
function fact(label, value) {
  return h("div", { class: "figure" }, h("span", { class: "label" }, label), h("span", { class: "value small" }, value));
}

/**
 * Numbers below the highest attempt that no session has; counted from 0 where there is a 0, else from 1.
 * @param {any[]} attempts
 * @returns {number[]}
 */
function missingOf(attempts) {
  const numbers = new Set(attempts.map((one) => one.attempt).filter((one) => one !== null));
  if (!numbers.size) return [];
  const missing = [];
  for (let one = numbers.has(0) ? 0 : 1; one < Math.max(...numbers) && missing.length < 1000; one += 1) {
    if (!numbers.has(one)) missing.push(one);
  }
  return missing;
}

/** @returns {import("./rows.js").Column[]} */
function columns() {
  return [
    { title: "Attempt", number: true, fill: textCell((one) => String(one.attempt ?? "–")) },
    {
      title: "Session",
      isHeader: true,
      width: "auto",
      fill: linkCell((one) => one.session_id, (one) => sessionHref(one.session_id)),
    },
    { title: "State", width: "auto", fill: badgeCell((one) => one.status) },
    { title: "Reward", number: true, fill: textCell((one) => decimal(one.reward)) },
  ];
}
