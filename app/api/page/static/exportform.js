/** The form above the exports: filters and options of GET /export, by their own names. */

import { h } from "./dom.js";

export const SHAPES = ["turnlog", "slime", "miles", "verl", "skyrl", "trl", "tinker", "areal", "prime-rl", "atropos"];

/** What decides which rows there are, and so what the preview is told. */
const DECIDING = [
  "session_id",
  "group_id",
  "status",
  "session_status",
  "since",
  "until",
  "min_reward",
  "max_reward",
  "max_staleness",
  "weight_version",
  "shape",
  "max_seq_len",
  "truncate",
  "advantage",
];
const ALL = [...DECIDING, "limit", "replay", "explain"];

/** @param {URLSearchParams} query @returns {Record<string, string>} */
export function wishOf(query) {
  /** @type {Record<string, string>} */
  const wish = {};
  for (const name of ALL) {
    const value = query.get(name);
    if (value) wish[name] = value;
  }
  return wish;
}

/** @param {Record<string, string>} wish @returns {Record<string, string>} */
export function previewOf(wish) {
  return Object.fromEntries(Object.entries(wish).filter(([name]) => DECIDING.includes(name)));
}

/**
 * @param {(wish: Record<string, string>) => void} onChange
 * @returns {{element: HTMLElement, set: (wish: Record<string, string>) => void, focus: () => void}}
 */
export function exportForm(onChange) {
  const element = fields();
  const act = () => element.checkValidity() && onChange(read(element));
  element.addEventListener("change", act);
  element.addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
  return {
    element,
    set: (wish) => write(element, wish),
    focus: () => /** @type {HTMLElement} */ (element.elements.namedItem("session_id")).focus(),
  };
}

/** @returns {HTMLFormElement} */
function fields() {
  const field = (/** @type {string} */ title, /** @type {HTMLElement} */ control) => h("label", null, title, control);
  const text = (/** @type {string} */ name) => h("input", { name, type: "search", class: "wide", spellcheck: "false" });
  const number = (/** @type {string} */ name, step = "1") =>
    h("input", { name, type: "number", step, min: step === "1" ? "0" : null });
  const time = (/** @type {string} */ name) => h("input", { name, type: "datetime-local", step: "1" });
  const choice = (/** @type {string} */ name, /** @type {string[]} */ values) =>
    h("select", { name }, h("option", { value: "" }, "any"), values.map((value) => h("option", { value }, value)));
  const check = (/** @type {string} */ name, /** @type {string} */ title) =>
    h("label", { class: "check" }, h("input", { name, type: "checkbox", value: "true" }), title);
  const truncate = h("select", { name: "truncate" }, h("option", { value: "" }, "turn"), h("option", null, "token"));
  const advantage = h("select", { name: "advantage" }, h("option", { value: "" }, "none"), h("option", null, "grpo"));
  return h(
    "form",
    { class: "filters", "aria-label": "What to export" },
    field("Session", text("session_id")),
    field("Group", text("group_id")),
    field("Row's status", choice("status", ["completed", "truncated", "aborted"])),
    field("Session is", choice("session_status", ["open", "closed", "erased"])),
    field("Reward from", number("min_reward", "any")),
    field("to", number("max_reward", "any")),
    field("Versions behind, at most", number("max_staleness")),
    field("of weights", number("weight_version")),
    field("Committed from", time("since")),
    field("until", time("until")),
    field("Shape", choice("shape", SHAPES)),
    field("Advantage", advantage),
    field("Tokens, at most", number("max_seq_len")),
    field("cut", truncate),
    field("Rows, at most", number("limit")),
    check("replay", "replay payloads"),
    check("explain", "rows that say what is left out"),
    h("button", null, "Count"),
  );
}

/** Times are written as the reader's own and sent as seconds. */
const TIMES = new Set(["since", "until"]);

/** @param {HTMLFormElement} form @returns {Record<string, string>} */
function read(form) {
  /** @type {Record<string, string>} */
  const wish = {};
  for (const [name, value] of new FormData(form)) {
    if (typeof value !== "string" || !value.trim()) continue;
    wish[name] = TIMES.has(name) ? String(new Date(value).getTime() / 1000) : value.trim();
  }
  return wish;
}

/** @param {HTMLFormElement} form @param {Record<string, string>} wish */
function write(form, wish) {
  for (const name of ALL) {
    const control = form.elements.namedItem(name);
    const value = wish[name] ?? "";
    if (control instanceof HTMLInputElement && control.type === "checkbox") control.checked = value === "true";
    else if (control instanceof HTMLInputElement) control.value = TIMES.has(name) ? localTime(value) : value;
    else if (control instanceof HTMLSelectElement) control.value = value;
  }
}

/** @param {string} value seconds since the epoch @returns {string} for a field of type datetime-local */
function localTime(value) {
  const seconds = Number(value);
  if (!value || !Number.isFinite(seconds)) return "";
  const moment = new Date(seconds * 1000);
  return new Date(moment.getTime() - moment.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}
