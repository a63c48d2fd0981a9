/** The strip above every view: the state of the fleet each second. Built once, filled in place. */

import { badge, figure, h, renew, replace, setBadge, setText, STATES } from "./dom.js";
import { bytes, compact, count, duration, milliseconds } from "./format.js";
import { chosenRun, sessionsHref } from "./route.js";
import { badgeCell, column, linkCell, numberColumn, sinceCell, smallTable } from "./rows.js";
import { recall, remember } from "./view.js";
import { visibleText } from "./visible.js";

/** @import {Column, Engine, Overview, Percentiles} from "../ui_types.d.ts" */
/** @typedef {{element: HTMLElement, show: (overview: Overview) => void}} Part of the strip; hidden where a run has none */

/** @type {Record<string, string>} */
const HEALTH = { healthy: "good", busy: "warn", paused: "warn", dead: "bad", unknown: "muted" };
const MOST_NAMED = 3;
/** Where one thing is looked at: the strip is folded there, until somebody wants it. */
const CLOSE_UPS = ["session", "tokens", "group", "rollouts", "checkpoint", "judge"];

/** The counts of sessions: each leads to its list. */
const COUNTS = /** @type {const} */ (["active", "running", "paused", "idle", "closed"]);

/**
 * The strip, and the button that folds it: that names an engine which is not well, also while the strip is folded.
 * @param {HTMLElement} root
 * @param {HTMLElement} toggle
 */
export function fleetStrip(root, toggle) {
  const parts = [group(...COUNTS.map(counted)), speed(), engines(), weights(), errors(), database()];
  replace(root, parts.map((part) => part.element));
  const state = badge("Fleet", "good");
  toggle.append(state);
  let place = "lists";
  toggle.addEventListener("click", () => {
    remember(`fleet in ${place}`, root.hidden ? "shown" : "folded");
    enter();
  });
  const enter = () => {
    root.hidden = (recall(`fleet in ${place}`) ?? (place === "lists" ? "shown" : "folded")) === "folded";
    toggle.hidden = false;
    toggle.setAttribute("aria-expanded", String(!root.hidden));
  };
  return {
    /** @param {string} name of a view */
    enter: (name) => {
      place = CLOSE_UPS.includes(name) ? "close-ups" : "lists";
      enter();
    },
    /** @param {Overview} overview */
    show: (overview) => {
      parts.forEach((part) => part.show(overview));
      const unwell = engineParts(overview.engines).find(({ tone }) => tone === "bad" || tone === "warn");
      setBadge(state, unwell && root.hidden ? `Fleet: ${unwell.text}` : "Fleet", unwell?.tone ?? "good");
    },
  };
}

/**
 * A figure whose value is set again and again. Its text is null where it is the whole server's, and there is none of a run.
 * @param {string} label
 * @param {(overview: Overview) => string|null} text
 * @param {{href?: () => string, hint?: (overview: Overview) => string, isAlert?: (overview: Overview) => boolean}} [more]
 * @returns {Part}
 */
function live(label, text, { href, hint, isAlert } = {}) {
  const value = h("span", { class: "value" }, "–");
  const element = h(href ? "a" : "div", { class: "figure" }, h("span", { class: "label" }, label), value);
  const show = (/** @type {Overview} */ overview) => {
    const now = text(overview);
    element.hidden = now === null;
    setText(value, now ?? "");
    if (href) element.setAttribute("href", href()); // another run may have been chosen
    if (hint) element.title = hint(overview);
    element.classList.toggle("alert", Boolean(isAlert?.(overview)));
  };
  return { element, show };
}

/** @param {...Part} parts @returns {Part} */
function group(...parts) {
  const element = h("div", { class: "group" }, parts.map((part) => part.element));
  const show = (/** @type {Overview} */ overview) => {
    parts.forEach((part) => part.show(overview));
    element.hidden = parts.every((part) => part.element.hidden);
  };
  return { element, show };
}

/** @param {COUNTS[number]} key @returns {Part} */
function counted(key) {
  return live(key.charAt(0).toUpperCase() + key.slice(1), ({ sessions }) => compact(sessions[key]), {
    href: () => sessionsHref({ state: key === "active" ? null : key }),
    hint: () => STATES[key]?.hint ?? "A turn was opened or committed in the last minute",
    isAlert: ({ sessions }) => key === "paused" && sessions.paused > 0,
  });
}

function speed() {
  const pair = (/** @type {Percentiles|null} */ one) => one && `${milliseconds(one.p50)} / ${milliseconds(one.p99)}`;
  const hint = (/** @type {string} */ whose) => (/** @type {Overview} */ { scope }) =>
    `${whose} share of a turn, over the last minute; of ${scope}`;
  return group(
    live("Turns/s", ({ turns_per_s: all }) => (all === null ? null : rate(all)), { hint: ({ scope }) => `Of ${scope}` }),
    live("Overhead p50 / p99", (overview) => pair(overview.overhead_ms), { hint: hint("Turnlog's own") }),
    live("Engine p50 / p99", (overview) => pair(overview.engine_ms), { hint: hint("The engine's") }),
  );
}

/** @param {number} perSecond @returns {string} a rate that is hardly any is not 0, and has no exponent */
function rate(perSecond) {
  return perSecond > 0 && perSecond < 0.05 ? "< 0.1" : perSecond.toFixed(1);
}

/** @param {Engine} engine */
function engineName(engine) {
  return engine.url.replace(/^https?:\/\//, "");
}

/** @param {string[]} names @returns {string} the first of them, and how many there are beside these */
function firstOf(names) {
  const more = names.length - MOST_NAMED;
  return names.slice(0, MOST_NAMED).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

function engines() {
  const summary = h("summary");
  const table = smallTable("Engines", engineColumns(), (engine) => engine.url);
  const element = h("div", { class: "group engines" }, h("details", null, summary, table.element));
  const show = (/** @type {Overview} */ { engines: all }) => {
    table.rows.show(all);
    const parts = engineParts(all);
    const label = () => h("span", { class: "label" }, `Engines (${all.length})`);
    renew(summary, parts, () => [label(), parts.map(({ text, tone }) => badge(text, tone))]);
  };
  return { element, show };
}

/** The engines that are not well by name, the others by number. @param {Engine[]} all */
function engineParts(all) {
  if (!all.length) return [{ text: "none: set TURNLOG_UPSTREAMS or POST /engines", tone: "warn" }];
  const byState = Map.groupBy(all, (engine) => (engine.state === "draining" ? "draining" : engine.health));
  return [...byState].map(([state, some]) => {
    const tone = HEALTH[state] ?? "warn";
    const names = firstOf(some.map(engineName));
    return { text: tone === "bad" || tone === "warn" ? `${some.length} ${state}: ${names}` : `${some.length} ${state}`, tone };
  });
}

/** @returns {Column<Engine>[]} */
function engineColumns() {
  const width = "auto";
  const regressed = (/** @type {Engine} */ engine) => (engine.weight_version_regressed ? " (fell back)" : "");
  return [
    { title: "Engine", isHeader: true, width, fill: linkCell(engineName, (engine) => sessionsHref({ engine: engine.url })) },
    { title: "Health", width, fill: badgeCell((engine) => engine.health, (engine) => HEALTH[engine.health]) },
    column("State", (engine) => engine.state, { width }),
    numberColumn("In flight", (engine) => count(engine.in_flight)),
    numberColumn("Weights", (engine) => `${visibleText(String(engine.weight_version ?? "–"))}${regressed(engine)}`),
    column("Dialect", (engine) => engine.dialect ?? "–", { width }),
    { title: "Since", number: true, fill: sinceCell((engine) => engine.since) },
    column("Last error", (engine) => visibleText(engine.last_error ?? "–"), { width }),
  ];
}

function weights() {
  const hint = () => "The newest version that is a number";
  const version = live("Weights", ({ weight_version }) => String(weight_version ?? "–"), { hint });
  const gate = badge("open", "good");
  const paused = h("span", { class: "pausednames" });
  const show = (/** @type {Overview} */ { gate: state, adapters }) => {
    const left = state.lease_left_s == null ? "" : `, ${duration(Math.round(state.lease_left_s))} left`;
    if (state.paused) setBadge(gate, `paused (${state.mode}${left})`, "warn");
    else setBadge(gate, "open", "good");
    const runs = chosenRun() === null ? state.paused_runs.map((run) => `run ${run}`) : [];
    const names = [...runs, ...adapters.filter((one) => one.paused).map((one) => visibleText(one.name))];
    setText(paused, names.length ? `paused: ${firstOf(names)}` : "");
    paused.title = names.length ? `Paused: ${names.join(", ")}` : "";
  };
  return group(version, { element: figure("Gate", [gate, paused]), show });
}

function errors() {
  const recent = h("ul", { class: "errors" });
  const element = h("div", { class: "group" }, figure("Errors, last minute", recent));
  const show = (/** @type {Overview} */ overview) => {
    element.hidden = overview.errors === null;
    const found = Object.entries(overview.errors ?? {}).sort((a, b) => b[1] - a[1]);
    const totals = Object.entries(overview.errors_total ?? {}).map(([code, number]) => `${code}: ${count(number)}`);
    element.title = totals.length ? `Since the start: ${totals.join(", ")}` : "None since the start";
    const item = (/** @type {[string, number]} */ [code, number]) => h("li", null, h("code", null, code), ` ${count(number)}`);
    renew(recent, found, () => (found.length ? found.map(item) : h("li", null, badge("none", "good"))));
  };
  return { element, show };
}

function database() {
  return group(
    live("Database", ({ database: of }) => of && bytes(of.bytes), { hint: ({ database: of }) => of?.kind ?? "" }),
    live("WAL", ({ database: of }) => of && bytes(of.wal_bytes)),
  );
}
