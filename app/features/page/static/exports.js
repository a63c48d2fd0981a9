/** An export before it is made: how many rows, what is left out of it and why, and a link for each shape and format. */

import { get, url } from "./api.js";
import { copyCurl } from "./copy.js";
import { announce, bar, button, figure, folded, h, message, replace, scrollRegion, setText } from "./dom.js";
import { ExportForm, previewOf, SHAPES } from "./exportform.js";
import { compact, count } from "./format.js";
import { sessionHref, setQuery } from "./route.js";
import { View } from "./view.js";
import { visible } from "./visible.js";

/** @import {Example, ExportPreview, Missing} from "../ui_types.d.ts" */
/** @import {Values} from "./form.js" */
/** @import {Place} from "./view.js" */

/** So many sessions are looked at without asking; then the user says whether to go on. */
const AT_ONCE = 10_000;
const MOST_EXAMPLES = 20;

const CONTAINERS = ["ndjson", "parquet", "safetensors", "msgpack"];
const DOCUMENTS = ["messages", "atif"];
const NOTE =
  "Each link has the filters and options above; what a shape cannot hold is counted once it is chosen there.";

export class ExportsView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { query }) {
    super(root);
    this.totals = new PreviewTotals();
    /** @type {Values} */
    this.query = {};
    this.form = new ExportForm(this.closed, (values) => this.#open(values));
    this.progress = h("span", { role: "status" });
    this.stop = button("Stop", () => this.#stop(), { hidden: true });
    this.further = button("Look further", () => this.refresh(), { hidden: true });
    this.facts = h("div", { class: "facts" });
    this.missing = h("div", { class: "panel" });
    this.downloads = h("div", { class: "panel" });
    replace(
      root,
      h("h1", { class: "visually-hidden" }, "Exports"),
      this.form.box,
      bar(
        [this.progress, this.stop, this.further],
        [
          button("Count again", () => this.#open(this.query), { class: "quiet" }),
          copyCurl(() => ({ path: "/ui/api/exports", parameters: previewOf(this.query) })),
        ],
      ),
      this.problem,
      this.facts,
      h("div", { class: "panels" }, this.missing, this.downloads),
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
    replace(this.downloads, downloads(query));
    this.totals = new PreviewTotals();
    this.refresh();
  }

  /** Look at the next sessions, page by page, and add up. */
  refresh() {
    const { totals } = this;
    const until = totals.scanned + AT_ONCE;
    replace(this.problem);
    const request = async (/** @type {AbortSignal} */ signal) => {
      do {
        this.#show();
        const parameters = { ...previewOf(this.query), cursor: totals.cursor };
        totals.add(/** @type {ExportPreview} */ (await get("/ui/api/exports", parameters, signal)));
      } while (!totals.isComplete && totals.scanned < until);
    };
    return this.read(request, () => {
      announce(`${count(totals.rows)} rows`);
      this.#show();
    });
  }

  /** @param {unknown} error */
  onFailure(error) {
    super.onFailure(error);
    this.#show();
  }

  #stop() {
    this.requests.abort();
    this.#show();
  }

  #show() {
    const { totals } = this;
    const { isRunning } = this.requests;
    const sessions = `${count(totals.scanned)} sessions`;
    const end = totals.isComplete ? "all" : "so far";
    setText(this.progress, isRunning ? `Looking, ${sessions} …` : `${sessions} looked at: ${end}`);
    this.stop.hidden = !isRunning;
    this.further.hidden = isRunning || totals.isComplete;
    replace(this.facts, totals.isBegun && totals.figures());
    const reasons = totals.reasons();
    this.missing.hidden = !totals.isBegun;
    replace(
      this.missing,
      h("h2", null, "Not in it"),
      reasons.length ? reasonTable(reasons) : !isRunning && nothingMissing(totals),
    );
  }
}

/** The sums of several pages of the preview. */
class PreviewTotals {
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

  /** @param {ExportPreview} page */
  add(page) {
    this.isBegun = true;
    this.rows += page.rows;
    this.sessions += page.sessions;
    this.tokens += page.tokens;
    this.sampled += page.sampled_tokens;
    this.scanned += page.scanned;
    this.isComplete = page.complete;
    this.cursor = page.cursor;
    for (const { reason, count, examples } of page.missing) {
      const known = this.missing.get(reason);
      this.missing.set(reason, {
        reason,
        count: (known?.count ?? 0) + count,
        examples: [...(known?.examples ?? []), ...examples].slice(0, MOST_EXAMPLES),
      });
    }
  }

  /** @returns {Missing[]} the most frequent first */
  reasons() {
    return [...this.missing.values()].sort((a, b) => b.count - a.count);
  }

  figures() {
    const share = this.tokens ? ` (${Math.round((100 * this.sampled) / this.tokens)} %)` : "";
    /** @type {Record<string, string>} */
    const found = {
      Rows: count(this.rows),
      Sessions: count(this.sessions),
      Tokens: compact(this.tokens),
      Sampled: compact(this.sampled) + share,
      "Left out": count(this.reasons().reduce((sum, one) => sum + one.count, 0)),
    };
    return Object.entries(found).map(([label, value]) => figure(label, h("span", { class: "value" }, value)));
  }
}

/** @param {PreviewTotals} totals @returns {HTMLElement} */
function nothingMissing(totals) {
  if (totals.scanned) return h("p", { class: "muted" }, "Nothing that was looked at is left out.");
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
  const table = h("table", { class: "wraps" }, h("thead", null, h("tr", null, head)), h("tbody", null, lines));
  return scrollRegion("What is left out", table);
}

/** @param {Missing} missing @returns {HTMLElement} the first, and the others folded */
function examples({ reason, examples: found }) {
  const list = (/** @type {Example[]} */ some) => h("ul", { class: "plain" }, some.map((one) => example(one, reason)));
  const [first, ...rest] = found;
  return h("div", null, first && list([first]), rest.length > 0 && folded(`${rest.length} more`, list(rest)));
}

/** @param {Example} example @param {string} reason @returns {HTMLElement} */
function example({ session_id, segment, turn, detail }, reason) {
  return h(
    "li",
    null,
    h("a", { href: sessionHref(session_id) }, session_id),
    segment != null && `, segment ${segment}`,
    turn != null && `, turn ${turn}`,
    detail && detail !== reason && [", ", visible(detail)],
  );
}

/** @param {Values} query @returns {HTMLElement[]} */
function downloads(query) {
  const link = (/** @type {string} */ format, /** @type {string|null} */ shape) => {
    const label = `Download ${shape ? `${shape} as ${format}` : format}`;
    const href = url("/export", { ...query, format, shape });
    return h("a", { href, download: true, "aria-label": label }, format);
  };
  const shapes = SHAPES.map((shape) =>
    h("tr", null, h("th", { scope: "row" }, shape), CONTAINERS.map((format) => h("td", null, link(format, shape)))),
  );
  return [
    bar(h("h2", null, "Download"), copyCurl(() => ({ path: "/export", parameters: query }))),
    h("div", { class: "table-scroll" }, h("table", null, h("tbody", null, shapes))),
    h("p", null, "For reading, with rows of their own: ", DOCUMENTS.map((format) => [link(format, null), " "])),
    h("p", { class: "muted" }, NOTE),
  ];
}
