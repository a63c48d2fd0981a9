/**
 * Text of agents and engines, made visible.
 *
 * All of it goes into text nodes. Characters that are invisible, move a terminal's cursor or turn the direction of the
 * text around them are shown by name, so that nothing looks like something else.
 */
import { button, h } from "./dom.js";

/** @import {Action} from "../ui_types.d.ts" */

/* Tab and line feed are shown as they are; a carriage return is odd unless a line feed follows.
   With the `u` flag a surrogate matches only without its other half. */
const ODD = new RegExp(
  [
    "[\\u0000-\\u0008\\u000b\\u000c\\u000e-\\u001f\\u007f-\\u009f]|\\r(?!\\n)", // controls
    "[\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]", // direction
    "[\\u00ad\\u200b\\u2028\\u2029\\u2060-\\u2065\\ufeff\\u{e0000}-\\u{e007f}]", // invisible
    "[\\ud800-\\udfff]",
  ].join("|"),
  "gu",
);

/** So many odd characters of one text are marked; further ones are only named. */
const MOST_MARKS = 500;

/** Characters of a long text that are shown at first, and how many more the button adds. */
const SHOWN = 2000;
/** Characters of a text that may scroll in its block, and so has to be reached by keys. */
const SCROLLS = 300;
const MORE = 200000;

/** Characters of a name that are shown. */
const NAMED = 300;

const CONTROLS = (
  "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI " +
  "DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US"
).split(" ");

/** @param {string} character @returns {string} its name among the control characters, or its code point */
function nameOf(character) {
  const code = character.codePointAt(0) ?? 0;
  if (code === 0x7f) return "DEL";
  return CONTROLS[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Children for an element. @param {string} text of any origin @returns {(string|Element)[]} */
export function visible(text) {
  /** @type {(string|Element)[]} */
  const parts = [];
  let end = 0;
  let marks = 0;
  for (const found of text.matchAll(ODD)) {
    if (found.index > end) parts.push(text.slice(end, found.index));
    const name = nameOf(found[0]);
    parts.push(
      marks++ < MOST_MARKS ? h("span", { class: "odd", title: "a character that cannot be seen" }, name) : name,
    );
    end = found.index + found[0].length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}

/** The same for a name, which has only a line: a long one is cut, and its length is added. @param {unknown} name */
export function named(name) {
  const text = String(name);
  if (text.length <= NAMED) return visible(text);
  return [...visible(text.slice(0, boundary(text, NAMED))), `… (${text.length} characters)`];
}

/** The same for attributes and titles, where no element can be. @param {string} text @param {(character: string) => string} [spell] */
export function visibleText(text, spell = nameOf) {
  return text.replace(ODD, spell);
}

/** @param {Action} action @returns {string} `bash: pytest -q`, or the text */
export function actionText({ tool, text }) {
  return visibleText(tool === null ? text : text ? `${tool}: ${text}` : tool);
}

/** @param {string} text @param {number} at @returns {number} `at`, or one more where it would split a character */
function boundary(text, at) {
  const code = text.charCodeAt(at - 1);
  return code >= 0xd800 && code < 0xdc00 ? at + 1 : at;
}

/** A block of text; a long one shows its beginning and its end, and between them a button for more. @param {string} text @param {string} [kind] a class */
export function textBlock(text, kind = "") {
  const block = (/** @type {string} */ part) => h("pre", { class: `text ${kind}`, dir: "auto", tabindex: text.length > SCROLLS ? "0" : null }, visible(part));
  if (text.length <= SHOWN * 1.5) return h("div", { class: "textblock" }, block(text));
  let shown = boundary(text, SHOWN / 2);
  const rest = boundary(text, text.length - SHOWN / 2);
  const [first, last] = [block(text.slice(0, shown)), block(text.slice(rest))];
  const label = () => (rest - shown > MORE ? `show ${MORE} more of` : "show all") + ` ${text.length} characters`;
  const more = button(label(), showMore, { class: "link" });
  return h("div", { class: "textblock" }, first, more, last);

  function showMore() {
    const to = Math.min(boundary(text, shown + MORE), rest);
    first.append(...visible(text.slice(shown, to)));
    shown = to;
    more.textContent = label();
    if (shown < rest) return;
    first.append(...last.childNodes);
    first.focus({ preventScroll: true });
    for (const one of [more, last]) one.remove();
  }
}

/** @param {string} text @returns {unknown} the object or list of which it is the JSON, else itself */
export function parsed(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" ? value : text;
  } catch (error) {
    if (error instanceof SyntaxError) return text;
    throw error;
  }
}

/** @param {string} text @returns {string} the same, indented, where it is JSON of an object or a list */
export function pretty(text) {
  const value = parsed(text);
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}
