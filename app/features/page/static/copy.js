/** Copying to the clipboard. Without TLS a browser gives no clipboard: the text is then shown, selected. */

import { access, url } from "./api.js";
import { announce, button, h, showDialog } from "./dom.js";
import { visibleText } from "./visible.js";

/** @import {Command} from "../ui_types.d.ts" */

const SHOWN_MS = 1500;

/**
 * A button that copies a request, asked when it is pressed, as a command for a shell.
 * @param {() => Command} request @param {string} [what] is copied, where it is not what the view shows
 */
export function copyCurl(request, what = "") {
  return copyButton(() => curl(request()), ["Copy", what, "as curl"].filter(Boolean).join(" "));
}

/** A button that copies what `text` returns when it is pressed. @param {() => string} text @param {string} label */
export function copyButton(text, label) {
  const made = button(label, press, { class: "quiet" });
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
  const field = h("textarea", { readonly: true, rows: "6", "aria-label": "Command" });
  field.value = text;
  showDialog(null, field);
  field.select();
  return false;
}

/** @param {Command} command @returns {string} for a POSIX shell; a body is a here-document */
export function curl({ path, parameters, body, method, engine }) {
  const parts = [method ? `curl -sS -X ${method}` : "curl -sS"];
  if (!engine && access.needsToken) parts.push('-H "Authorization: Bearer $TURNLOG_ADMIN_TOKEN"');
  parts.push(quoted(engine ? engine + path : url(path, parameters)));
  if (body === undefined) return parts.join(" ");
  parts.push("-H 'content-type: application/json' --data-binary @-");
  return `${parts.join(" ")} <<'TURNLOG'\n${escaped(JSON.stringify(body))}\nTURNLOG\n`;
}

/** @param {string} json @returns {string} with every character escaped that would not be seen */
function escaped(json) {
  return visibleText(json, (character) => {
    const units = Array.from({ length: character.length }, (_, at) => character.charCodeAt(at));
    return units.map((unit) => `\\u${unit.toString(16).padStart(4, "0")}`).join("");
  });
}

/** @param {string} text @returns {string} for a POSIX shell, whatever is in it */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
