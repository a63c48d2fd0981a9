/** One group: the rewards of its sessions, and what is wrong with them. */

import { get } from "./api.js";
import { rewardPlot } from "./chart.js";
import { copyCurl } from "./copy.js";
import { badge, bar, fact, h, message, replace } from "./dom.js";
import { count, decimal, ranges } from "./format.js";
import { queryOf, rolloutsHref, sessionHref, sessionsHref } from "./route.js";
import { badgeCell, linkCell, smallTable, textCell } from "./rows.js";
import { noGroup, View } from "./view.js";
import { visible } from "./visible.js";

/** @import {Attempt, Group, SessionRow, Statistics} from "../ui_types.d.ts" */
/** @import {Column} from "./rows.js" */
/** @import {Place} from "./view.js" */

const MOST_PLOTTED = 2000;

export class GroupView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { id }) {
    super(root);
    this.id = id;
    this.path = `/groups/${encodeURIComponent(id)}`;
    this.facts = h("div", { class: "facts" });
    this.plot = h("div", { class: "panel" });
    this.table = smallTable("Sessions of the group", columns(), (one) => one.session_id);
    this.shown = "";
    replace(
      root,
      bar(h("h1", { dir: "auto" }, visible(id)), [
        h("a", { href: rolloutsHref(id) }, "Side by side"),
        h("a", { href: sessionsHref({ group_id: id }) }, "In the session list"),
        h("a", { href: `#/exports${queryOf({ group_id: id })}` }, "Export"),
        copyCurl(() => ({ path: this.path })),
      ]),
      this.problem,
      this.facts,
      h("div", { class: "panels" }, this.plot, this.table.element),
    );
    this.refresh();
  }

  /** @param {string} code */
  absent(code) {
    return code === "not_found" ? noGroup(this.id) : null;
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    if (rows.some((row) => row.group_id === this.id)) this.changed();
  }

  refresh() {
    return this.read(
      async (signal) => /** @type {Group} */ (await get(this.path, {}, signal)),
      (group) => this.#show(group),
    );
  }

  /** @param {Group} group */
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

/** @param {Attempt[]} attempts @param {Statistics|null} statistics @returns {Element} */
function plot(attempts, statistics) {
  if (!statistics) {
    return message("empty", "No session has a reward yet.", h("code", null, "PUT /sessions/{id}/reward"));
  }
  const shown = attempts.length > MOST_PLOTTED ? attempts.slice(0, MOST_PLOTTED) : attempts;
  const note = "A dot is a session and leads to it; an empty one is still open.";
  const cut = shown.length < attempts.length ? ` The first ${count(MOST_PLOTTED)} of ${count(attempts.length)}.` : "";
  return h("div", null, rewardPlot([...shown], statistics), h("p", { class: "muted" }, note, cut));
}

/** @param {Group} group @returns {HTMLElement[]} */
function facts(group) {
  const { attempts, statistics } = group;
  const missing = missingOf(attempts);
  const closed = attempts.filter((one) => one.status !== "open").length;
  const rewarded = statistics?.count ?? 0;
  const found = [
    fact("Sessions", count(attempts.length)),
    fact("Closed", count(closed)),
    fact("Rewarded", count(rewarded)),
    fact("Mean", decimal(statistics?.mean)),
    fact("Std. dev.", decimal(statistics?.std)),
    fact("Min, max", `${decimal(statistics?.min)}, ${decimal(statistics?.max)}`),
    fact("State", group.complete ? badge("complete", "good") : badge("not complete", "muted")),
  ];
  if (statistics?.zero_variance && statistics.count > 1) {
    found.push(fact("Variance", flag("zero: all rewards are equal, a group-relative advantage is 0")));
  }
  if (missing.length) found.push(fact("Missing attempts", flag(ranges(missing))));
  return found;
}

/** @param {string} text */
function flag(text) {
  return h("span", { class: "flag" }, `▲ ${text}`);
}

/**
 * Numbers below the highest attempt that no session has; counted from 0 where there is a 0, else from 1.
 * @param {Attempt[]} attempts
 * @returns {number[]}
 */
function missingOf(attempts) {
  const numbers = new Set(attempts.map((one) => one.attempt).filter((one) => one !== null));
  const missing = [];
  const highest = Math.max(...numbers);
  for (let one = numbers.has(0) ? 0 : 1; one < highest && missing.length < 1000; one += 1) {
    if (!numbers.has(one)) missing.push(one);
  }
  return missing;
}

/** @returns {Column<Attempt>[]} */
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
