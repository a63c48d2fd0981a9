/** What the colour of a token says: its class on a scale, and the legend with numbers. */

import { h } from "./dom.js";
import { count } from "./format.js";

/** @import {Scale} from "../ui_types.d.ts" */

/**
 * @param {Pick<Scale, "kind"|"edges">} scale
 * @param {number} value
 * @returns {number} 0 to 6: the more unlikely, uncertain or, of a column, high, the stronger its colour
 */
export function shadeOf({ kind, edges }, value) {
  const place = edges.filter((edge) => value >= edge).length;
  return kind === "logprob" ? edges.length - place : edges.length ? place : 3;
}

/** @param {number} value @returns {string} without the noise of binary fractions */
export function figure(value) {
  return String(Number(value.toPrecision(5)));
}

/** @param {number} logprob @returns {string} as a share */
export function share(logprob) {
  const percent = Math.exp(logprob) * 100;
  return `${percent >= 10 ? percent.toFixed(0) : Number(percent.toPrecision(2))} %`;
}

/** @param {Scale} scale @returns {HTMLElement[]} the classes with their tokens, the pale ones first */
export function legend(scale) {
  const { kind, edges, counts, mean } = scale;
  const items = counts.map((tokens, place) => {
    const [from, to] = [edges[place - 1], edges[place]].map(
      (edge) => edge !== undefined && (kind === "logprob" ? share(edge) : figure(edge)),
    );
    const range = from ? (to ? `${from} – ${to}` : `≥ ${from}`) : to ? `< ${to}` : figure(mean);
    const shade = shadeOf(scale, edges[place - 1] ?? -Infinity);
    const swatch = h("span", { class: `swatch lp${shade}`, "aria-hidden": "true" });
    return h("li", null, swatch, range, h("strong", null, count(tokens)));
  });
  return kind === "logprob" ? items.reverse() : items;
}
