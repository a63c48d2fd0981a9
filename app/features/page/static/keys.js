/** The page's keys; index.html names them. A list has its own (table.js); these work everywhere except in a field. */

import { part } from "./dom.js";
import { listHref } from "./route.js";

/** @type {Record<string, string>} */
const PLACES = { r: "runs", s: "", g: "groups", f: "search", e: "exports", c: "checkpoints" };
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
      if (event.key !== "Escape") return;
      // A browser would empty a field for a search, and the list would stay as it is.
      event.preventDefault();
      return /** @type {HTMLElement} */ (event.target).blur();
    }
    const place = PLACES[event.key];
    if (place !== undefined && event.timeStamp - goPressedAt < SEQUENCE_MS) location.hash = listHref(place);
    else if (event.key === "/") goToFilter();
    else if (event.key === "?") showKeys();
    else if (event.key === "v") /** @type {HTMLElement|null} */ (document.querySelector("[data-judge]"))?.click();
    else if (event.key === "t") /** @type {HTMLElement|null} */ (document.querySelector(".tabs [aria-current] + a") ?? document.querySelector(".tabs a"))?.click();
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
  if (!document.querySelector("dialog[open]")) /** @type {HTMLDialogElement} */ (part("keys")).showModal();
}
