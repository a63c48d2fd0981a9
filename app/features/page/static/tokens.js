/** A branch's tokens, as a trainer gets them: loss mask, logprobs, weight versions, and where each comes from. */

import { get } from "./api.js";
import { copyCurl } from "./copy.js";
import { badge, button, chip, h, message, replace } from "./dom.js";
import { count } from "./format.js";
import { classOf, showStatistics, TokenStatistics } from "./logprobs.js";
import { changeQuery, sessionHref, wholeNumber } from "./route.js";
import { CAUSES } from "./tree.js";
import { noSession, View } from "./view.js";
import { named, visibleText } from "./visible.js";

/** @import {Boundary, BranchTokens, SessionRow, Token, TokenPage} from "../ui_types.d.ts" */
/** @import {Place} from "./view.js" */

/** Tokens of a page, each an element. */
const PAGE = 2000;
/** Tokens that a key goes on; `#goTo` ends at the last one. @type {Record<string, number>} */
const STEPS = { ArrowRight: 1, ArrowLeft: -1, PageDown: PAGE, PageUp: -PAGE, End: Number.MAX_SAFE_INTEGER / 2 };
/** Boundaries between weight versions that get a button, and branches that get a link. */
const JUMPS = 40;

/** @param {string} text of one token @returns {string} with line breaks and tabs made visible, and the break kept */
function spelled(text) {
  return visibleText(text).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}

/** @param {Event} event @returns {HTMLElement|null} the token that it happened at */
function cellOf(event) {
  return event.target instanceof HTMLElement ? event.target.closest(".tok") : null;
}

/** @param {HTMLElement} cell @returns {number} the token's position */
function positionOf(cell) {
  return Number(cell.dataset.at);
}

export class TokensView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { id, query }) {
    super(root);
    this.id = id;
    this.path = `/ui/api/sessions/${encodeURIComponent(id)}/tokens`;
    /** @type {TokenPage|null} */
    this.page = null;
    this.title = h("div", { class: "panelhead" });
    this.branches = h("div", { class: "segments" });
    this.pager = h("div", { class: "panelhead" });
    this.statistics = h("div", { class: "counts" });
    this.detail = h(
      "p",
      { class: "tokendetail", id: "token-detail" },
      "Point at a token, or move with the arrow keys.",
    );
    this.cells = h("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
    this.#listen();
    replace(
      root,
      h(
        "div",
        { class: "session-view tokens-view" },
        h("section", { class: "panel" }, this.title, this.branches, this.statistics),
        h("section", { class: "panel" }, this.pager, this.problem, this.cells, this.detail),
      ),
    );
    this.onQuery(query);
  }

  /** @param {string} code */
  absent(code) {
    return code === "session_not_found" ? noSession(this.id) : null;
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    if (this.seq === null && rows.some((row) => row.session_id === this.id)) this.changed();
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.seq = wholeNumber(query.get("seq"), 1);
    this.branch = wholeNumber(query.get("branch"), 0);
    this.at = wholeNumber(query.get("at"), 0);
    this.start = wholeNumber(query.get("start"), 0) ?? (this.at === null ? 0 : this.at - (this.at % PAGE));
    this.refresh();
  }

  /** Go to a position, and to the page that has it. @param {number} at */
  #goTo(at) {
    this.at = Math.max(0, Math.min(Math.trunc(at) || 0, Math.max(0, (this.page?.total ?? 1) - 1)));
    const start = this.at - (this.at % PAGE);
    const isHere = start === this.start;
    this.start = start;
    this.#remember();
    if (isHere) this.#focusAt();
    else this.refresh();
  }

  #remember() {
    changeQuery({ start: this.start || null, at: this.at });
  }

  get #parameters() {
    return { seq: this.seq, branch: this.branch, start: this.start, limit: PAGE };
  }

  refresh() {
    return this.read(
      async (signal) => /** @type {TokenPage} */ (await get(this.path, this.#parameters, signal)),
      (page) => this.#show(page),
    );
  }

  /** @param {unknown} error */
  onFailure(error) {
    super.onFailure(error);
    this.#renderTitle();
  }

  /** @param {TokenPage} page */
  #show(page) {
    const { page: before } = this;
    this.page = page;
    replace(
      this.problem,
      page.error !== null && message("error", "These tokens cannot be shown", h("p", null, page.error)),
      page.error === null && page.total === 0 && message("empty", "No token is stored yet."),
    );
    this.#renderTitle();
    this.#renderPager(page);
    const isSame =
      before !== null &&
      before.branch === page.branch &&
      before.start === page.start &&
      before.tokens.length === page.tokens.length;
    if (isSame) return;
    this.#renderCells(page);
    const statistics = new TokenStatistics();
    statistics.add(page.tokens);
    showStatistics(this.statistics, statistics, `these ${count(page.tokens.length)} tokens`);
  }

  #renderTitle() {
    const { branches = [], branch } = this.page ?? {};
    const { seq } = this;
    replace(
      this.title,
      h("h1", null, "Tokens of ", h("a", { href: sessionHref(this.id, { seq, branch: this.branch }) }, named(this.id))),
      seq !== null && badge(`as of event ${seq}`, "warn"),
      h(
        "span",
        { class: "switches" },
        copyCurl(() => ({ path: this.path, parameters: this.#parameters })),
      ),
    );
    const reason = CAUSES[branches.find((one) => one.branch === branch)?.cause ?? ""];
    replace(
      this.branches,
      branches.length > 1 &&
        h(
          "nav",
          { class: "chips", "aria-label": "Branches" },
          branches.slice(0, JUMPS).map((one) => this.#branchLink(one, one.branch === branch)),
          branches.length >= JUMPS && h("label", null, "branch ", this.#branchField()),
        ),
      reason && h("p", { class: "note" }, `Branch ${branch} began because ${reason}.`),
    );
  }

  /** @param {BranchTokens} branch @param {boolean} isCurrent */
  #branchLink({ branch, cause, tokens, exported }, isCurrent) {
    const href = sessionHref(this.id, { seq: this.seq, branch, tab: "tokens" });
    const row = exported ? "" : ", no row";
    return chip(href, `branch ${branch}${cause ? `, ${cause}` : ""}: ${count(tokens)} tokens${row}`, isCurrent);
  }

  /** Where there are more branches than links. */
  #branchField() {
    const field = h("input", { type: "number", min: "0", class: "short", "aria-label": "branch" });
    field.addEventListener("change", () => (location.hash = sessionHref(this.id, { seq: this.seq, branch: field.value, tab: "tokens" })));
    return field;
  }

  /** @param {TokenPage} page */
  #renderPager({ total, start, tokens, boundaries, turns }) {
    const pageButton = (/** @type {number} */ to, /** @type {string} */ label) =>
      button(label, () => this.#goTo(to), { disabled: to < 0 || to >= total });
    const position = h("input", {
      type: "number",
      min: "0",
      max: String(Math.max(0, total - 1)),
      class: "short",
      "aria-label": "position",
    });
    position.addEventListener("change", () => this.#goTo(Number(position.value)));
    const turn = h("input", { type: "number", min: "1", class: "short", "aria-label": "turn" });
    turn.addEventListener("change", () => {
      const wanted = turns.find((one) => one.turn >= Number(turn.value));
      if (wanted) this.#goTo(wanted.start);
    });
    replace(
      this.pager,
      total > PAGE && [pageButton(start - PAGE, "previous"), pageButton(start + PAGE, "next")],
      h(
        "span",
        { class: "note" },
        total ? `${count(start)} to ${count(start + tokens.length - 1)} of ${count(total)}` : "",
      ),
      h("label", null, "position ", position),
      turns.length > 1 && h("label", null, "turn ", turn),
      boundaries.length > 0 &&
        h(
          "span",
          { class: "chips", role: "group", "aria-label": "Weight versions" },
          boundaries.slice(0, JUMPS).map((one) => this.#jumpButton(one)),
        ),
      boundaries.length > JUMPS && h("span", { class: "note" }, `and ${count(boundaries.length - JUMPS)} more`),
    );
  }

  /** @param {Boundary} boundary */
  #jumpButton({ at, version }) {
    return button(["weights ", named(version), ` from ${count(at)}`], () => this.#goTo(at), { class: "jump" });
  }

  /** @param {TokenPage} page */
  #renderCells({ tokens, start, versions, texts }) {
    const hadFocus = this.cells.contains(document.activeElement);
    let [lastTurn, lastVersion] = [-1, -1];
    /** @type {HTMLElement[]} */
    const parts = [];
    tokens.forEach((token, index) => {
      const [, sampled, , , version, turn] = token;
      if (turn !== lastTurn) parts.push(h("span", { class: "mark turnmark" }, `turn ${turn}`));
      lastTurn = turn;
      if (sampled && version >= 0 && version !== lastVersion) {
        parts.push(h("span", { class: "mark weightmark" }, "weights ", named(versions[version] ?? "?")));
        lastVersion = version;
      }
      parts.push(tokenCell(token, start + index, texts?.[index]));
    });
    replace(this.cells, parts);
    this.cells.querySelector(".tok")?.setAttribute("tabindex", "0");
    if (this.at !== null || hadFocus) this.#focusAt();
  }

  #listen() {
    /** @param {string} name @param {(cell: HTMLElement) => void} action */
    const on = (name, action) =>
      this.cells.addEventListener(name, (event) => {
        const cell = cellOf(event);
        if (cell) action(cell);
      });
    on("mouseover", (cell) => this.#explain(cell));
    on("focusin", (cell) => this.#focused(cell));
    on("click", (cell) => cell.focus());
    this.cells.addEventListener("keydown", (event) => {
      const cell = cellOf(event);
      if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
      const to = event.key === "Home" ? 0 : positionOf(cell) + (STEPS[event.key] ?? NaN);
      if (Number.isNaN(to)) return;
      event.preventDefault();
      this.#goTo(to);
    });
  }

  #focusAt() {
    const cell = this.cells.querySelector(`.tok[data-at="${this.at}"]`);
    if (!(cell instanceof HTMLElement)) return;
    cell.focus();
    cell.scrollIntoView({ block: "nearest" });
  }

  /** @param {HTMLElement} cell */
  #focused(cell) {
    const before = this.cells.querySelector('.tok[tabindex="0"]');
    before?.setAttribute("tabindex", "-1");
    before?.removeAttribute("aria-describedby");
    this.#explain(cell);
    cell.setAttribute("tabindex", "0");
    cell.setAttribute("aria-describedby", "token-detail");
    this.at = positionOf(cell);
    this.#remember();
  }

  /** @param {HTMLElement} cell */
  #explain(cell) {
    if (!this.page) return;
    const { tokens, texts, versions, start, columns } = this.page;
    const at = positionOf(cell);
    const token = tokens[at - start];
    if (!token) return;
    const [id, sampled, lossMask, logprob, version, turn] = token;
    const text = texts?.[at - start];
    replace(
      this.detail,
      h("strong", null, `position ${count(at)}`),
      ` · id ${id}`,
      text != null && [" · text ", h("code", null, named(JSON.stringify(text)))],
      ` · turn ${turn} · ${sampled ? "sampled" : "not sampled"}, ${lossMask ? "in the loss" : "not in the loss"}`,
      logprob !== null &&
        sampled > 0 &&
        ` · logprob ${logprob.toFixed(6)}, probability ${Math.exp(logprob).toPrecision(4)}`,
      version >= 0 && [" · weights ", named(versions[version] ?? "?")],
      Object.entries(columns).map(([name, values]) => [` · ${name} `, figure(values[at - start] ?? null)]),
    );
  }
}

/** @param {number|null} value of a column @returns {string} */
function figure(value) {
  if (value === null) return "–";
  return String(Number.isInteger(value) ? value : Number(value.toPrecision(7)));
}

/** @param {Token} token @param {number} position @param {string|null|undefined} text */
function tokenCell([id, sampled, lossMask, logprob], position, text) {
  const kind = sampled ? (logprob === null ? "sampled" : `lp${classOf(logprob)}`) : "prompt";
  return h(
    "span",
    {
      class: `tok ${kind}${sampled && !lossMask ? " masked" : ""}${text ? "" : " id"}`,
      role: "button",
      tabindex: "-1",
      dataset: { at: position },
    },
    text ? spelled(text) : id,
  );
}
