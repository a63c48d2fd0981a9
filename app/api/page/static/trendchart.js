/** A chart over time with uPlot, and the same numbers as a table. */

import { url } from "./api.js";
import { folded, h, panel, scrollRegion } from "./dom.js";
import { clock, decimal } from "./format.js";
import { visibleText } from "./visible.js";

/** @import {TrendBucket, UPlot, UPlotChart} from "../ui_types.d.ts" */
/** @import {Chart} from "./trendsums.js" */

const HEIGHT_PX = 200;
const COLOURS = 8;
/** Rows of the table; the newest ones. */
const ROWS = 200;

const DAY = 86_400;
/**
 * How uPlot labels the axis of times, by the distance of two marks in seconds: each of them, and what is added below where
 * the year, the day or the minute begins. Times have 24 hours, as everywhere on the page.
 */
const TIMES = [
  [365 * DAY, "{YYYY}", null, null, null, null, null, null, 1],
  [28 * DAY, "{MMM}", "\n{YYYY}", null, null, null, null, null, 1],
  [DAY, "{D} {MMM}", "\n{YYYY}", null, null, null, null, null, 1],
  [60, "{HH}:{mm}", "\n{D} {MMM} {YYYY}", null, "\n{D} {MMM}", null, null, null, 1],
  [1, ":{ss}", "\n{D} {MMM} {YYYY} {HH}:{mm}", null, "\n{D} {MMM} {HH}:{mm}", null, "\n{HH}:{mm}", null, 1],
];

/** @type {Promise<UPlot>|undefined} loaded for the first chart */
let loading;

/** @returns {Promise<UPlot>} */
export function loadPlot() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: url("/ui/static/uPlot.iife.min.js") });
    script.addEventListener("load", () => resolve(/** @type {any} */ (window).uPlot));
    script.addEventListener("error", () => reject(new Error("uPlot was not loaded")));
    document.head.append(script);
  });
  return loading;
}

/** @param {Element} root @param {string} name @returns {string} a colour of the theme that is shown now */
function colour(root, name) {
  const probe = h("span", { class: name, hidden: true });
  root.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Charts side by side, drawn anew when they are shown, resized, or the theme changes. */
export class TrendCharts {
  /** @param {AbortSignal} closed */
  constructor(closed) {
    this.element = h("div", { class: "trendcharts" });
    /** @type {{plot: UPlotChart, box: HTMLElement}[]} */
    this.sized = [];
    /** @type {() => void} */
    this.again = () => {};
    this.drawn = 0;
    this.sizes = new ResizeObserver(() => this.#fit());
    const theme = new MutationObserver(() => this.again());
    theme.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.again(), { signal: closed });
    closed.addEventListener("abort", () => {
      theme.disconnect();
      this.sizes.disconnect();
      this.#destroy();
    });
    this.closed = closed;
  }

  /** @param {Chart[]} charts @param {TrendBucket[]} buckets @param {boolean} isByTime */
  async show(charts, buckets, isByTime) {
    this.again = () => this.show(charts, buckets, isByTime);
    const number = ++this.drawn;
    const Plot = await loadPlot();
    if (this.closed.aborted || number !== this.drawn) return;
    const open = new Set([...this.element.querySelectorAll("details[open]")].map((one) => one.getAttribute("data-key")));
    this.#destroy();
    const keys = buckets.map((one) => Number(one.key));
    const boxes = charts.map((chart) => {
      const box = h("div", { class: "trendplot", role: "img", "aria-label": described(chart) });
      const table = folded("As a table", tableOf(chart, buckets, isByTime));
      table.dataset.key = chart.name;
      if (open.has(chart.name)) table.setAttribute("open", "");
      const unit = chart.unit && h("span", { class: "note" }, chart.unit);
      const isEmpty = !chart.series.some((one) => one.values.some((value) => value !== null));
      return { chart, box, isEmpty, element: panel(`trend-${chart.name}`, chart.title, unit, isEmpty ? h("p", { class: "note" }, "None.") : box, !isEmpty && table) };
    });
    this.element.replaceChildren(...boxes.map((one) => one.element));
    for (const { chart, box, isEmpty } of boxes) {
      if (isEmpty) continue;
      const plot = new Plot(this.#options(chart, box, isByTime), [keys, ...chart.series.map((one) => one.values)], box);
      this.sized.push({ plot, box });
      this.sizes.observe(box);
    }
  }

  /** @param {Chart} chart @param {HTMLElement} box @param {boolean} isByTime */
  #options(chart, box, isByTime) {
    const [text, line] = [colour(this.element, "muted"), colour(this.element, "trendline")];
    const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui" };
    return {
      width: Math.max(200, box.clientWidth),
      height: HEIGHT_PX,
      scales: { x: { time: isByTime, range: isByTime ? timeRange : versionRange } },
      axes: [isByTime ? { ...axis, values: TIMES } : axis, { ...axis, size: 56 }],
      legend: { live: true },
      cursor: { drag: { x: true, y: false } },
      series: [
        isByTime ? { value: "{D} {MMM} {YYYY}, {HH}:{mm}" } : { label: "Weights" },
        ...chart.series.map((one, index) => ({
          label: visibleText(one.label),
          stroke: colour(this.element, `trend${index % COLOURS}`),
          width: index === 0 ? 2 : 1.5,
          points: { show: one.values.length < 60, size: 5 },
          spanGaps: true,
          value: (/** @type {unknown} */ _, /** @type {number|null} */ value) => decimal(value),
        })),
      ],
    };
  }

  #fit() {
    for (const { plot, box } of this.sized) plot.setSize({ width: Math.max(200, box.clientWidth), height: HEIGHT_PX });
  }

  #destroy() {
    for (const { plot } of this.sized) plot.destroy();
    this.sized = [];
    this.sizes.disconnect();
  }
}

/**
 * A single value has an hour on both sides; uPlot would give it three years.
 * @param {{data: [number[]]}} plot @param {number} least @param {number} most
 */
function timeRange({ data: [times] }, least, most) {
  const only = times.length === 1 ? times[0] : undefined;
  return only === undefined ? [least, most] : [only - 3600, only + 3600];
}

/** @param {unknown} _ @param {number} least @param {number} most */
function versionRange(_, least, most) {
  return least === most ? [least - 1, most + 1] : [least, most];
}

/** @param {Chart} chart @returns {string} for those who do not see it */
function described({ title, unit, series }) {
  const parts = series.map(({ label, values }) => {
    const known = values.filter((one) => one !== null);
    if (!known.length) return `${label} none`;
    return `${label} from ${decimal(Math.min(...known))} to ${decimal(Math.max(...known))}, last ${decimal(known.at(-1))}`;
  });
  return visibleText(`${title}${unit && ` in ${unit}`}: ${parts.join("; ")}`);
}

/** @param {Chart} chart @param {TrendBucket[]} buckets @param {boolean} isByTime */
function tableOf({ title, series }, buckets, isByTime) {
  const first = Math.max(0, buckets.length - ROWS);
  const head = [isByTime ? "From" : "Weights", ...series.map((one) => visibleText(one.label))];
  return scrollRegion(
    `${title} as a table`,
    h(
      "table",
      { class: "small" },
      h("thead", null, h("tr", null, head.map((one) => h("th", { scope: "col" }, h("span", null, one))))),
      h(
        "tbody",
        null,
        buckets.slice(first).map(({ key }, index) =>
          h(
            "tr",
            null,
            h("th", { scope: "row" }, isByTime ? clock(Number(key)) : String(key)),
            series.map(({ values }) => h("td", { class: "number" }, decimal(values[first + index]))),
          ),
        ),
      ),
    ),
  );
}
