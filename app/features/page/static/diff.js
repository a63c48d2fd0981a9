/** The difference of two texts, by words, of long ones by lines; and of two rollouts, in words. */

import { actionText, visibleText } from "./visible.js";

/** @import {Mark, Rollout} from "../ui_types.d.ts" */
/** @typedef {{kind: "same"|"removed"|"added", text: string}} Part of the texts, in order */
/**
 * @typedef {object} Divergence where a rollout begins to differ from another
 * @property {number} step counted from 0
 * @property {"given"|"reply"} kind what came before the turn's reply, or the reply
 * @property {string} text in words
 */

/** Work of one comparison: words of one text times those of the other. */
const MOST = 2_000_000;

/**
 * @param {string} one
 * @param {string} other
 * @returns {Part[]} joined without what was added it is `one`, without what was removed `other`
 */
export function difference(one, other) {
  const words = (/** @type {string} */ text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s]/gu) ?? [];
  const whole = joined([
    { kind: "removed", text: one },
    { kind: "added", text: other },
  ]);
  return compare(words(one), words(other)) ?? compare(linesOf(one), linesOf(other)) ?? whole;
}

/** @param {string} text @returns {string[]} with their ends */
function linesOf(text) {
  return text.match(/[^\n]*\n|[^\n]+$/g) ?? [];
}

/** @param {string[]} one @param {string[]} other @returns {Part[]|null} null: too much work */
function compare(one, other) {
  let head = 0;
  while (head < one.length && head < other.length && one[head] === other[head]) head += 1;
  let tail = 0;
  const most = Math.min(one.length, other.length) - head;
  while (tail < most && one[one.length - 1 - tail] === other[other.length - 1 - tail]) tail += 1;
  const [left, right] = [one.slice(head, one.length - tail), other.slice(head, other.length - tail)];
  if (left.length * right.length > MOST) return null;
  return joined([
    { kind: "same", text: one.slice(0, head).join("") },
    ...middle(left, right),
    { kind: "same", text: one.slice(one.length - tail).join("") },
  ]);
}

/** By the longest common subsequence. @param {string[]} left @param {string[]} right @returns {Part[]} */
function middle(left, right) {
  const width = right.length + 1;
  const lengths = new Uint32Array((left.length + 1) * width);
  const at = (/** @type {number} */ i, /** @type {number} */ j) => lengths[i * width + j] ?? 0;
  for (let i = left.length - 1; i >= 0; i -= 1) {
    for (let j = right.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] =
        left[i] === right[j] ? at(i + 1, j + 1) + 1 : Math.max(at(i + 1, j), at(i, j + 1));
    }
  }
  /** @type {Part[]} */
  const parts = [];
  let [i, j] = [0, 0];
  while (i < left.length || j < right.length) {
    const [mine, theirs] = [left[i], right[j]];
    if (mine !== undefined && mine === theirs) {
      parts.push({ kind: "same", text: mine });
      i += 1;
      j += 1;
    } else if (mine !== undefined && (theirs === undefined || at(i + 1, j) >= at(i, j + 1))) {
      parts.push({ kind: "removed", text: mine });
      i += 1;
    } else {
      parts.push({ kind: "added", text: theirs ?? "" });
      j += 1;
    }
  }
  return parts;
}

/** @param {Part[]} parts @returns {Part[]} neighbours of one kind are one, empty ones are left out */
function joined(parts) {
  /** @type {Part[]} */
  const found = [];
  for (const part of parts) {
    const last = found.at(-1);
    if (!part.text) continue;
    if (last?.kind === part.kind) last.text += part.text;
    else found.push({ ...part });
  }
  return found;
}

/** Characters of a line that are quoted. */
const QUOTED = 80;

/**
 * @param {Rollout} one
 * @param {Rollout} other
 * @param {string} name of the other
 * @returns {Divergence|null} null: neither differs
 */
export function divergence(one, other, name) {
  const turns = Math.max(one.marks.length, other.marks.length);
  for (let step = 0; step < turns; step += 1) {
    const [mine, theirs] = [one.marks[step], other.marks[step]];
    if (mine?.mark === theirs?.mark) continue;
    const kind = mine && theirs && mine.given !== theirs.given ? "given" : "reply";
    const say = kind === "given" ? given : done;
    const [own, their] = firstUnequal(say(mine, step), say(theirs, step));
    return { step, kind, text: own === their ? `${own}, as ${name}, but goes on otherwise` : `${own} where ${name} ${their}` };
  }
  return null;
}

/** @param {string[]} own @param {string[]} their @returns {[string, string]} the first pair that differs */
function firstUnequal(own, their) {
  const at = own.findIndex((text, index) => text !== their[index]);
  const place = at < 0 ? Math.min(own.length, their.length - 1) : at;
  const last = (/** @type {string[]} */ texts) => texts[place] ?? "does no more";
  return [last(own), last(their)];
}

/** @param {Mark|undefined} mark @param {number} step @returns {string[]} */
function given(mark, step) {
  return (mark?.asked ?? []).map((line) => `${step ? "gets" : "is asked"} “${cut(line)}”`);
}

/** @param {Mark|undefined} mark @returns {string[]} */
function done(mark) {
  if (!mark) return ["has ended"];
  return mark.actions.map((action) => (action.tool === null ? `answers “${cut(action.text)}”` : `calls \`${cut(actionText(action))}\``));
}

/** @param {string} text @returns {string} */
function cut(text) {
  const line = visibleText(text);
  return line.length > QUOTED ? `${line.slice(0, QUOTED)} …` : line;
}
