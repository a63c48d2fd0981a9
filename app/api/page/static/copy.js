/** Copying to the clipboard. Without TLS a browser gives no clipboard: the text is then shown, selected. */

import { curl, python } from "./commands.js";
import { announce, button, h, showDialog } from "./dom.js";

/** @import {Command} from "./commands.js" */

const SHOWN_MS = 1500;

/**
 * Buttons that copy a request as a command for a shell, and as Python.
 * @param {() => Command} request asked when one is pressed
 * @param {string} [what] is copied, where it is not what the view shows
 * @returns {HTMLElement}
 */
export function copyButtons(request, what = "") {
  const label = ["Copy", what, "as"].filter(Boolean).join(" ");
  return h(
    "span",
    { class: "copies" },
    copyButton(() => curl(request()), `${label} curl`),
    copyButton(() => python(request()), "Python", `${label} Python`),
  );
}

/**
 * A button that copies what `text` returns when it is pressed.
 * @param {() => string} text
 * @param {string} label
 * @param {string} [name] for those who do not see what it stands beside
 * @returns {HTMLButtonElement}
 */
export function copyButton(text, label, name) {
  const made = button(label, press, { class: "quiet", "aria-label": name });
  return made;

  async function press() {
    const isDone = await copy(text());
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
