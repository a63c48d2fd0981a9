/** Copying to the clipboard, also where the page did not come over TLS and a browser has no clipboard for it. */

import { announce, h } from "./dom.js";

const SAID_MS = 1500;

/**
 * A button that copies what `command` gives at that moment.
 * @param {() => string} command
 * @param {string} [label]
 * @returns {HTMLButtonElement}
 */
export function copyButton(command, label = "Copy as curl") {
  const button = h("button", { type: "button", class: "quiet" }, label);
  button.addEventListener("click", async () => {
    const isDone = await copy(command());
    button.textContent = isDone ? "Copied" : "Select and copy";
    announce(isDone ? "Copied" : "The command is shown");
    setTimeout(() => (button.textContent = label), SAID_MS);
  });
  return button;
}

/** @param {string} text @returns {Promise<boolean>} false: it is shown instead, selected */
async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
    }
  }
  show(text);
  return false;
}

/** @param {string} text */
function show(text) {
  const field = h("textarea", { readonly: true, rows: "6", "aria-label": "Command" });
  field.value = text;
  const dialog = h("dialog", null, field, h("form", { method: "dialog" }, h("button", null, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  field.select();
}
