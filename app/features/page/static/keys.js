/** The page's keys. A list has its own (table.js); these work everywhere except in a field. */

import { h, showDialog } from "./dom.js";
import { listHref } from "./route.js";

const KEYS = [
  ["/", "go to the filter, or search a session"],
  ["j, k", "next and previous row, or turn of a session"],
  ["e, E", "next and previous error of a session"],
  ["Enter", "open the row"],
  ["Home, End", "first and last row"],
  ["arrows", "between tokens, and turns of a tree"],
  ["g r, g s, g g, g v", "runs, sessions, groups, versions"],
  ["g f, g e, g c", "search, exports, checkpoints"],
  ["Esc", "leave a field, close this"],
  ["?", "these keys"],
];
/** @type {Record<string, string>} */
const PLACES = { r: "runs", s: "", g: "groups", v: "versions", f: "search", e: "exports", c: "checkpoints" };
const SEQUENCE_MS = 1000;

/** @param {EventTarget|null} target @returns {boolean} is somebody writing there? */
function isWriting(target) {
  if (!(target instanceof HTMLElement)) return false;
  return target.isContentEditable || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName);
}

/** Is the focus on nothing that can be used? After a change of the view it is on the view. */
export function isNowhere() {
  return document.activeElement === document.body || document.activeElement?.id === "main";
}

/** @param {KeyboardEvent} event @returns {boolean} without a modifier, in no field and no dialog */
export function isForPage(event) {
  const isModified = event.ctrlKey || event.metaKey || event.altKey;
  return !isModified && !isWriting(event.target) && !document.querySelector("dialog[open]");
}

/** @param {() => void} goToFilter what `/` does */
export function listenToKeys(goToFilter) {
  let goPressedAt = -SEQUENCE_MS;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (isWriting(event.target)) {
      if (event.key === "Escape") /** @type {HTMLElement} */ (event.target).blur();
      return;
    }
    const place = PLACES[event.key];
    if (place !== undefined && event.timeStamp - goPressedAt < SEQUENCE_MS) location.hash = listHref(place);
    else if (event.key === "/") goToFilter();
    else if (event.key === "?") showKeys();
    else {
      if (event.key === "g") goPressedAt = event.timeStamp;
      return;
    }
    goPressedAt = -SEQUENCE_MS;
    event.preventDefault();
  });
}

/** The keys, in a dialog. */
export function showKeys() {
  if (document.querySelector("dialog[open]")) return;
  showDialog(
    { "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keys"),
    h("dl", { class: "keys" }, KEYS.map(([key, text]) => [h("dt", null, h("kbd", null, key)), h("dd", null, text)])),
  );
}
