/** The form above the session list. It acts while one types; what it says is always what the address says. */

import { h } from "./dom.js";
import { FILTERS, STATES } from "./filters.js";

const TYPING_MS = 250;

/**
 * @param {(filters: Record<string, string>) => void} onChange
 * @returns {{element: HTMLElement, set: (wish: Record<string, string>) => void, setEngines: (urls: string[]) => void,
 *   focus: () => void}}
 */
export function filterForm(onChange) {
  const engines = h("select", { name: "engine", class: "wide" }, h("option", { value: "" }, "any"));
  const element = fields(engines);
  let timer = 0;
  const act = () => {
    clearTimeout(timer);
    if (element.checkValidity()) onChange(read(element));
  };
  element.addEventListener("input", (event) => {
    clearTimeout(timer);
    const isTyped = event.target instanceof HTMLInputElement && event.target.type !== "checkbox";
    if (isTyped) timer = setTimeout(act, TYPING_MS);
    else act();
  });
  element.addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
  return {
    element,
    set: (wish) => write(element, engines, wish),
    setEngines: (urls) => urls.forEach((url) => offer(engines, url)),
    focus: () => /** @type {HTMLElement} */ (element.elements.namedItem("q")).focus(),
  };
}

/** @param {HTMLSelectElement} engines @returns {HTMLFormElement} */
function fields(engines) {
  const states = STATES.map((state) => h("option", { value: state }, state));
  const number = (/** @type {string} */ name, /** @type {Record<string, unknown>} */ more) =>
    h("input", { name, type: "number", ...more });
  return h(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter sessions" },
    field("Session id begins with", h("input", { name: "q", type: "search", class: "wide", spellcheck: "false" })),
    field("State", h("select", { name: "state" }, h("option", { value: "" }, "any"), states)),
    field("Group", h("input", { name: "group_id", type: "search", class: "wide", spellcheck: "false" })),
    field("Engine", engines),
    field("Reward from", number("min_reward", { step: "any" })),
    field("to", number("max_reward", { step: "any" })),
    h("label", { class: "check" }, h("input", { name: "unrewarded", type: "checkbox", value: "true" }), "no reward"),
    field("Versions behind", number("min_staleness", { min: "0", step: "1", placeholder: "at least" })),
    field("Stuck longer than", number("stuck_s", { min: "0", step: "any", placeholder: "seconds" })),
  );
}

/** @param {string} title @param {HTMLElement} control @returns {HTMLElement} */
function field(title, control) {
  return h("label", null, title, control);
}

/** @param {HTMLFormElement} form @returns {Record<string, string>} what is set */
function read(form) {
  /** @type {Record<string, string>} */
  const filters = {};
  for (const [name, value] of new FormData(form)) {
    if (typeof value === "string" && value.trim()) filters[name] = value.trim();
  }
  return filters;
}

/** @param {HTMLFormElement} form @param {HTMLSelectElement} engines @param {Record<string, string>} wish */
function write(form, engines, wish) {
  if (wish.engine) offer(engines, wish.engine);
  for (const name of FILTERS) {
    const control = form.elements.namedItem(name);
    if (control === document.activeElement) continue;
    if (control instanceof HTMLInputElement && control.type === "checkbox") control.checked = wish[name] === "true";
    else if (control instanceof HTMLInputElement || control instanceof HTMLSelectElement) {
      control.value = wish[name] ?? "";
    }
  }
}

/** @param {HTMLSelectElement} engines @param {string} url */
function offer(engines, url) {
  if ([...engines.options].some((option) => option.value === url)) return;
  engines.append(h("option", { value: url }, url));
}
