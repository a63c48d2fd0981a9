/** How likely tokens were, as colours with a legend and as a histogram. */

import { count, h, replace, svg } from "./dom.js";

/** Lower ends of the classes, from likely to not; the last class has none. */
const ENDS = [Math.log(0.9), Math.log(0.5), Math.log(0.2), Math.log(0.05), Math.log(0.01), Math.log(0.001)];
const NAMES = ["90 % or more", "50 to 90 %", "20 to 50 %", "5 to 20 %", "1 to 5 %", "0.1 to 1 %", "under 0.1 %"];

/** Bars of the histogram, of half a nat each; what is below all of them is in the last one. */
const BARS = 24;
const NATS = 0.5;
const WIDTH = 240;
const HEIGHT = 72;

/** @param {number} logprob @returns {number} its class, 0 for the likely ones */
export function classOf(logprob) {
  const found = ENDS.findIndex((end) => logprob >= end);
  return found < 0 ? ENDS.length : found;
}

/** Counts of the tokens that were added. */
export class Counts {
  constructor() {
    this.classes = new Array(NAMES.length).fill(0);
    this.bars = new Array(BARS).fill(0);
    this.tokens = 0;
    this.sampled = 0;
    this.inLoss = 0;
    this.sum = 0;
    this.scored = 0;
  }

  /** @param {any[][]} tokens as the API gives them */
  add(tokens) {
    for (const [, sampled, mask, logprob] of tokens) {
      this.tokens += 1;
      this.sampled += sampled;
      this.inLoss += mask;
      if (!sampled || logprob === null) continue;
      this.scored += 1;
      this.sum += logprob;
      this.classes[classOf(logprob)] += 1;
      this.bars[Math.min(BARS - 1, Math.max(0, Math.floor(-logprob / NATS)))] += 1;
    }
  }
}

/** @param {Counts} counts @returns {SVGElement} */
function histogram(counts) {
  const most = Math.max(1, ...counts.bars);
  const width = WIDTH / BARS;
  const ends = `from 0 down to ${-BARS * NATS} and below`;
  const label = `Histogram of the logprobs of ${count(counts.scored)} sampled tokens, ${ends}`;
  return svg(
    "svg",
    { class: "histogram", viewBox: `0 0 ${WIDTH} ${HEIGHT + 14}`, role: "img", "aria-label": label },
    counts.bars.map((bar, place) => {
      const height = bar && Math.max(1, (HEIGHT * bar) / most);
      const where = { x: place * width + 0.5, y: HEIGHT - height, width: width - 1, height };
      const ends = `${-place * NATS} to ${place === BARS - 1 ? "below" : -(place + 1) * NATS}`;
      return svg(
        "rect",
        { ...where, class: `lp${classOf(-(place + 0.5) * NATS)}` },
        svg("title", null, `${ends}: ${count(bar)}`),
      );
    }),
    svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT + 0.5, y2: HEIGHT + 0.5, class: "axis" }),
    [0, 6, 12, 18, 24].map((place) => {
      const anchor = place === 0 ? "start" : place === BARS ? "end" : "middle";
      return svg(
        "text",
        { x: place * width, y: HEIGHT + 12, "text-anchor": anchor },
        place === 0 ? "0" : `−${place * NATS}`,
      );
    }),
  );
}

/**
 * Show counts in an element: the legend with how many tokens each colour has, the histogram, the sums.
 * @param {Element} element
 * @param {Counts} counts
 * @param {string} what they are of
 */
export function show(element, counts, what) {
  const mean = counts.scored ? counts.sum / counts.scored : null;
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
            h("td", { class: "number" }, count(counts.classes[place])),
          ),
        ),
      ),
    ),
    counts.scored > 0 && h("figure", null, histogram(counts), h("figcaption", null, "logprob, half a nat a bar")),
    h(
      "ul",
      { class: "sums" },
      h("li", null, `${count(counts.tokens)} tokens`),
      h(
        "li",
        null,
        h("span", { class: "tok prompt", "aria-hidden": "true" }, "abc"),
        ` ${count(counts.tokens - counts.sampled)} not sampled`,
      ),
      h("li", null, h("span", { class: "tok lp1", "aria-hidden": "true" }, "abc"), ` ${count(counts.sampled)} sampled`),
      h(
        "li",
        null,
        h("span", { class: "tok lp1 masked", "aria-hidden": "true" }, "abc"),
        ` ${count(counts.sampled - counts.inLoss)} sampled, not in the loss`,
      ),
      h(
        "li",
        null,
        mean === null ? "no logprob" : `mean logprob ${mean.toFixed(4)}, perplexity ${Math.exp(-mean).toFixed(3)}`,
      ),
    ),
  );
}
