/** Two branches side by side, from the first message on in which they differ. */

import { get } from "./api.js";
import { messageElement } from "./conversation.js";
import { badge, button, failure, h, panel, replace } from "./dom.js";
import { count } from "./format.js";
import { LatestRequest } from "./view.js";

/** @import {Entry, Transcript} from "../ui_types.d.ts" */

/** Messages of each branch in the document. */
const SHOWN = 100;

/** The comparison of two branches; hidden while there is none. */
export class Comparison {
  /** @param {AbortSignal} closed @param {string} sessionId @param {() => void} onEnd */
  constructor(closed, sessionId, onEnd) {
    this.sessionId = sessionId;
    this.path = `/ui/api/sessions/${encodeURIComponent(sessionId)}/conversation`;
    this.requests = new LatestRequest(closed);
    this.notes = h("p", { class: "note" });
    this.sides = h("div", { class: "sides" });
    const end = button("end", onEnd, { "aria-label": "end the comparison" });
    this.element = panel("compare-title", "Two branches", end, this.notes, this.sides);
    this.element.hidden = true;
  }

  /**
   * @param {number} seq as of this event
   * @param {number} one
   * @param {number|null} other null: nothing is compared
   */
  async update(seq, one, other) {
    this.element.hidden = other === null;
    if (other === null) {
      this.requests.abort();
      return;
    }
    const read = async (/** @type {number} */ branch, /** @type {AbortSignal} */ signal) =>
      /** @type {Transcript} */ (await get(this.path, { seq, branch }, signal));
    await this.requests.run(
      (signal) => Promise.all([read(one, signal), read(other, signal)]),
      (found) => this.#show([one, other], found),
      (error) => replace(this.sides, failure(error, () => this.update(seq, one, other))),
    );
  }

  /** @param {[number, number]} branches @param {[Transcript, Transcript]} found */
  #show(branches, found) {
    const [one, other] = found;
    const from = firstDifference(one, other);
    const after = alike(one, other, from);
    replace(
      this.notes,
      from === null
        ? "Their messages are equal."
        : [
            `Their first difference is message ${count(from)}`,
            after > 0 && `, after ${count(after)} equal characters`,
            from > 0 && "; the messages before it are equal",
            ".",
          ],
    );
    replace(
      this.sides,
      found.map((transcript, at) => side(branches[at] ?? 0, transcript, from, this.sessionId)),
    );
  }
}

/** @param {number} branch @param {Transcript} transcript @param {number|null} from @param {string} sessionId */
function side(branch, { messages, turn }, from, sessionId) {
  const rest = from === null ? [] : messages.filter((entry) => entry.index >= from);
  return h(
    "section",
    { "aria-label": `branch ${branch}` },
    h("h3", null, `Branch ${branch}`, h("span", { class: "note" }, ` up to turn ${turn}`)),
    h(
      "ol",
      { class: "conversation" },
      rest.slice(0, SHOWN).map((entry) => marked(entry, from, sessionId)),
    ),
    from !== null && !rest.length && h("p", { class: "note" }, badge("ends here", "warn")),
    rest.length > SHOWN && h("p", { class: "note" }, `${count(rest.length - SHOWN)} more`),
  );
}

/** @param {Entry} entry @param {number|null} from @param {string} sessionId */
function marked(entry, from, sessionId) {
  const element = messageElement(entry, sessionId);
  if (entry.index === from) {
    element.classList.add("differs");
    element.prepend(badge("first difference", "warn"));
  }
  return element;
}

/** @param {Transcript} one @param {Transcript} other @returns {number|null} the message's index; null: they are equal */
function firstDifference(one, other) {
  const [ours, theirs] = [byIndex(one), byIndex(other)];
  const ends = [...ours.keys(), ...theirs.keys()];
  const last = Math.max(-1, ...ends);
  for (let index = Math.max(one.omitted, other.omitted); index <= last; index += 1) {
    if (!isSame(ours.get(index), theirs.get(index))) return index;
  }
  return null;
}

/** @param {Transcript} transcript @returns {Map<number, Entry>} */
function byIndex({ messages }) {
  return new Map(messages.map((entry) => [entry.index, entry]));
}

/** @param {Entry|undefined} one @param {Entry|undefined} other @returns {boolean} */
function isSame(one, other) {
  if (!one || !other) return false;
  return one.turn === other.turn || withoutIds(one.message) === withoutIds(other.message);
}

/** @param {unknown} message @returns {string} many engines make the ids of calls at random: they are no difference */
function withoutIds(message) {
  return JSON.stringify(message, (name, value) => (name === "id" || name === "tool_call_id" ? undefined : value));
}

/** @param {Transcript} one @param {Transcript} other @param {number|null} index @returns {number} equal characters there */
function alike(one, other, index) {
  const [ours, theirs] = [one, other].map(({ messages }) => textOf(messages.find((entry) => entry.index === index)));
  if (ours == null || theirs == null) return 0;
  let at = 0;
  while (at < Math.min(ours.length, theirs.length) && ours[at] === theirs[at]) at += 1;
  return at;
}

/** @param {Entry|undefined} entry @returns {string|null} */
function textOf(entry) {
  const content = /** @type {{content?: unknown}|null|undefined} */ (entry?.message)?.content;
  return typeof content === "string" ? content : null;
}
