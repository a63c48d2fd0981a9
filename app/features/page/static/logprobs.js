/** The probabilities of tokens, as colours with a legend. */

import { h, replace } from "./dom.js";
import { count } from "./format.js";

/** @import {Token} from "../ui_types.d.ts" */

/** Lower ends of the classes, from likely to not; the last class has none. */
const ENDS = [Math.log(0.9), Math.log(0.5), Math.log(0.2), Math.log(0.05), Math.log(0.01), Math.log(0.001)];
const NAMES = ["90 % or more", "50 to 90 %", "20 to 50 %", "5 to 20 %", "1 to 5 %", "0.1 to 1 %", "under 0.1 %"];

/** @param {number} logprob @returns {number} its class, 0 for the likely ones */
export function classOf(logprob) {
  const found = ENDS.findIndex((end) => logprob >= end);
  return found < 0 ? ENDS.length : found;
}

/** Statistics of the tokens that were added. */
export class TokenStatistics {
  constructor() {
    this.classes = NAMES.map(() => 0);
    this.tokens = 0;
    this.sampled = 0;
    this.inLoss = 0;
    this.sum = 0;
    this.scored = 0;
  }

  /** @param {Token[]} tokens */
  add(tokens) {
    for (const [, sampled, lossMask, logprob] of tokens) {
      this.tokens += 1;
      this.sampled += sampled;
      this.inLoss += lossMask;
      if (!sampled || logprob === null) continue;
      this.scored += 1;
      this.sum += logprob;
      increment(this.classes, classOf(logprob));
    }
  }
}

/** @param {number[]} counts @param {number} index */
function increment(counts, index) {
  counts[index] = (counts[index] ?? 0) + 1;
}

/**
 * Fill an element with the legend and how many tokens each colour has, the sums.
 * @param {Element} element
 * @param {TokenStatistics} statistics
 * @param {string} what of which tokens
 */
export function showStatistics(element, statistics, what) {
  const { tokens, sampled, inLoss, scored } = statistics;
  const mean = scored ? statistics.sum / scored : null;
  replace(
    element,
    h(
      "table",
      { class: "scale" },
      h("caption", null, `Probability of a sampled token (${what})`),
      h(
        "thead",
        { class: "visually-hidden" },
        h("tr", null, h("th", { scope: "col" }, "probability"), h("th", { scope: "col" }, "tokens")),
      ),
      h(
        "tbody",
        null,
        NAMES.map((name, place) =>
          h(
            "tr",
            null,
            h("th", { scope: "row" }, h("span", { class: `swatch lp${place}`, "aria-hidden": "true" }), name),
            h("td", { class: "number" }, count(statistics.classes[place])),
          ),
        ),
      ),
    ),
    h(
      "ul",
      { class: "sums" },
      h("li", null, `${count(tokens)} tokens`),
      legendLine("prompt", `${count(tokens - sampled)} not sampled`),
      legendLine("lp1", `${count(sampled)} sampled`),
      legendLine("lp1 masked", `${count(sampled - inLoss)} sampled, not in the loss`),
      h(
        "li",
        null,
        mean === null ? "no logprob" : `mean logprob ${mean.toFixed(4)}, perplexity ${Math.exp(-mean).toFixed(3)}`,
      ),
    ),
  );
}

/** @param {string} kind how such a token looks @param {string} text */
function legendLine(kind, text) {
  return h("li", null, h("span", { class: `tok ${kind}`, "aria-hidden": "true" }, "abc"), ` ${text}`);
}
