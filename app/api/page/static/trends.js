/** The run over time: rewards, lengths, staleness, errors and latencies by the hour or by weight version. */

import { get } from "./api.js";
import { copyButtons } from "./copy.js";
import { announce, bar, button, h, message, replace, setText } from "./dom.js";
import { FilterForm, listQueryOf } from "./filters.js";
import { count } from "./format.js";
import { setQuery } from "./route.js";
import { loadPlot, TrendCharts } from "./trendchart.js";
import { chartsOf, csvOf, TrendSums } from "./trendsums.js";
import { View } from "./view.js";

/** @import {Overview, TrendPage} from "../ui_types.d.ts" */
/** @import {Values} from "./form.js" */
/** @import {Place} from "./view.js" */

/** So many sessions are looked at without asking, the newest; then the user says whether to go on. */
const AT_ONCE = 2_000;
const BY = { minute: "minute", hour: "hour", day: "day", weight_version: "weight version" };

export class TrendsView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { query }) {
    super(root);
    this.sums = new TrendSums();
    this.by = "hour";
    /** Did somebody choose the interval? */
    this.isChosen = false;
    /** Have the charts something of this interval and these filters? */
    this.isDrawn = false;
    /** @type {Values} */
    this.filters = {};
    this.charts = new TrendCharts(this.closed);
    loadPlot();
    this.form = new FilterForm(this.closed, (filters) => this.#open(filters, this.by));
    this.byField = h(
      "select",
      { "aria-label": "By" },
      Object.entries(BY).map(([value, text]) => h("option", { value }, text)),
    );
    this.byField.addEventListener("change", () => {
      this.isChosen = true;
      this.#open(this.filters, this.byField.value);
    });
    this.progress = h("span", { role: "status" });
    this.stop = button("Stop", () => this.#stop(), { hidden: true });
    this.further = button("Look further", () => this.#more(), { hidden: true });
    this.csv = button("Download CSV", () => this.#download(), { class: "quiet" });
    this.nothing = h("div");
    replace(
      root,
      h("h1", { class: "visually-hidden" }, "Over time"),
      this.form.box,
      bar(
        [h("label", null, "By ", this.byField), this.progress, this.stop, this.further],
        [
          button("Refresh", () => this.refresh(), { class: "quiet" }),
          this.csv,
          copyButtons(() => ({ path: "/ui/api/trends", parameters: { ...this.filters, by: this.by } })),
        ],
      ),
      this.problem,
      this.nothing,
      this.charts.element,
    );
    this.onQuery(query);
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    const { sort, order, columns, ...filters } = listQueryOf(query);
    const by = query.get("by") ?? "";
    this.isChosen = by in BY;
    this.#open(filters, by in BY ? by : "hour");
  }

  onFilterKey() {
    this.form.focus();
  }

  /** Changes are not followed: looking at many sessions may take long. */
  onReset() {}

  /** @param {Overview} overview */
  onOverview(overview) {
    this.form.setEngines(overview.engines.map((engine) => engine.url));
  }

  /** @param {Values} filters @param {string} by */
  #open(filters, by) {
    this.isDrawn = false;
    this.filters = filters;
    this.by = by;
    this.byField.value = by;
    setQuery({ ...filters, by: by === "hour" && !this.isChosen ? null : by });
    this.form.set({ ...filters, sort: "", order: "" });
    this.refresh();
  }

  refresh() {
    this.sums = new TrendSums();
    this.scanned = 0;
    this.total = 0;
    this.damaged = 0;
    this.isTotalExact = true;
    this.isCut = false;
    /** @type {string|null} */
    this.cursor = null;
    this.isComplete = false;
    return this.#more();
  }

  /** The next sessions, page by page. */
  #more() {
    const { sums } = this;
    const until = (this.scanned ?? 0) + AT_ONCE;
    const request = async (/** @type {AbortSignal} */ signal) => {
      do {
        this.#showProgress();
        const parameters = { ...this.filters, by: this.by, cursor: this.cursor };
        const page = /** @type {TrendPage} */ (await get("/ui/api/trends", parameters, signal));
        sums.add(page.buckets);
        this.#count(page);
        // The newest are shown as soon as they are there.
        if (!this.isDrawn && (this.isChosen || sums.ordered.length > 1)) await this.#show();
      } while (!this.isComplete && (this.scanned ?? 0) < until);
    };
    return this.read(request, () => {
      // A run that began within the hour would be one dot.
      if (!this.isChosen && this.by === "hour" && sums.ordered.length === 1) return this.#open(this.filters, "minute");
      announce(`${count(this.scanned)} sessions`);
      return this.#show();
    });
  }

  /** @param {TrendPage} page */
  #count(page) {
    this.scanned = (this.scanned ?? 0) + page.scanned;
    if (page.total !== null) {
      this.total = page.total;
      this.isTotalExact = page.total_is_exact;
    }
    this.damaged = (this.damaged ?? 0) + page.damaged;
    this.isCut ||= page.is_cut;
    this.cursor = page.cursor;
    this.isComplete = page.cursor === null;
  }

  /** @param {unknown} error */
  onFailure(error) {
    super.onFailure(error);
    this.#showProgress();
  }

  #stop() {
    this.requests.abort();
    this.#show();
  }

  #showProgress() {
    const { isRunning } = this.requests;
    const all = `${count(this.total)}${this.isTotalExact ? "" : "+"}`;
    const notes = [this.damaged && `${count(this.damaged)} events cannot be read`, this.isCut && "some turns are left out"];
    const text = [`${count(this.scanned)} of ${all} sessions, newest first`, ...notes.filter(Boolean)].join(", ");
    setText(this.progress, isRunning ? `Looking, ${text} …` : text);
    this.stop.hidden = !isRunning;
    this.further.hidden = isRunning || Boolean(this.isComplete);
  }

  get #isByTime() {
    return this.by !== "weight_version";
  }

  #show() {
    this.isDrawn = true;
    this.#showProgress();
    const buckets = this.sums.ordered;
    this.csv.disabled = !buckets.length;
    const why = this.scanned ? "Their turns have no weight version that is a number." : "No session matches.";
    replace(this.nothing, !buckets.length && message("empty", "There is nothing to chart.", h("p", null, why)));
    return this.charts.show(buckets.length ? chartsOf(buckets, this.#isByTime) : [], buckets, this.#isByTime);
  }

  #download() {
    const blob = new Blob([csvOf(this.sums.ordered, this.#isByTime)], { type: "text/csv" });
    const address = URL.createObjectURL(blob);
    const link = document.createElement("a");
    link.href = address;
    link.download = `turnlog-by-${this.by}.csv`;
    link.click();
    URL.revokeObjectURL(address);
  }
}
