/** The parts of the filter forms, and their values as text by name. */

import { h } from "./dom.js";

/** @import {Attributes} from "./dom.js" */
/** @typedef {Record<string, string>} Values only the fields that are filled */

/** @param {string} title @param {HTMLElement} control */
export function field(title, control) {
  return h("label", null, title, control);
}

/**
 * A form that a narrow page folds until somebody wants it; a wide one always shows it.
 * @param {AbortSignal} closed
 * @param {HTMLFormElement} form
 * @returns {HTMLElement}
 */
export function foldedForm(closed, form) {
  const wide = window.matchMedia("(min-width: 701px)");
  const box = h("details", { class: "filterbox", open: wide.matches }, h("summary", null, "Filters"), form);
  wide.addEventListener("change", () => (box.open = wide.matches), { signal: closed });
  return box;
}

/** @param {string} name */
export function textField(name) {
  return h("input", { name, type: "search", class: "wide", spellcheck: "false" });
}

/** @param {string} name @param {Attributes} [attributes] */
export function numberField(name, attributes) {
  return h("input", { name, type: "number", ...attributes });
}

/** @param {string} name @param {string} title */
export function checkbox(name, title) {
  return h("label", { class: "check" }, h("input", { name, type: "checkbox", value: "true" }), title);
}

/**
 * @param {string} name
 * @param {string[]} values
 * @param {string} [unset] what stands for no value
 */
export function choice(name, values, unset = "any") {
  return h("select", { name }, h("option", { value: "" }, unset), values.map((value) => h("option", { value }, value)));
}

/** @param {HTMLFormElement} form @returns {Values} */
export function readForm(form) {
  /** @type {Values} */
  const values = {};
  for (const [name, value] of new FormData(form)) {
    if (typeof value === "string" && value.trim()) values[name] = value.trim();
  }
  return values;
}

/** @param {HTMLFormElement} form @returns {(HTMLInputElement|HTMLSelectElement)[]} its fields */
export function controlsOf(form) {
  return [...form.elements].filter((one) => one instanceof HTMLInputElement || one instanceof HTMLSelectElement);
}

/**
 * @param {HTMLFormElement} form
 * @param {Values} values
 * @param {Element|null} [kept] a field that stays as it is
 */
export function writeForm(form, values, kept) {
  for (const control of controlsOf(form)) {
    if (control === kept) continue;
    const value = values[control.name] ?? "";
    if (control instanceof HTMLInputElement && control.type === "checkbox") control.checked = value === "true";
    else control.value = value;
  }
}

/**
 * The values that an address names.
 * @param {URLSearchParams} query
 * @param {string[]} names
 * @returns {Values}
 */
export function valuesOf(query, names) {
  /** @type {Values} */
  const values = {};
  for (const name of names) {
    const value = query.get(name);
    if (value) values[name] = value;
  }
  return values;
}

/** @param {HTMLFormElement} form @param {string} name where the cursor goes */
export function focusField(form, name) {
  const box = form.closest("details");
  if (box) box.open = true;
  /** @type {HTMLElement} */ (form.elements.namedItem(name)).focus();
}
