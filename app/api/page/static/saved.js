/** Views that somebody has saved under a name: addresses, kept by this browser alone. */

import { announce, button, h, replace } from "./dom.js";
import { visibleText } from "./visible.js";

const KEY = "turnlog-views";
const MOST = 20;

/** @typedef {{name: string, href: string}} Saved */

/** @param {string|null} text @returns {Saved[]} what is none is left out: somebody else may have written there */
export function savedOf(text) {
  let found;
  try {
    found = JSON.parse(text ?? "[]");
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  if (!Array.isArray(found)) return [];
  const isSaved = (/** @type {any} */ one) => typeof one?.name === "string" && /^#\//.test(one?.href ?? "");
  return found.filter(isSaved).slice(0, MOST);
}

/** Links to the saved views, and a button that saves the one that is shown. */
export class SavedViews {
  constructor() {
    this.list = h("span", { class: "chips" });
    this.name = h("input", { type: "text", maxlength: "40", class: "narrow", "aria-label": "Name of the view", hidden: true });
    this.name.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.#save();
      if (event.key === "Escape") this.#ask(false);
    });
    this.save = button("Save view", () => (this.name.hidden ? this.#ask(true) : this.#save()), { class: "quiet" });
    this.element = h("span", { class: "savedviews", role: "group", "aria-label": "Saved views" }, this.list, this.name, this.save);
    this.#show();
  }

  /** @param {boolean} isAsked */
  #ask(isAsked) {
    this.name.hidden = !isAsked;
    if (isAsked) this.name.focus();
    else this.save.focus();
  }

  #save() {
    const name = this.name.value.trim();
    if (!name) return;
    const others = savedOf(localStorage.getItem(KEY)).filter((one) => one.name !== name);
    this.#keep([...others, { name, href: location.hash || "#/" }].slice(-MOST));
    announce(`Saved as ${name}`);
    this.name.value = "";
    this.#ask(false);
  }

  /** @param {Saved[]} views */
  #keep(views) {
    localStorage.setItem(KEY, JSON.stringify(views));
    this.#show();
  }

  #show() {
    const views = savedOf(localStorage.getItem(KEY));
    replace(
      this.list,
      views.map(({ name, href }) => [
        h("a", { href }, visibleText(name)),
        button("×", () => this.#keep(views.filter((one) => one.name !== name)), {
          class: "quiet",
          "aria-label": `Forget ${visibleText(name)}`,
        }),
      ]),
    );
  }
}
