/** A run's first view: is it healthy, and what should be looked at? */

import { versionPlot } from "./chart.js";
import { badge, bar, fact, flag, h, message, renew, replace } from "./dom.js";
import { amount, compact, count, decimal, since } from "./format.js";
import { groupNameColumn } from "./groups.js";
import { chosenRun, listHref, sessionsHref } from "./route.js";
import { badgeCell, column, errorColumns, numberColumn, sinceCell, smallTable } from "./rows.js";
import { FollowsFleet } from "./view.js";
import { visible, visibleText } from "./visible.js";

/** @import {Child, Column, GroupRow, Place, RunFigures, RunView as Answer, SessionRow, ShutGate, StuckGroup, VersionFigures} from "../ui_types.d.ts" */

/** A share of this size is marked: of turns that an engine failed, of a limit that is used, of groups that teach nothing. */
const MANY_ERRORS = 0.1;
const MOST_OF_LIMIT = 0.9;
const MANY_FLAT = 0.5;

const STALENESS = "How many versions a session's oldest weights are behind its newest";
/** @type {{title: string, value: (one: VersionFigures) => number|null, text?: (value: number) => string, note: string, hint?: string}[]} */
const PLOTS = [
  { title: "Reward", value: (one) => one.mean_reward, note: "mean of the rollouts" },
  { title: "Engine errors", value: errorShare, text: percent, note: "of all turns" },
  { title: "Tool errors", value: ({ turns, tool_errors: failed }) => (turns ? failed / turns : null), note: "a turn" },
  { title: "Staleness", value: (one) => one.staleness, note: "versions, mean of the sessions", hint: STALENESS },
];

export class RunView extends FollowsFleet {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, place) {
    const run = chosenRun() ?? "";
    super(root, "run", { ...place, id: run });
    this.path = `/ui/api/runs/${encodeURIComponent(run)}`;
    this.facts = h("div", { class: "facts" });
    this.plots = h("div", { class: "plots" });
    this.versions = smallTable("Weight versions of the run", versionColumns(), (/** @type {VersionFigures} */ one) => String(one.version));
    this.lowest = section("Lowest mean reward", groupColumns(), "No group has a reward yet.");
    this.flat = section("Zero variance", groupColumns(), "In no group are all rewards equal.");
    this.stuck = section("Open longest", stuckColumns(), "No group waits for anything.");
    this.gates = section("Gates that are shut", gateColumns(), "All gates are open.", gateKey);
    replace(
      root,
      bar(h("h1", null, visible(run)), [
        h("a", { href: sessionsHref({ run }) }, "Sessions"),
        h("a", { href: listHref("groups", { run }) }, "Groups"),
        h("a", { href: listHref("judge", { run }), "data-judge": true }, "Judge"),
        this.tools(() => ({ path: `/runs/${encodeURIComponent(run)}` })),
      ]),
      this.problem,
      this.facts,
      this.plots,
      h("div", { class: "versiontable" }, this.versions.element),
      h("div", { class: "pairs" }, [this.stuck, this.gates, this.lowest, this.flat].map((one) => one.element)),
    );
    this.refresh();
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    if (rows.some((row) => row.run === this.id)) this.changed();
  }

  refresh() {
    return this.read({ path: this.path }, (/** @type {Answer} */ answer) => {
      const { versions, groups, gates } = answer;
      renew(this.facts, [answer.run, answer.failed, groups, gates], () => facts(answer));
      renew(this.plots, versions, () => plots(versions));
      this.versions.rows.show(versions);
      this.stuck.show(groups.stuck);
      this.gates.show(gates);
      this.lowest.show(groups.lowest);
      this.flat.show(groups.zero_variance, `, ${count(groups.flat)} of ${count(groups.rewarded)}`);
    });
  }
}

/** @param {{turns: number, engine_errors: number}} one @returns {number|null} */
function errorShare({ turns, engine_errors: errors }) {
  return turns + errors ? errors / (turns + errors) : null;
}

/** @param {number} share @returns {string} */
function percent(share) {
  return `${Number((100 * share).toPrecision(2))} %`;
}

/** @param {string} text @param {boolean} isBad */
function marked(text, isBad) {
  return isBad ? flag(text) : text;
}

/** @param {Answer} answer @returns {Child} */
function facts({ run, failed, groups, gates }) {
  const { sessions, reward, errors, limits, tokens, weight_versions: weights } = run;
  const share = errorShare(run) ?? 0;
  const kinds = Object.entries(failed).map(([kind, number]) => `${kind} ${count(number)}`);
  const reasons = Object.entries(errors).map(([reason, number]) => `${reason} ${count(number)}`);
  const behind = weights.newest === null || weights.oldest_live === null ? null : weights.newest - weights.oldest_live;
  const held = gates.reduce((most, gate) => Math.max(most, gate.held), 0);
  const oldest = groups.stuck[0];
  return [
    run.status !== "open" && fact("State", badge(run.status)),
    fact("Reward", reward ? `${decimal(reward.mean)} ± ${decimal(reward.std)}` : "–"),
    titled(reasons.join(", "), fact("Engine errors", marked(`${percent(share)} of turns`, share >= MANY_ERRORS))),
    fact("Tool errors", count(run.tool_errors)),
    fact("Failed attempts", kinds.join(", ") || "none"),
    fact("Zero variance", marked(`${count(groups.flat)} of ${amount(groups.rewarded, "group")}`, groups.flat > MANY_FLAT * groups.rewarded)),
    titled("Versions behind the run's newest", fact("Oldest open session", behind === null ? "–" : amount(behind, "version"))),
    fact("Open longest", oldest ? ["a group, ", since(oldest.since, "for")] : "none"),
    fact("Gates", gates.length ? marked(`${amount(gates.length, "gate")} shut, ${amount(held, "turn")} held`, true) : badge("open", "good")),
    fact("Sessions", [used(sessions.open, limits.live), ` open, ${count(sessions.closed)} closed`]),
    titled(`${count(tokens.prompt)} of prompts`, fact("Sampled tokens", used(tokens.generated, limits.tokens, compact))),
    fact("Groups", `${count(run.groups.complete)} complete, ${count(run.groups.acknowledged)} acknowledged`),
    fact("Last change", since(run.last_at)),
    run.note && fact("Note", visibleText(run.note)),
  ];
}

/** @param {string} title @param {HTMLElement} element */
function titled(title, element) {
  element.title = title;
  return element;
}

/** How much of a limit is used. @param {number} number @param {number|null} limit @param {(value: number) => string} [text] */
function used(number, limit, text = count) {
  return limit === null ? text(number) : marked(`${text(number)} of ${text(limit)}`, number >= MOST_OF_LIMIT * limit);
}

/** @param {VersionFigures[]} versions the newest first @returns {Child} */
function plots(versions) {
  if (!versions.length) return message("empty", "No session has a weight version that is a number: engines say theirs with each reply.");
  return PLOTS.map(({ title, value, text = decimal, note, hint }) => {
    const points = versions.toReversed().flatMap((one) => {
      const y = value(one);
      return y === null ? [] : [{ x: one.version, y }];
    });
    const head = h("h2", { title: hint }, title, h("span", { class: "muted" }, `, ${note}`));
    return h("section", { class: "panel" }, head, versionPlot(points, title, text, text === percent ? percent : String));
  });
}

/**
 * A table below its title; words where it is empty.
 * @template Row
 * @param {string} title
 * @param {Column<Row>[]} columns
 * @param {string} nothing
 * @param {(row: Row) => string} [keyOf]
 */
function section(title, columns, nothing, keyOf = (row) => /** @type {{group_id: string}} */ (row).group_id) {
  const table = smallTable(title, columns, keyOf);
  const more = h("span", { class: "muted" });
  const empty = h("p", { class: "muted" }, nothing);
  const element = h("section", { class: "panel" }, h("h2", null, title, more), empty, table.element);
  const show = (/** @type {Row[]} */ rows, text = "") => {
    more.textContent = text;
    empty.hidden = rows.length > 0;
    table.element.hidden = !rows.length;
    table.rows.show(rows);
  };
  show([]);
  return { element, show };
}

/** @returns {Column<VersionFigures>[]} */
function versionColumns() {
  return [
    numberColumn("Weights", (one) => String(one.version), { isHeader: true }),
    numberColumn("Mean reward", (one) => decimal(one.mean_reward)),
    numberColumn("Rewarded", (one) => count(one.rewarded)),
    numberColumn("Failed", (one) => count(one.failed), { hint: "Rollouts" }),
    numberColumn("Turns", (one) => count(one.turns)),
    ...errorColumns(),
    numberColumn("Share", (one) => percent(errorShare(one) ?? 0), { hint: "Of engine errors in all turns" }),
    numberColumn("Staleness", (one) => decimal(one.staleness), { hint: STALENESS }),
    numberColumn("Sessions", (one) => count(one.sessions), { hint: "Sessions whose newest turn's weights are of this version" }),
    numberColumn("Open", (one) => count(one.open)),
  ];
}

/** @returns {Column<GroupRow>[]} */
function groupColumns() {
  return [
    groupNameColumn(),
    numberColumn("Mean", (one) => decimal(one.mean)),
    numberColumn("Std. dev.", (one) => decimal(one.std), { hint: "Of the sample, with n − 1" }),
    numberColumn("Rewarded", (one) => `${count(one.rewarded)} of ${count(one.sessions)}`),
    numberColumn("Failed", (one) => count(one.failed)),
  ];
}

/** @returns {Column<StuckGroup>[]} */
function stuckColumns() {
  const waitsFor = (/** @type {StuckGroup} */ { arrived, group_size: size }) => (size === null ? count(arrived) : `${count(arrived)} of ${count(size)}`);
  return [
    groupNameColumn(),
    numberColumn("Attempts", waitsFor, { hint: "That have arrived, of those that it waits for" }),
    numberColumn("Closed", (one) => count(one.closed)),
    numberColumn("Rewarded", (one) => count(one.rewarded)),
    { title: "Open for", number: true, hint: "Since its first session was created", fill: sinceCell((one) => one.since, "for") },
  ];
}

/** @param {ShutGate} gate @returns {string} */
function gateKey({ of, adapter, reason }) {
  return JSON.stringify([of, adapter, reason]);
}

/** @returns {Column<ShutGate>[]} */
function gateColumns() {
  const name = (/** @type {ShutGate} */ { of, adapter }) => `${of === "run" ? "the run's" : "the server's"}${adapter === null ? "" : `, adapter ${visibleText(adapter)}`}`;
  return [
    column("Gate", name, { isHeader: true }),
    { title: "Why", width: "auto", fill: badgeCell((one) => one.reason, () => "warn") },
    numberColumn("Turns that wait", (one) => count(one.held), { hint: "In this process" }),
    { title: "Since", number: true, fill: sinceCell((one) => one.since) },
  ];
}
