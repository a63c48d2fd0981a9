/** Small charts as inline SVG. */

import { svg } from "./dom.js";
import { decimal } from "./format.js";
import { sessionHref } from "./route.js";

/** @import {Attempt} from "../ui_types.d.ts" */

const WIDE = 640;
const LEFT = 34;
const RIGHT = 20;
const DOT = 6;
const LANE = 15;
const MOST_LANES = 12;

/**
 * The rewards of a group on one axis. Each dot is a link to its session; dots of near values stand above each other.
 * @param {Attempt[]} attempts @param {{mean: number}|null} statistics
 */
export function rewardPlot(attempts, statistics) {
  const rewarded = attempts.filter((one) => one.reward !== null).sort((a, b) => Number(a.reward) - Number(b.reward));
  const axis = axisOf(rewarded.map((one) => Number(one.reward)));
  const lanes = lanesOf(rewarded.map((one) => axis.place(Number(one.reward))));
  const floor = 30 + Math.min(MOST_LANES, Math.max(2, ...lanes)) * LANE;
  const dots = rewarded.map((one, index) => {
    const height = floor - 12 - (lanes[index] ?? 0) * LANE;
    return dot(one, axis.place(Number(one.reward)), height);
  });
  const ticks = axis.ticks.map((value) => [
    svg("path", { class: "grid", d: `M${axis.place(value)} 18V${floor + 4}` }),
    svg("text", { x: axis.place(value), y: floor + 18, "text-anchor": "middle" }, Number(value.toPrecision(6))),
  ]);
  return svg(
    "svg",
    { class: "plot", viewBox: `0 0 ${WIDE} ${floor + 26}`, role: "group", "aria-label": "Rewards of the group's sessions" },
    ticks,
    svg("path", { class: "axis", d: `M${LEFT - 10} ${floor}H${WIDE - RIGHT + 10}` }),
    statistics && meanLine(axis.place(statistics.mean), floor, statistics.mean),
    dots,
  );
}

/** @param {number} x @param {number} floor @param {number} mean */
function meanLine(x, floor, mean) {
  const anchor = x > WIDE * 0.8 ? "end" : x < WIDE * 0.2 ? "start" : "middle";
  return svg(
    "g",
    null,
    svg("path", { class: "mean", d: `M${x} 16V${floor}` }),
    svg("text", { x, y: 11, "text-anchor": anchor }, `mean ${decimal(mean)}`),
  );
}

/** @param {Attempt} one @param {number} x @param {number} y */
function dot(one, x, y) {
  const name = `attempt ${one.attempt ?? "–"}: ${decimal(one.reward)} (${one.status}), ${one.session_id}`;
  const mark = svg("circle", { class: one.status === "open" ? "dot open" : "dot", cx: x, cy: Math.max(8, y), r: DOT });
  return svg("a", { href: sessionHref(one.session_id), "aria-label": name }, svg("title", null, name), mark);
}

const SMALL = { width: 340, height: 130, left: 48, right: 12, top: 8, bottom: 22 };

/**
 * A figure by weight version, as dots and the line through them. Its points are in the order of `x`.
 * @param {{x: number, y: number}[]} points @param {string} label @param {(value: number) => string} text of a value
 * @param {(value: number) => string} tick text of a round value
 */
export function versionPlot(points, label, text, tick) {
  const { width, height, left, right, top, bottom } = SMALL;
  const floor = height - bottom;
  const axis = axisOf(points.map(({ y }) => y), 3, floor, top);
  const [first, last] = [points[0]?.x ?? 0, points.at(-1)?.x ?? 0];
  const share = (/** @type {number} */ x) => (last === first ? 0.5 : (x - first) / (last - first));
  const across = (/** @type {number} */ x) => left + share(x) * (width - left - right);
  const places = points.map(({ x, y }) => ({ x: across(x), y: axis.place(y), name: `weights ${x}: ${text(y)}` }));
  const ticks = axis.ticks.map((value) => [
    svg("path", { class: "grid", d: `M${left} ${axis.place(value)}H${width - right}` }),
    svg("text", { x: left - 6, y: axis.place(value) + 4, "text-anchor": "end" }, tick(Number(value.toPrecision(6)))),
  ]);
  const anchor = (/** @type {number} */ x) => (first === last ? "middle" : x === first ? "start" : "end");
  const ends = [...new Set(points.length ? [first, last] : [])];
  return svg(
    "svg",
    { class: "plot trend", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${label} by weight version; the numbers are in the table below` },
    ticks,
    svg("path", { class: "line", d: places.map(({ x, y }, at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("") }),
    places.map(({ x, y, name }) => svg("circle", { class: "dot", cx: x, cy: y, r: points.length > 40 ? 2 : 3 }, svg("title", null, name))),
    ends.map((x) => svg("text", { x: across(x), y: height - 6, "text-anchor": anchor(x) }, x)),
  );
}

/** @param {number[]} values @param {number} [steps] about so many @param {number} [from] its ends in the picture @param {number} [to] */
function axisOf(values, steps = 5, from = LEFT, to = WIDE - RIGHT) {
  let low = Math.min(0, ...values);
  let high = Math.max(...values, low);
  if (low === high) high = low + 1;
  const raw = (high - low) / steps;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5].find((one) => one * power >= raw) ?? 10);
  low = Math.floor(low / step) * step;
  high = Math.ceil(high / step) * step;
  const ticks = Array.from({ length: Math.round((high - low) / step) + 1 }, (_, index) => low + index * step);
  const place = (/** @type {number} */ value) => from + ((value - low) / (high - low)) * (to - from);
  return { place, ticks };
}

/** How high each dot stands, so that none hides another. @param {number[]} places in order */
function lanesOf(places) {
  /** @type {number[]} the last place taken in each lane */
  const taken = [];
  return places.map((place) => {
    let lane = taken.findIndex((last) => place - last >= 2 * DOT + 1);
    if (lane < 0) lane = taken.length;
    taken[lane] = place;
    return lane;
  });
}
