/** Copying to the clipboard. Without TLS a browser gives no clipboard: the text is then shown, selected. */

import { announce, button, h, showDialog } from "./dom.js";

const SHOWN_MS = 1500;

/**
 * A button that copies what `command` returns when it is pressed.
 * @param {() => string} command
 * @param {string} [label]
 * @returns {HTMLButtonElement}
 */
export function copyButton(command, label = "Copy as curl") {
  const made = button(label, press, { class: "quiet" });
  return made;

  async function press() {
    const isDone = await copy(command());
    made.textContent = isDone ? "Copied" : "Select and copy";
    announce(isDone ? "Copied" : "The command is shown");
    setTimeout(() => (made.textContent = label), SHOWN_MS);
  }
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
  showDialog(null, field);
  field.select();
}
