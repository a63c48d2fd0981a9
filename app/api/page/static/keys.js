/** The page's keys. Those of a list are its own (table.js); these work anywhere but where one writes. */

import { h } from "./dom.js";

const KEYS = [
  ["/", "go to the filter"],
  ["j, k", "next and previous row"],
  ["Enter", "open the row"],
  ["Home, End", "first and last row"],
  ["g s, g g, g e", "sessions, groups, exports"],
  ["Esc", "leave a field, close this"],
  ["?", "these keys"],
];
const PLACES = { s: "#/", g: "#/groups", e: "#/exports" };
const SEQUENCE_MS = 1000;

/** @param {EventTarget|null} target @returns {boolean} is somebody writing there? */
export function isWriting(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName));
}

/**
 * @param {{filter: () => void}} actions
 */
export function listenToKeys(actions) {
  let goes = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (isWriting(event.target)) {
      if (event.key === "Escape") /** @type {HTMLElement} */ (event.target).blur();
      return;
    }
    const place = PLACES[/** @type {keyof typeof PLACES} */ (event.key)];
    if (place && event.timeStamp - goes < SEQUENCE_MS) location.hash = place;
    else if (event.key === "/") actions.filter();
    else if (event.key === "?") showKeys();
    else {
      if (event.key === "g") goes = event.timeStamp;
      return;
    }
    goes = 0;
    event.preventDefault();
  });
}

/** The keys, in a dialog. */
export function showKeys() {
  if (document.querySelector("dialog[open]")) return;
  const dialog = h(
    "dialog",
    { "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keys"),
    h("dl", { class: "keys" }, KEYS.map(([key, text]) => [h("dt", null, h("kbd", null, key)), h("dd", null, text)])),
    h("form", { method: "dialog" }, h("button", null, "Close")),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
