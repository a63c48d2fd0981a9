/** What was said of a turn or a session after it: its annotations, with who wrote them. */

import { fact, h } from "./dom.js";
import { bytes, count } from "./format.js";
import { named } from "./visible.js";

/** @import {Session} from "../ui_types.d.ts" */

/**
 * @param {string} _sessionId
 * @param {number|null} turn null: the session itself
 * @param {Session} session
 * @param {() => void} [_onWritten] one was written from here
 * @returns {HTMLElement|null}
 */
export function verdicts(_sessionId, turn, session, _onWritten) {
  const all = session.annotations[turn ?? 0] ?? [];
  const text = (/** @type {typeof all[number]} */ { value, dtype, length, size }) =>
    dtype ? `${count(length)} numbers, ${dtype}` : value === undefined ? bytes(size) : typeof value === "string" ? value : JSON.stringify(value);
  if (!all.length) return null;
  return h("dl", { class: "sessionfacts" }, all.map((one) => fact(one.name, [named(text(one)), one.writer && h("span", { class: "note" }, ` ${one.writer}`)])));
}
