/** The strip above every view: how the fleet is, second by second. Built once, filled in place. */

import { Sparkline } from "./chart.js";
import { badge, bytes, compact, count, decimal, duration, h, milliseconds, replace, setBadge, setText } from "./dom.js";
import { sessionsHref } from "./route.js";
import { badgeCell, linkCell, sinceCell, smallTable, textCell } from "./rows.js";
import { visibleText } from "./visible.js";

const SPARK_S = 60;
const HEALTH = { healthy: "good", busy: "warn", paused: "warn", dead: "bad", unknown: "muted" };
const MOST_NAMED = 3;

/** The counts of sessions, and where each leads. */
const COUNTS = [
  ["active", "Active", {}, "A turn was opened or committed in the last minute"],
  ["claimed", "In a turn", { state: "claimed" }, "A turn is open"],
  ["gated", "Held", { state: "gated" }, "A turn waits at a gate"],
  ["idle", "Idle", { state: "idle" }, "Open, and no turn is"],
  ["closed", "Closed", { state: "closed" }, ""],
];

/**
 * @param {HTMLElement} root
 * @returns {{show: (overview: any) => void}}
 */
export function fleetStrip(root) {
  const parts = [sessionCounts(), speed(), engines(), weights(), errors(), database()];
  replace(root, parts.map((part) => part.element));
  return { show: (overview) => parts.forEach((part) => part.show(overview)) };
}

/**
 * @param {string} label
 * @param {{href?: string, hint?: string}} [more]
 */
function figure(label, more = {}) {
  const value = h("span", { class: "value" }, "–");
  const inside = [h("span", { class: "label" }, label), value];
  const attributes = { class: "figure", title: more.hint };
  const element = more.href ? h("a", { ...attributes, href: more.href }, inside) : h("div", attributes, inside);
  return { element, set: (/** @type {string} */ text) => setText(value, text) };
}

function sessionCounts() {
  const figures = COUNTS.map(([key, label, query, hint]) => {
    const made = figure(String(label), { href: sessionsHref(Object(query)), hint: String(hint) });
    return { key: String(key), ...made };
  });
  return {
    element: h("div", { class: "group" }, figures.map((one) => one.element)),
    show: (/** @type {any} */ overview) => {
      for (const { key, set, element } of figures) {
        set(compact(overview.sessions[key]));
        if (key === "gated") element.classList.toggle("alert", overview.sessions.gated > 0);
      }
    },
  };
}

function speed() {
  const turns = figure("Turns/s");
  const spark = new Sparkline("Turns per second", SPARK_S);
  const overhead = figure("Overhead p50 / p99", { hint: "Turnlog's own share of a turn, over the last minute" });
  const engine = figure("Engine p50 / p99", { hint: "The engine's share of a turn, over the last minute" });
  const element = h("div", { class: "group" }, turns.element, spark.element, overhead.element, engine.element);
  const pair = (/** @type {any} */ both) => `${milliseconds(both?.p50)} / ${milliseconds(both?.p99)}`;
  return {
    element,
    show: (/** @type {any} */ overview) => {
      turns.set(decimal(overview.turns_per_s, 1));
      spark.add(overview.turns_per_s);
      overhead.set(pair(overview.overhead_ms));
      engine.set(pair(overview.engine_ms));
      element.title = `Of ${overview.scope}`;
    },
  };
}

/** @param {any} engine @returns {string} */
function engineName(engine) {
  return engine.url.replace(/^https?:\/\//, "");
}

function engines() {
  const summary = h("summary");
  const table = smallTable("Engines", engineColumns(), (engine) => engine.url);
  const element = h("div", { class: "group engines" }, h("details", null, summary, table.element));
  let shown = "";
  return {
    element,
    show: (/** @type {any} */ overview) => {
      table.rows.show(overview.engines);
      const parts = engineParts(overview.engines);
      const now = JSON.stringify(parts);
      if (now === shown) return;
      shown = now;
      const label = h("span", { class: "label" }, `Engines (${overview.engines.length})`);
      replace(summary, label, parts.map(({ text, tone }) => badge(text, tone)));
    },
  };
}

/**
 * Those that are ill by name, the others by number.
 * @param {any[]} all
 * @returns {{text: string, tone: string}[]}
 */
function engineParts(all) {
  if (!all.length) return [{ text: "none: set TURNLOG_UPSTREAMS or POST /engines", tone: "warn" }];
  /** @type {Map<string, any[]>} */
  const byState = new Map();
  for (const engine of all) {
    const state = engine.state === "draining" ? "draining" : engine.health;
    byState.set(state, [...(byState.get(state) ?? []), engine]);
  }
  return [...byState].map(([state, some]) => {
    const tone = HEALTH[/** @type {keyof typeof HEALTH} */ (state)] ?? "warn";
    const names = some.slice(0, MOST_NAMED).map(engineName).join(", ");
    const isNamed = tone === "bad" || tone === "warn";
    const more = some.length > MOST_NAMED ? ", …" : "";
    return { text: isNamed ? `${some.length} ${state}: ${names}${more}` : `${some.length} ${state}`, tone };
  });
}

/** @returns {import("./rows.js").Column[]} */
function engineColumns() {
  const regressed = (/** @type {any} */ engine) => (engine.weight_version_regressed ? " (fell back)" : "");
  return [
    {
      title: "Engine",
      isHeader: true,
      width: "auto",
      fill: linkCell(engineName, (engine) => sessionsHref({ engine: engine.url })),
    },
    {
      title: "Health",
      width: "auto",
      fill: badgeCell((engine) => engine.health, (engine) => HEALTH[/** @type {keyof typeof HEALTH} */ (engine.health)]),
    },
    { title: "State", width: "auto", fill: textCell((engine) => engine.state) },
    { title: "In flight", number: true, fill: textCell((engine) => count(engine.in_flight)) },
    {
      title: "Weights",
      number: true,
      fill: textCell((engine) => `${visibleText(String(engine.weight_version ?? "–"))}${regressed(engine)}`),
    },
    { title: "Dialect", width: "auto", fill: textCell((engine) => engine.dialect ?? "–") },
    { title: "Since", number: true, fill: sinceCell((engine) => engine.since) },
    { title: "Last error", width: "auto", fill: textCell((engine) => visibleText(engine.last_error ?? "–")) },
  ];
}

function weights() {
  const version = figure("Weights", { hint: "The newest version that is a number" });
  const gate = badge("open", "good");
  const paused = h("span");
  const element = h(
    "div",
    { class: "group" },
    version.element,
    h("div", { class: "figure" }, h("span", { class: "label" }, "Gate"), gate, paused),
  );
  return {
    element,
    show: (/** @type {any} */ overview) => {
      version.set(String(overview.weight_version ?? "–"));
      const { gate: state } = overview;
      const left = state.lease_left_s == null ? "" : `, ${duration(Math.round(state.lease_left_s))} left`;
      if (state.paused) setBadge(gate, `paused (${state.mode}${left})`, "warn");
      else setBadge(gate, "open", "good");
      const names = overview.adapters.filter((/** @type {any} */ one) => one.paused).map((/** @type {any} */ one) => one.name);
      const more = names.length > MOST_NAMED ? ` and ${names.length - MOST_NAMED} more` : "";
      const list = names.slice(0, MOST_NAMED).map(visibleText).join(", ");
      setText(paused, names.length ? `paused adapters: ${list}${more}` : "");
    },
  };
}

function errors() {
  const recent = h("ul", { class: "errors" });
  const element = h(
    "div",
    { class: "group" },
    h("div", { class: "figure" }, h("span", { class: "label" }, "Errors, last minute"), recent),
  );
  let shown = "";
  return {
    element,
    show: (/** @type {any} */ overview) => {
      const found = Object.entries(overview.errors ?? {}).sort((a, b) => b[1] - a[1]);
      const totals = Object.entries(overview.errors_total ?? {}).map(([code, number]) => `${code}: ${count(number)}`);
      element.title = totals.length ? `Since the start: ${totals.join(", ")}` : "None since the start";
      const now = JSON.stringify(found);
      if (now === shown) return;
      shown = now;
      const items = found.map(([code, number]) => h("li", null, h("code", null, code), ` ${count(number)}`));
      replace(recent, items.length ? items : h("li", null, badge("none", "good")));
    },
  };
}

function database() {
  const size = figure("Database");
  const wal = figure("WAL");
  return {
    element: h("div", { class: "group" }, size.element, wal.element),
    show: (/** @type {any} */ overview) => {
      const { bytes: all, wal_bytes: walBytes, kind } = overview.database;
      size.set(bytes(all));
      size.element.title = kind;
      wal.element.hidden = walBytes === null;
      wal.set(bytes(walBytes));
    },
  };
}
