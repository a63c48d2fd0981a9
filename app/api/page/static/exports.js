/** An export before it is made: how many rows, what is left out of it and why, and a link for each shape and format. */

import { curl, get, url } from "./api.js";
import { copyButton } from "./copy.js";
import { announce, compact, count, failure, h, message, replace, setText } from "./dom.js";
import { exportForm, previewOf, SHAPES, wishOf } from "./exportform.js";
import { sessionHref, setQuery } from "./route.js";
import { visible } from "./visible.js";

/** So many sessions are looked at by themselves; then the user says whether to go on. */
const AT_ONCE = 10_000;

const CONTAINERS = ["ndjson", "parquet", "safetensors", "msgpack"];
const DOCUMENTS = ["messages", "atif"];

/**
 * @typedef {{session_id: string, segment: number|null, turn: number|null, detail: string|null}} Example
 * @typedef {{reason: string, count: number, examples: Example[]}} Missing
 */

/**
 * @param {HTMLElement} root
 * @param {{query: URLSearchParams}} params
 */
export function view(root, params) {
  return new ExportsView(root, params.query);
}

class ExportsView {
  /** @param {HTMLElement} root @param {URLSearchParams} query */
  constructor(root, query) {
    this.request = new AbortController();
    this.tally = new Tally();
    /** @type {Record<string, string>} */
    this.wish = {};
    this.form = exportForm((wish) => this.#open(wish));
    this.bar = h("span", { role: "status" });
    this.stop = h("button", { type: "button", hidden: true, onclick: () => this.request.abort() }, "Stop");
    this.further = h("button", { type: "button", hidden: true, onclick: () => this.#count() }, "Look further");
    this.facts = h("div", { class: "facts" });
    this.problem = h("div");
    this.missing = h("div", { class: "panel" });
    this.downloads = h("div", { class: "panel" });
    const again = h("button", { type: "button", class: "quiet", onclick: () => this.#open(this.wish) }, "Count again");
    replace(
      root,
      h("h1", { class: "visually-hidden" }, "Exports"),
      this.form.element,
      h(
        "div",
        { class: "bar" },
        this.bar,
        this.stop,
        this.further,
        h("span", { class: "spacer" }),
        again,
        copyButton(() => curl("/ui/api/exports", previewOf(this.wish))),
      ),
      this.problem,
      this.facts,
      h("div", { class: "panels" }, this.missing, this.downloads),
    );
    this.onQuery(query);
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.#open(wishOf(query));
  }

  onFilterKey() {
    this.form.focus();
  }

  close() {
    this.request.abort();
  }

  /** @param {Record<string, string>} wish */
  #open(wish) {
    this.wish = wish;
    setQuery(wish);
    this.form.set(wish);
    replace(this.downloads, ...downloads(wish));
    this.tally = new Tally();
    this.#count();
  }

  /** Look at sessions, page by page, and add up. */
  async #count() {
    this.request.abort();
    const request = new AbortController();
    this.request = request;
    const until = this.tally.scanned + AT_ONCE;
    replace(this.problem);
    this.#show();
    try {
      do {
        const asked = { ...previewOf(this.wish), cursor: this.tally.cursor };
        this.tally.add(await get("/ui/api/exports", asked, request.signal));
        this.#show();
      } while (!this.tally.isComplete && this.tally.scanned < until);
      announce(`${count(this.tally.rows)} rows`);
    } catch (error) {
      if (this.request !== request) return;
      if (!request.signal.aborted) replace(this.problem, failure(error, () => this.#count()));
    }
    request.abort();
    this.#show();
  }

  #show() {
    const { tally } = this;
    const isRunning = !this.request.signal.aborted;
    const done = tally.isComplete ? "all" : "so far";
    setText(this.bar, isRunning ? `Looking, ${count(tally.scanned)} sessions …` : `${count(tally.scanned)} sessions looked at: ${done}`);
    this.stop.hidden = !isRunning;
    this.further.hidden = isRunning || tally.isComplete;
    replace(this.facts, tally.isBegun ? tally.facts() : []);
    const reasons = tally.reasons();
    const head = h("h2", null, "Not in it");
    this.missing.hidden = !tally.isBegun;
    replace(this.missing, head, reasons.length ? reasonTable(reasons) : !isRunning && nothingMissing(tally));
  }
}

/** What several pages of the preview say together. */
class Tally {
  constructor() {
    this.rows = 0;
    this.sessions = 0;
    this.tokens = 0;
    this.sampled = 0;
    this.scanned = 0;
    this.isBegun = false;
    this.isComplete = false;
    /** @type {string|null} */
    this.cursor = null;
    /** @type {Map<string, Missing>} */
    this.missing = new Map();
  }

  /** @param {any} page */
  add(page) {
    this.isBegun = true;
    this.rows += page.rows;
    this.sessions += page.sessions;
    this.tokens += page.tokens;
    this.sampled += page.sampled_tokens;
    this.scanned += page.scanned;
    this.isComplete = page.complete;
    this.cursor = page.cursor ?? null;
    for (const one of page.missing) {
      const known = this.missing.get(one.reason);
      if (!known) this.missing.set(one.reason, { ...one });
      else {
        known.count += one.count;
        known.examples = [...known.examples, ...one.examples].slice(0, 20);
      }
    }
  }

  /** @returns {Missing[]} the most frequent first */
  reasons() {
    return [...this.missing.values()].sort((a, b) => b.count - a.count);
  }

  /** @returns {HTMLElement[]} */
  facts() {
    const share = this.tokens ? ` (${Math.round((100 * this.sampled) / this.tokens)} %)` : "";
    /** @type {[string, string][]} */
    const found = [
      ["Rows", count(this.rows)],
      ["Sessions", count(this.sessions)],
      ["Tokens", compact(this.tokens)],
      ["Sampled", compact(this.sampled) + share],
      ["Left out", count(this.reasons().reduce((sum, one) => sum + one.count, 0))],
    ];
    return found.map(([label, value]) =>
      h("div", { class: "figure" }, h("span", { class: "label" }, label), h("span", { class: "value" }, value)),
    );
  }
}

/** @param {Tally} tally @returns {HTMLElement} */
function nothingMissing(tally) {
  if (tally.scanned) return h("p", { class: "muted" }, "Nothing that was looked at is left out.");
  const text = "A row is made of a session's committed turns: there is none yet, or the filters let none through.";
  return message("empty", "No session was found.", h("p", null, text));
}

/** @param {Missing[]} reasons @returns {HTMLElement} */
function reasonTable(reasons) {
  const head = ["Reason", "Rows", "For example"].map((title) =>
    h("th", { scope: "col", class: title === "Rows" ? "number" : null }, h("span", null, title)),
  );
  const lines = reasons.map((one) =>
    h(
      "tr",
      null,
      h("th", { scope: "row" }, visible(one.reason)),
      h("td", { class: "number" }, count(one.count)),
      h("td", null, examples(one)),
    ),
  );
  return h(
    "div",
    { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "What is left out" },
    h("table", { class: "wraps" }, h("thead", null, h("tr", null, head)), h("tbody", null, lines)),
  );
}

/** @param {Missing} missing @returns {HTMLElement} the first, and the others on demand */
function examples({ reason, examples: found }) {
  const items = found.map((one) => {
    const place = [
      one.segment != null && `segment ${one.segment}`,
      one.turn != null && `turn ${one.turn}`,
      one.detail && one.detail !== reason && visible(one.detail),
    ].filter(Boolean);
    return h("li", null, h("a", { href: sessionHref(one.session_id) }, one.session_id), place.map((part) => [", ", part]));
  });
  const [first, ...rest] = items;
  const more = rest.length > 0 && h("details", null, h("summary", null, `${rest.length} more`), h("ul", { class: "plain" }, rest));
  return h("div", null, first && h("ul", { class: "plain" }, first), more);
}

/** @param {Record<string, string>} wish @returns {HTMLElement[]} */
function downloads(wish) {
  const link = (/** @type {string} */ format, /** @type {string|null} */ shape) => {
    const name = shape ? `${shape} as ${format}` : format;
    return h("a", { href: url("/export", { ...wish, format, shape }), download: true, "aria-label": `Download ${name}` }, format);
  };
  const shapes = SHAPES.map((shape) =>
    h("tr", null, h("th", { scope: "row" }, shape), CONTAINERS.map((format) => h("td", null, link(format, shape)))),
  );
  return [
    h(
      "div",
      { class: "bar" },
      h("h2", null, "Download"),
      h("span", { class: "spacer" }),
      copyButton(() => curl("/export", wish)),
    ),
    h("div", { class: "table-scroll" }, h("table", null, h("tbody", null, shapes))),
    h("p", null, "For reading, with rows of their own: ", DOCUMENTS.map((format) => [link(format, null), " "])),
    h("p", { class: "muted" }, "Each link has the filters and options above; what a shape cannot hold is counted once it is chosen there."),
  ];
}
