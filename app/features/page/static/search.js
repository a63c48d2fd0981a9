/** Search: messages, tool calls and results over all sessions; each hit leads to its turn. */

import { ApiError } from "./api.js";
import { copyCurl } from "./copy.js";
import { announce, badge, button, h, message, refill, replace, setText } from "./dom.js";
import { choice, chosen, field, numberField, QueryForm, textField } from "./form.js";
import { count, since } from "./format.js";
import { groupHref, sessionHref, setQuery } from "./route.js";
import { View } from "./view.js";
import { named, visible } from "./visible.js";

/** @import {Child, Place, SearchHit, SearchPage} from "../ui_types.d.ts" */
/** @import {Values} from "./form.js" */

const PAGE = 20;
const ROLES = ["system", "developer", "user", "assistant", "tool"];
/** The fields' names are the parameters of GET /search; these need no other. */
const ENOUGH = ["q", "role", "tool", "finish_reason"];

export class SearchView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { query }) {
    super(root);
    this.query = /** @type {Values} */ ({});
    this.hits = /** @type {SearchHit[]} */ ([]);
    this.cursor = /** @type {string|null} */ (null);
    this.form = new QueryForm(this.closed, (values) => this.#open(values), "input", fields());
    this.found = h("span", { role: "status" });
    this.list = h("ol", { class: "hits" });
    this.foot = h("div", { class: "foot" });
    this.fill("Search", this.found, copyCurl(() => ({ path: "/search", parameters: { ...this.query, limit: PAGE } })), this.list, this.foot);
    root.firstElementChild?.after(this.form.box);
    this.onQuery(query);
    this.onFilterKey();
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.#open(this.form.queryOf(query));
  }

  onFilterKey() {
    this.form.focus();
  }

  onReset() {}

  /** @param {Values} query */
  #open(query) {
    this.query = query;
    setQuery(query);
    this.form.set(query, document.activeElement);
    this.refresh();
  }

  refresh() {
    this.requests.abort();
    if (!ENOUGH.some((name) => this.query[name])) {
      this.hits = [];
      this.cursor = null;
      replace(this.problem);
      this.#show(null);
      return;
    }
    return this.#read(null);
  }

  /** @param {string|null} cursor */
  #read(cursor) {
    setText(this.found, "Searching …");
    const request = { path: "/search", parameters: { ...this.query, limit: PAGE, cursor } };
    return this.read(request, (/** @type {SearchPage} */ page) => {
      this.hits = cursor === null ? page.hits : [...this.hits, ...page.hits];
      this.cursor = page.next_cursor;
      announce(`${count(this.hits.length)} hits`);
      this.#show(page);
    });
  }

  /** @param {unknown} error */
  onFailure(error) {
    setText(this.found, "");
    replace(this.list);
    replace(this.foot);
    if (error instanceof ApiError && error.status === 404) {
      const how = h("p", null, "Start the server with ", h("code", null, "TURNLOG_FEATURES=all"), ".");
      replace(this.problem, message("empty", "Search is off.", how));
    } else super.onFailure(error);
  }

  /** @param {SearchPage|null} page null: nothing was searched for */
  #show(page) {
    const more = this.cursor ? " or more" : "";
    const word = this.hits.length === 1 ? "hit" : "hits";
    const behind = page && !page.is_current ? "; the index does not have the newest turns yet" : "";
    setText(this.found, page ? `${count(this.hits.length)}${more} ${word}, newest first${behind}` : "Give words, or fill a field.");
    refill(this.list, this.hits.map(hitItem));
    const next = this.cursor;
    refill(this.foot, next && button("Load more", () => this.#read(next)));
  }
}

function fields() {
  return h(
    "form",
    { class: "filters", role: "search", "aria-label": "Search messages" },
    field("Words", textField("q", { placeholder: 'refund "order 17" -test' })),
    field("Role", choice("role", ROLES)),
    field("Tool", textField("tool")),
    field("Finish reason", textField("finish_reason")),
    field("Metadata key=value", textField("metadata")),
    field("Status", choice("status", ["open", "closed"])),
    chosen("run"),
    field("Group", textField("group_id")),
    field("Group begins with", textField("group_prefix")),
    field("Attempt", numberField("attempt", { min: "0", step: "1" })),
    field("Engine", textField("engine")),
    field("Staleness from", numberField("min_staleness", { min: "0", step: "1", placeholder: "versions" })),
    field("Tag", textField("tag")),
  );
}

/** @param {SearchHit} hit @returns {HTMLElement} */
function hitItem(hit) {
  const { session_id, turn, role, tools, finish_reason, at, status, run, group_id } = hit;
  return h(
    "li",
    { class: "panel" },
    h(
      "p",
      { class: "who" },
      h("a", { href: sessionHref(session_id, { turn, brought: role === "tool" ? 1 : null }) }, named(session_id), ` turn ${turn}`),
      h("strong", null, named(role)),
      tools.map((tool) => h("code", null, named(tool))),
      badge(status),
      finish_reason !== null && h("span", { class: "note" }, named(finish_reason)),
      group_id !== null && h("a", { href: groupHref(group_id, run) }, named(group_id)),
      since(at),
    ),
    h("p", { class: "snippet", dir: "auto" }, marked(hit)),
  );
}

/** @param {SearchHit} hit @returns {Child} the snippet; its marks count characters, not UTF-16 units */
function marked({ snippet, marks }) {
  const characters = [...snippet];
  /** @type {Child[]} */
  const parts = [];
  let end = 0;
  for (const [from, to] of marks) {
    parts.push(visible(characters.slice(end, from).join("")), h("mark", null, visible(characters.slice(from, to).join(""))));
    end = to;
  }
  return [...parts, visible(characters.slice(end).join(""))];
}
