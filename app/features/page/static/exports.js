/** An export before it is made: its first rows, how many there are, what is left out and why, and how to load it. */

import { get, lines, url } from "./api.js";
import { copyButton, curl } from "./copy.js";
import { announce, bar, button, failure, figure, folded, h, message, refill, replace, scrollRegion, setText } from "./dom.js";
import { exportForm } from "./exportform.js";
import { bytes, compact, count } from "./format.js";
import { sessionHref, setQuery } from "./route.js";
import { headerRow } from "./rows.js";
import { snippets } from "./snippets.js";
import { LatestRequest, View } from "./view.js";
import { visible } from "./visible.js";

/** @import {Child, Example, ExportPreview, Missing} from "../ui_types.d.ts" */
/** @import {Values} from "./form.js" */
/** @import {Place} from "./view.js" */
/** @typedef {Record<string, unknown>} Row */

/** So many sessions are looked at without asking; then the user says whether to go on. */
const AT_ONCE = 10_000;
const MOST_EXAMPLES = 20;
const FIRST_ROWS = 3;
/** Characters of a row; one that is longer is not shown. */
const MOST_READ = 8 << 20;
const MOST_SHOWN = 80;
const ENDS = 4;

const FORMATS = ["ndjson", "parquet", "safetensors", "msgpack"];
const DOCUMENTS = ["messages", "atif"];

export class ExportsView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { query }) {
    super(root);
    this.totals = new PreviewTotals();
    this.reading = new LatestRequest(this.closed);
    /** @type {Values} */
    this.query = {};
    /** Which code is shown. */
    this.loader = "";
    this.form = exportForm(this.closed, (values) => this.#open(values));
    this.progress = h("span", { role: "status" });
    this.stop = button("Stop", () => (this.requests.abort(), this.#show()), { hidden: true });
    this.further = button("Look further", () => this.refresh(), { hidden: true });
    this.facts = h("div", { class: "facts" });
    this.missing = h("div", { class: "panel" });
    this.load = h("div", { class: "panel" });
    this.first = h("div", { class: "panel" });
    const again = button("Count again", () => this.#open(this.query), { class: "quiet" });
    replace(
      root,
      h("h1", { class: "visually-hidden" }, "Exports"),
      this.form.box,
      bar([this.progress, this.stop, this.further], again),
      this.problem,
      this.facts,
      h("div", { class: "panels" }, this.load, this.missing),
      this.first,
    );
    this.onQuery(query);
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.#open(this.form.queryOf(query));
  }

  onFilterKey() {
    this.form.focus();
  }

  /** Changes are not followed: a count may take long. */
  onReset() {}

  /** @param {Values} query */
  #open(query) {
    this.query = query;
    setQuery(query);
    this.form.set(query);
    this.#showLoad();
    this.totals = new PreviewTotals();
    this.#readFirst();
    this.refresh();
  }

  /** Look at the next sessions, page by page, and add up. */
  refresh() {
    const { totals } = this;
    const until = totals.sum("scanned") + AT_ONCE;
    replace(this.problem);
    const request = async (/** @type {AbortSignal} */ signal) => {
      do {
        this.#show();
        const parameters = { ...this.query, cursor: totals.pages.at(-1)?.cursor };
        totals.pages.push(/** @type {ExportPreview} */ (await get("/ui/api/exports", parameters, signal)));
      } while (!totals.isComplete && totals.sum("scanned") < until);
    };
    return this.read(request, () => {
      announce(`${count(totals.sum("rows"))} rows`);
      this.#show();
    });
  }

  /** @param {unknown} error */
  onFailure(error) {
    super.onFailure(error);
    this.#show();
  }

  #show() {
    const { totals } = this;
    const { isRunning } = this.requests;
    const sessions = `${count(totals.sum("scanned"))} sessions`;
    const end = totals.isComplete ? "all" : "so far";
    setText(this.progress, isRunning ? `Looking, ${sessions} …` : `${sessions} looked at: ${end}`);
    this.stop.hidden = !isRunning;
    this.further.hidden = isRunning || totals.isComplete;
    replace(this.facts, totals.pages.length > 0 && totals.figures());
    const reasons = totals.reasons();
    this.missing.hidden = !totals.pages.length;
    replace(
      this.missing,
      h("h2", null, "Not in it"),
      reasons.length ? reasonTable(reasons) : !isRunning && nothingMissing(totals),
    );
  }

  /** The export itself, as far as its first rows. */
  #readFirst() {
    const { totals } = this;
    const limit = Math.min(FIRST_ROWS, Number(this.query.limit ?? FIRST_ROWS));
    this.reading.run(
      (signal) => Array.fromAsync(lines("/export", { ...this.query, limit }, signal, MOST_READ)),
      (read) => {
        const rows = read.map((line) => /** @type {Row} */ (JSON.parse(line)));
        totals.sample = read.filter((_, at) => !("excluded" in (rows[at] ?? {})));
        const none = h("p", { class: "muted" }, "There is no row, or the first one is too long to show.");
        replace(this.first, h("h2", null, "First rows"), rows.length ? rowTable(rows) : none);
        this.#show();
      },
      (error) => replace(this.first, failure(error, () => this.#readFirst())),
    );
  }

  #showLoad() {
    const shell = `${curl({ path: "/export", parameters: this.query })} -o rows.ndjson\n`;
    /** @type {Record<string, string>} */
    const made = { ...snippets(this.query, url("/").slice(0, -1)), curl: shell };
    const names = Object.keys(made);
    const chosen = names.find((name) => name === this.loader) ?? names[0] ?? "";
    const choose = (/** @type {string} */ name) => {
      this.loader = name;
      this.#showLoad();
    };
    const chip = (/** @type {string} */ name) => button(name, () => choose(name), { "aria-pressed": String(name === chosen) });
    const link = (/** @type {string} */ format) => {
      const href = url("/export", { ...this.query, format, shape: DOCUMENTS.includes(format) ? null : this.query.shape });
      return [h("a", { href, download: true }, format), " "];
    };
    const text = made[chosen] ?? "";
    refill(
      this.load,
      bar(h("h2", null, "Load"), copyButton(() => text, "Copy")),
      h("div", { class: "chips", role: "group", "aria-label": "Load with" }, names.map(chip)),
      h("pre", { class: "code", tabindex: "0", role: "region", "aria-label": `Code for ${chosen}` }, text),
      h("p", null, "Download as ", FORMATS.map(link), "or, for reading, with rows of their own, as ", DOCUMENTS.map(link)),
    );
  }
}

/** @param {Row[]} rows @returns {HTMLElement} a line a field: so a row of many fields is read from above */
function rowTable(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const lines = names.map((name) => {
    const cells = rows.map((row) => h("td", null, name in row && inShort(row[name])));
    return h("tr", null, h("th", { scope: "row" }, h("code", null, visible(name))), cells);
  });
  const columns = ["Field", ...rows.map((_, at) => `Row ${at + 1}`)].map((title) => ({ title }));
  return wrapped("First rows", columns, lines, "fields");
}

/** @param {unknown} value @returns {Child} its beginning; of a list its length and both ends */
function inShort(value) {
  const text = (/** @type {unknown} */ some, most = MOST_SHOWN) => {
    const isFraction = typeof some === "number" && !Number.isInteger(some);
    const whole = typeof some === "string" ? some : isFraction ? some.toPrecision(4) : JSON.stringify(some);
    return visible(whole.length > most ? `${whole.slice(0, most)} …` : whole);
  };
  if (!Array.isArray(value)) return h("code", null, text(value));
  const ends = value.length > 2 * ENDS ? [...value.slice(0, ENDS), "…", ...value.slice(-ENDS)] : value;
  const shown = ends.map((one, at) => [at > 0 && ", ", text(one, MOST_SHOWN / 4)]);
  return [h("span", { class: "muted" }, `${count(value.length)} × `), h("code", null, "[", shown, "]")];
}

/** What was counted: the pages of the preview, and their sums. */
class PreviewTotals {
  /** @type {ExportPreview[]} */
  pages = [];
  /** @type {string[]} the first rows */
  sample = [];

  /** @param {"rows"|"sessions"|"tokens"|"trained_tokens"|"scanned"} name */
  sum(name) {
    return this.pages.reduce((sum, page) => sum + page[name], 0);
  }

  get isComplete() {
    return this.pages.at(-1)?.complete ?? false;
  }

  /** @returns {Missing[]} what takes the most tokens first */
  reasons() {
    const byReason = Map.groupBy(this.pages.flatMap((page) => page.missing), ({ reason }) => reason);
    const reasons = [...byReason].map(([reason, some]) => ({
      reason,
      count: some.reduce((sum, one) => sum + one.count, 0),
      lost_tokens: some.reduce((sum, one) => sum + one.lost_tokens, 0),
      examples: some.flatMap((one) => one.examples).slice(0, MOST_EXAMPLES),
    }));
    return reasons.sort((a, b) => b.lost_tokens - a.lost_tokens || b.count - a.count);
  }

  /** Bytes as ndjson, by those of the first rows. @returns {string} */
  size() {
    const known = (this.pages[0]?.first_tokens ?? []).slice(0, this.sample.length).reduce((sum, tokens) => sum + tokens, 0);
    const share = this.sample.reduce((sum, line) => sum + line.length, 0) / known;
    return known ? `about ${bytes(share * this.sum("tokens"))}` : "–";
  }

  figures() {
    const [tokens, trained] = [this.sum("tokens"), this.sum("trained_tokens")];
    const share = tokens ? ` (${Math.round((100 * trained) / tokens)} %)` : "";
    /** @type {Record<string, string>} */
    const shown = {
      Rows: count(this.sum("rows")),
      Sessions: count(this.sum("sessions")),
      Tokens: compact(tokens),
      "Trained: in the loss": compact(trained) + share,
      "Lost: sampled, in no loss": compact(this.reasons().reduce((sum, one) => sum + one.lost_tokens, 0)),
      "Size as ndjson, an estimate by the first rows": this.size(),
    };
    return Object.entries(shown).map(([label, value]) => figure(label, h("span", { class: "value" }, value)));
  }
}

/** @param {PreviewTotals} totals @returns {HTMLElement} */
function nothingMissing(totals) {
  if (totals.sum("scanned")) return h("p", { class: "muted" }, "Nothing is left out of what was looked at.");
  const text = "Rows are made of sessions' committed turns: there are none yet, or none match the filters.";
  return message("empty", "No session was found.", h("p", null, text));
}

/** @param {Missing[]} reasons @returns {HTMLElement} */
function reasonTable(reasons) {
  const number = (/** @type {number} */ value) => h("td", { class: "number" }, count(value));
  const lines = reasons.map(({ reason, count: all, lost_tokens: lost, examples }) => {
    const list = (/** @type {Example[]} */ some) => h("ul", { class: "plain" }, some.map((one) => example(one, reason)));
    const [first, ...rest] = examples;
    const shown = [first && list([first]), rest.length > 0 && folded(`${rest.length} more`, list(rest))];
    return h("tr", null, h("th", { scope: "row" }, visible(reason)), number(lost), number(all), h("td", null, shown));
  });
  const columns = [{ title: "Reason" }, { title: "Lost tokens", number: true }, { title: "Times", number: true }, { title: "For example" }];
  return wrapped("What is left out", columns, lines);
}

/** @param {string} label @param {{title: string, number?: boolean}[]} columns @param {HTMLElement[]} lines @param {string} [kind] */
function wrapped(label, columns, lines, kind = "") {
  return scrollRegion(label, h("table", { class: `wraps ${kind}` }, h("thead", null, headerRow(columns)), h("tbody", null, lines)));
}

/** @param {Example} example @param {string} reason @returns {HTMLElement} */
function example({ session_id, segment, turn, detail }, reason) {
  const link = h("a", { href: sessionHref(session_id) }, session_id);
  const where = [segment != null && `, segment ${segment}`, turn != null && `, turn ${turn}`];
  return h("li", null, link, where, detail && detail !== reason && [", ", visible(detail.replace(`${reason}: `, ""))]);
}
