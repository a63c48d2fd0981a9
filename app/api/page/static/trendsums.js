/** Sums over time, added up from the pages of the server, and what is charted of them. */

import { iso } from "./format.js";

/** @import {TrendBucket} from "../ui_types.d.ts" */

/** As the server spells the bins of latencies: bin n ends at 2 ** (n / 4) milliseconds. */
const BINS_PER_DOUBLING = 4;
/** Engines and kinds of errors that get a line; the most frequent ones. */
const LINES = 6;

/** @typedef {{label: string, values: (number|null)[]}} Series a value a bucket; null: none */
/** @typedef {{name: string, title: string, unit: string, series: Series[]}} Chart */

export class TrendSums {
  constructor() {
    /** @type {Map<number|null, TrendBucket>} */
    this.buckets = new Map();
  }

  /** @param {TrendBucket[]} buckets */
  add(buckets) {
    for (const one of buckets) {
      const known = this.buckets.get(one.key);
      this.buckets.set(one.key, known ? sum(known, one) : one);
    }
  }

  /** @returns {TrendBucket[]} by time or version; that without a version is left out */
  get ordered() {
    const keyed = [...this.buckets.values()].filter((one) => one.key !== null);
    return keyed.sort((a, b) => Number(a.key) - Number(b.key));
  }
}

/** @param {TrendBucket} one @param {TrendBucket} other @returns {TrendBucket} */
function sum(one, other) {
  return {
    key: one.key,
    sessions: one.sessions + other.sessions,
    rewarded: one.rewarded + other.rewarded,
    reward_sum: one.reward_sum + other.reward_sum,
    reward_squares: one.reward_squares + other.reward_squares,
    reward_min: best(Math.min, one.reward_min, other.reward_min),
    reward_max: best(Math.max, one.reward_max, other.reward_max),
    session_turns: one.session_turns + other.session_turns,
    session_sampled: one.session_sampled + other.session_sampled,
    session_tokens: one.session_tokens + other.session_tokens,
    committed: one.committed + other.committed,
    versions: one.versions + other.versions,
    version_sum: one.version_sum + other.version_sum,
    version_max: best(Math.max, one.version_max, other.version_max),
    latency: counts(one.latency, other.latency),
    errors: counts(one.errors, other.errors),
    engines: engines(one.engines, other.engines),
  };
}

/** @param {(...values: number[]) => number} choose @param {...(number|null)} values @returns {number|null} */
function best(choose, ...values) {
  const known = values.filter((one) => one !== null);
  return known.length ? choose(...known) : null;
}

/** @param {Record<string, number>} one @param {Record<string, number>} other @returns {Record<string, number>} */
function counts(one, other) {
  const found = { ...one };
  for (const [name, value] of Object.entries(other)) found[name] = (found[name] ?? 0) + value;
  return found;
}

/** @param {TrendBucket["engines"]} one @param {TrendBucket["engines"]} other @returns {TrendBucket["engines"]} */
function engines(one, other) {
  const found = { ...one };
  for (const [name, [count, total]] of Object.entries(other)) {
    const [known, before] = found[name] ?? [0, 0];
    found[name] = [known + count, before + total];
  }
  return found;
}

/**
 * @param {Record<string, number>} latency a histogram
 * @param {number} share 0.5 for the median
 * @returns {number|null} milliseconds: the end of the bin that has it, at most 19 % too much
 */
export function percentile(latency, share) {
  const bins = Object.entries(latency).map(([bin, count]) => /** @type {const} */ ([Number(bin), count]));
  bins.sort((a, b) => a[0] - b[0]);
  const total = bins.reduce((all, [, count]) => all + count, 0);
  let passed = 0;
  for (const [bin, count] of bins) {
    passed += count;
    if (passed >= share * total) return 2 ** (bin / BINS_PER_DOUBLING);
  }
  return null;
}

/** @param {TrendBucket[]} buckets in their order @param {boolean} isByTime @returns {Chart[]} */
export function chartsOf(buckets, isByTime) {
  const mean = (/** @type {number} */ total, /** @type {number} */ count) => (count ? total / count : null);
  const series = (/** @type {string} */ label, /** @type {(one: TrendBucket) => number|null} */ value) => ({
    label,
    values: buckets.map(value),
  });
  const reward = [
    series("mean", (one) => mean(one.reward_sum, one.rewarded)),
    series("min", (one) => one.reward_min),
    series("max", (one) => one.reward_max),
    series("std. dev.", deviation),
  ];
  const tokens = [
    series("all", (one) => mean(one.session_tokens, one.sessions)),
    series("sampled", (one) => mean(one.session_sampled, one.sessions)),
  ];
  const latency = [
    series("p50", (one) => percentile(one.latency, 0.5)),
    series("p99", (one) => percentile(one.latency, 0.99)),
    ...most(buckets, (one) => Object.entries(one.engines).map(([name, [count]]) => [name, count])).map((engine) =>
      series(`mean of ${engine.replace(/^https?:\/\//, "")}`, (one) => {
        const [count, total] = one.engines[engine] ?? [0, 0];
        return mean(total, count);
      }),
    ),
  ];
  const kinds = most(buckets, (one) => Object.entries(one.errors));
  const errors = kinds.map((kind) => series(kind, (one) => one.errors[kind] ?? 0));
  /** @type {Chart[]} */
  const charts = [
    { name: "reward", title: "Reward", unit: "", series: reward },
    { name: "sessions", title: "Sessions", unit: "", series: [series("created", (one) => one.sessions)] },
    {
      name: "turns",
      title: "Turns a session",
      unit: "",
      series: [series("mean", (one) => mean(one.session_turns, one.sessions))],
    },
    { name: "tokens", title: "Tokens a session", unit: "", series: tokens },
    { name: "latency", title: "Engine latency", unit: "ms", series: latency },
    { name: "errors", title: "Errors by kind", unit: "", series: errors },
  ];
  if (isByTime) charts.splice(4, 0, { name: "staleness", title: "Staleness", unit: "versions", series: [staleness(buckets)] });
  return charts;
}

/** @param {TrendBucket} one @returns {number|null} of the population */
function deviation({ rewarded, reward_sum, reward_squares }) {
  if (!rewarded) return null;
  const average = reward_sum / rewarded;
  return Math.sqrt(Math.max(0, reward_squares / rewarded - average ** 2));
}

/**
 * The newest version that any turn had until then, less the mean version of the turns.
 * @param {TrendBucket[]} buckets
 * @returns {Series}
 */
function staleness(buckets) {
  let newest = 0;
  const values = buckets.map(({ versions, version_sum, version_max }) => {
    newest = Math.max(newest, version_max ?? 0);
    return versions ? newest - version_sum / versions : null;
  });
  return { label: "mean of the turns", values };
}

/**
 * @param {TrendBucket[]} buckets
 * @param {(one: TrendBucket) => [string, number][]} countsOf
 * @returns {string[]} the most frequent names
 */
function most(buckets, countsOf) {
  /** @type {Map<string, number>} */
  const totals = new Map();
  for (const one of buckets) {
    for (const [name, count] of countsOf(one)) totals.set(name, (totals.get(name) ?? 0) + count);
  }
  return [...totals].sort((a, b) => b[1] - a[1]).slice(0, LINES).map(([name]) => name);
}

/** @param {TrendBucket[]} buckets @param {boolean} isByTime @returns {string} all charts as one CSV, a line a bucket */
export function csvOf(buckets, isByTime) {
  const charts = chartsOf(buckets, isByTime);
  const columns = charts.flatMap(({ name, series }) => series.map((one) => ({ ...one, name: `${name} ${one.label}` })));
  const head = [isByTime ? "time" : "weight_version", ...columns.map((one) => one.name)];
  const lines = buckets.map(({ key }, index) => [
    isByTime ? iso(Number(key)) : String(key),
    ...columns.map((one) => String(one.values[index] ?? "")),
  ]);
  return [head, ...lines].map((line) => line.map(cell).join(",") + "\r\n").join("");
}

/** A name that begins like a formula is not run by a spreadsheet. @param {string} text @returns {string} */
function cell(text) {
  const safe = /^[=+@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
