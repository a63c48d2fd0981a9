/** How two rollouts differ, in words. */

import { actionText, visibleText } from "./visible.js";

/** @import {Mark, Rollout} from "../ui_types.d.ts" */
/**
 * @typedef {object} Divergence where a rollout begins to differ from another
 * @property {number} step counted from 0
 * @property {"given"|"reply"} kind what came before the turn's reply, or the reply
 * @property {string} text in words
 */

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
