/** The parts of the filter forms, and their values as text by name. */

import { h } from "./dom.js";

/** @import {Attributes} from "./dom.js" */
/** @typedef {Record<string, string>} Values only the fields that are filled */

const TYPING_MS = 250;

/** @param {string} title @param {HTMLElement} control */
export function field(title, control) {
  return h("label", null, title, control);
}

/** @param {string} name @param {Attributes} [attributes] */
export function textField(name, attributes) {
  return h("input", { name, type: "search", class: "wide", spellcheck: "false", ...attributes });
}

/** @param {string} name @param {Attributes} [attributes] */
export function numberField(name, attributes) {
  return h("input", { name, type: "number", ...attributes });
}

/** What is chosen outside the form, and stays in its query. @param {string} name */
export function chosen(name) {
  return h("input", { name, type: "hidden" });
}

/** @param {string} name @param {string} title */
export function checkbox(name, title) {
  return h("label", { class: "check" }, h("input", { name, type: "checkbox", value: "true" }), title);
}

/** @param {string} name @param {string[]} values @param {string} [unset] what stands for no value */
export function choice(name, values, unset = "any") {
  return h("select", { name }, h("option", { value: "" }, unset), values.map((value) => h("option", { value }, value)));
}

/** A form that is a query: it acts when it is changed, and always shows what the address says. A narrow page folds it. */
export class QueryForm {
  /**
   * It acts by an event: while one types, or once a field is left.
   * @param {AbortSignal} closed @param {(values: Values) => void} onChange @param {"input"|"change"} event
   * @param {HTMLFormElement} form
   */
  constructor(closed, onChange, event, form) {
    this.form = form;
    const wide = window.matchMedia("(min-width: 701px)");
    const box = h("details", { class: "filterbox", open: wide.matches }, h("summary", null, "Filters"), form);
    wide.addEventListener("change", () => (box.open = wide.matches), { signal: closed });
    this.box = box;
    let timer = 0;
    const act = () => {
      clearTimeout(timer);
      if (form.checkValidity()) onChange(this.read());
    };
    form.addEventListener(event, ({ target }) => {
      clearTimeout(timer);
      const isTyped = event === "input" && target instanceof HTMLInputElement && target.type !== "checkbox";
      if (isTyped) timer = setTimeout(act, TYPING_MS);
      else act();
    });
    form.addEventListener("submit", (submitted) => {
      submitted.preventDefault();
      act();
    });
    closed.addEventListener("abort", () => clearTimeout(timer));
  }

  get controls() {
    return [...this.form.elements].filter((one) => one instanceof HTMLInputElement || one instanceof HTMLSelectElement);
  }

  /** @returns {Values} */
  read() {
    const all = [...new FormData(this.form)].map(([name, value]) => [name, String(value).trim()]);
    return Object.fromEntries(all.filter(([, value]) => value));
  }

  /** @param {Values} values @param {Element|null} [kept] a field that stays as it is */
  set(values, kept) {
    for (const control of this.controls) {
      if (control === kept) continue;
      const value = values[control.name] ?? "";
      if (control instanceof HTMLInputElement && control.type === "checkbox") control.checked = value === "true";
      else control.value = value;
    }
  }

  /** What an address names of the form's fields. @param {URLSearchParams} query @returns {Values} */
  queryOf(query) {
    const named = this.controls.map(({ name }) => [name, query.get(name) ?? ""]);
    return Object.fromEntries(named.filter(([, value]) => value));
  }

  /** Put the cursor into the first field. */
  focus() {
    this.box.open = true;
    this.controls[0]?.focus();
  }
}
