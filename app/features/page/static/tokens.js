/** A branch's tokens, as a trainer gets them: what was sampled, the prompts folded, the least likely named. */

import { copyCurl } from "./copy.js";
import { button, failure, h, icon, message, refill, replace, svg } from "./dom.js";
import { count, ranges } from "./format.js";
import { isForPage } from "./keys.js";
import { figure, legend, shadeOf, share } from "./logprobs.js";
import { changeQuery, wholeNumber } from "./route.js";
import { LatestRequest, SessionPart } from "./view.js";
import { named, visibleText } from "./visible.js";

/** @import {Scale, Session, Share, Token, TokenPage, Tree, TurnRange, Unlikely} from "../ui_types.d.ts" */
/** @typedef {{token: Token, text: string|null, columns: Record<string, number|null>}} Known */

/** Sampled tokens in the document at a time, and tokens of a prompt that is opened. */
const [PAGE, PROMPT] = [2000, 2000];
/** Tokens that a key goes on. @type {Record<string, number>} */
const STEPS = { ArrowRight: 1, ArrowLeft: -1 };
/** The length of the bar of the whole row. */
const BAR = 1000;
const HINT = "Point at a token, or press u.";
/** How a turn ends that nobody asks about. */
const USUAL = new Set(["stop", "tool_calls", null]);

/** @param {TurnRange[]} turns @param {number} at @returns {number} sampled tokens before a position */
function sampledBefore(turns, at) {
  return turns.reduce((sum, one) => sum + Math.max(0, Math.min(one.end, at) - one.output_start), 0);
}

/** @param {TurnRange[]} turns @param {number} place @returns {number} the position behind `place` sampled tokens */
function positionOf(turns, place) {
  let left = place;
  for (const { start, output_start, end } of turns) {
    if (left < end - output_start) return left ? output_start + left : start;
    left -= end - output_start;
  }
  return turns.at(-1)?.end ?? 0;
}

/** @param {string} text of a token @returns {string} breaks, tabs and spaces alone are visible; a break is kept */
function spelled(text) {
  if (/^ +$/.test(text)) return text.replaceAll(" ", "␣");
  return visibleText(text).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}

/** @param {Share[]} shares @returns {number} */
function tokensOf(shares) {
  return shares.reduce((sum, one) => sum + one.tokens, 0);
}

/** @param {Scale} scale @returns {string} */
function keyOf({ kind, name }) {
  return kind === "column" ? `column ${name}` : kind;
}

/**
 * @param {Tree|null} tree
 * @param {number|null} turn
 * @returns {number|null} a branch that has the turn; null: that of the newest turn
 */
function branchWith(tree, turn) {
  const turns = new Map(tree?.turns.map((one) => [one.turn, one]));
  let last = tree?.branches.find((one) => one.branch === tree.main_branch)?.leaf ?? 0;
  while (last && last !== turn) last = turns.get(last)?.parent ?? 0;
  return last ? null : (turns.get(turn ?? 0)?.branch ?? null);
}

export class TokensTab extends SessionPart {
  /** @param {ConstructorParameters<typeof SessionPart>} given */
  constructor(...given) {
    super(...given);
    this.path += "/tokens";
    this.prompts = new LatestRequest(this.closed);
    /** @type {TokenPage|null} the row's turns and outline, and sampled tokens from `start` on */
    this.row = null;
    /** What is asked for: a branch (null: the newest turn's) after an event. @type {Record<string, number|null>} */
    this.place = { seq: null, branch: null };
    this.version = 0;
    this.start = 0;
    /** The token that has, or had last, the focus; also in the address. */
    this.at = wholeNumber(new URLSearchParams(location.hash.split("?")[1]).get("at"), 0);
    /** Of what the cells are. */
    this.drawn = "";
    this.scaleKey = "logprob";
    /** The tokens in the document, by position. @type {Map<number, Known>} */
    this.known = new Map();
    /** Opened prompts, by where they begin. @type {Map<number, TokenPage>} */
    this.opened = new Map();
    this.problem = h("div");
    this.head = h("div", { class: "tokenhead" });
    this.bar = h("div", { class: "minimap" });
    this.legend = h("ul", { class: "legend", "aria-label": "Legend" });
    this.pager = h("div", { class: "tokenhead" });
    this.cells = h("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
    this.detail = h("p", { class: "tokendetail", id: "token-detail" }, HINT);
    this.least = h("ol", { class: "least" });
    this.body = h(
      "div",
      { class: "tokenbody" },
      h("div", null, this.pager, this.cells, this.detail),
      h("section", null, h("h2", null, "Least likely ", h("kbd", null, "u"), " ", h("kbd", null, "U")), this.least),
    );
    this.element = h("div", { class: "tokens-tab" }, this.head, this.bar, this.legend, this.problem, this.body);
    this.#listen(this.closed);
  }

  /** @param {Session} session @param {{turn: number|null, branch: number|null, seq: number|null}} place */
  update(session, { turn, branch, seq }) {
    const wanted = branch ?? (this.#spanOf(turn) ? this.place.branch : branchWith(session.tree, turn));
    const isElsewhere = wanted !== this.place.branch || seq !== this.place.seq;
    const goal = turn === this.turn ? null : turn;
    Object.assign(this, { session, turn, place: { seq, branch: wanted } });
    if (!isElsewhere && this.version === session.seq) return this.#showTurn(goal);
    if (isElsewhere && this.version) {
      Object.assign(this, { at: null, start: 0, drawn: "" });
      this.opened.clear();
      replace(this.detail, HINT);
    }
    this.version = session.seq;
    return this.#read(() => (this.at === null ? this.#showTurn(goal) : this.#goTo(this.at)));
  }

  /** @param {LatestRequest} requests @param {object} wish @param {(page: TokenPage) => void} show */
  #get(requests, wish, show) {
    const again = () => this.#get(requests, wish, show);
    const request = { path: this.path, parameters: { ...this.place, ...wish } };
    return requests.run(request, show, (error) => replace(this.problem, failure(error, again)));
  }

  /** @param {() => void} [then] */
  #read(then) {
    const wish = { start: this.start, limit: PAGE, sampled: true, outline: true };
    return this.#get(this.requests, wish, (row) => {
      this.#show(row);
      then?.();
    });
  }

  /** @param {number|null} turn @returns {TurnRange|undefined} */
  #spanOf(turn) {
    return this.row?.turns.find((one) => one.turn === turn);
  }

  /** Scroll to a turn, and leave the focus where it is. @param {number|null} turn */
  #showTurn(turn) {
    const span = this.#spanOf(turn);
    const scroll = () => this.cells.querySelector(`[data-turn="${turn}"]`)?.scrollIntoView({ block: "start" });
    if (span) this.#turnTo(span.output_start, () => span !== this.row?.turns[0] && scroll());
  }

  /** Go to a sampled token. @param {number} at */
  #goTo(at) {
    this.at = at;
    this.#turnTo(at, () => this.#focusAt());
  }

  /** Read the tokens around a sampled one, if they are not shown. @param {number} at @param {() => void} then */
  #turnTo(at, then) {
    const turns = this.row?.turns ?? [];
    const start = positionOf(turns, Math.floor(sampledBefore(turns, at) / PAGE) * PAGE);
    if (start === this.start) return then();
    this.start = start;
    return this.#read(then);
  }

  /** @param {TokenPage} row */
  #show(row) {
    this.row = row;
    replace(
      this.problem,
      row.error !== null && message("error", "These tokens cannot be shown", h("p", null, row.error)),
      row.error === null && row.total === 0 && message("empty", "No tokens yet: the first turn has not committed."),
    );
    this.body.hidden = this.bar.hidden = this.legend.hidden = row.total === 0;
    this.#showHead(row);
    this.#showBar(row);
    refill(this.least, row.outline?.least.map((one) => this.#unlikely(one)));
    const drawn = JSON.stringify([row.branch, row.start, row.tokens.length, Object.keys(row.columns)]);
    if (this.drawn === drawn) return;
    this.drawn = drawn;
    this.known.clear();
    for (const page of [row, ...this.opened.values()]) this.#keep(page);
    this.#showCells();
  }

  /** @param {TokenPage} page */
  #keep({ tokens, texts, columns }) {
    tokens.forEach((token, index) => {
      const own = Object.entries(columns).map(([name, values]) => [name, values[index] ?? null]);
      const known = { token, text: texts?.[index] ?? null, columns: Object.fromEntries(own) };
      this.known.set(token[0], known);
    });
  }

  /** @param {TokenPage} row */
  #showHead({ branches, branch, outline, tokenizer, texts, total, turns, start, tokens }) {
    /** @param {string} name @param {(value: string) => void} choose @param {HTMLElement[]} options */
    const field = (name, choose, options) => {
      const select = h("select", { "aria-label": name }, options);
      select.addEventListener("change", () => choose(select.value));
      return h("label", null, name, " ", select);
    };
    const names = branches.map((one) => {
      const name = `${one.branch}: ${one.cause}, ${count(one.tokens)} tokens${one.exported ? "" : ", no row"}`;
      return h("option", { value: one.branch, selected: one.branch === branch }, name);
    });
    const scales = (outline?.scales ?? []).map((one) => {
      const name = { logprob: "probability", entropy: "entropy in nats", column: one.name }[one.kind];
      return h("option", { value: keyOf(one), selected: keyOf(one) === this.scaleKey }, name);
    });
    const recolour = (/** @type {string} */ key) => {
      this.scaleKey = key;
      this.#showLegend();
      this.#showCells();
    };
    const { sampled = 0, shares = [] } = outline ?? {};
    const byReason = [...Map.groupBy(shares, (one) => one.reason)];
    const sum = byReason.map(([why, some]) => `${count(tokensOf(some))} ${why}`).join(" + ");
    const setting = h("code", null, "TURNLOG_PAGE_TOKENIZER");
    refill(
      this.head,
      names.length > 1 && field("branch", (value) => this.pick(null, Number(value)), names),
      scales.length > 0 && field("colour", recolour, scales),
      h("span", { class: "note" }, `${count(total)} tokens · sampled ${count(tokensOf(shares))} = ${sum}`),
      copyCurl(() => ({ path: this.path, parameters: this.place })),
      !tokenizer && total > 0 && h("p", { class: "note" }, `${texts ? "Prompts" : "Tokens"} are ids: set `, setting, " to read them as text."),
    );
    this.#showLegend();
    const before = sampledBefore(turns, start);
    const turnTo = (/** @type {"left"|"right"} */ sign, /** @type {string} */ name, /** @type {number} */ place) => {
      const go = () => this.#goTo(this.#sampledFrom(positionOf(turns, place)));
      return button(icon(sign), go, { "aria-label": name, disabled: place < 0 || place >= sampled });
    };
    const shown = `${count(before + 1)} to ${count(before + tokens.length)} of ${count(sampled)} sampled`;
    refill(
      this.pager,
      sampled > PAGE && turnTo("left", "earlier tokens", before - PAGE),
      sampled > PAGE && h("span", { class: "note" }, shown),
      sampled > PAGE && turnTo("right", "later tokens", before + PAGE),
    );
  }

  /** @returns {Scale|undefined} that of the colours */
  get #scale() {
    const scales = this.row?.outline?.scales ?? [];
    return scales.find((one) => keyOf(one) === this.scaleKey) ?? scales[0];
  }

  #showLegend() {
    const scale = this.#scale;
    const item = (/** @type {string} */ kind, /** @type {string} */ text) =>
      h("li", null, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);
    const masked = new Set(this.row?.turns.flatMap((one) => one.masked ?? []));
    const mean = scale && `mean ${figure(scale.mean)}`;
    replace(
      this.legend,
      scale && legend(scale),
      mean && h("li", null, scale.kind === "logprob" ? `${mean} (perplexity ${figure(Math.exp(-scale.mean))})` : mean),
      masked.size > 0 && item("lp0 masked", `masked: ${[...masked].join("; ")}`),
      item("unlikelymark", "least likely"),
      this.#gone.length > 0 && item("undonemark", [...new Set(this.#gone.map((one) => one.reason))].join(", ")),
    );
  }

  /** What no row has, where this one would have it. @returns {Share[]} */
  get #gone() {
    return (this.row?.outline?.shares ?? []).filter((one) => one.at !== null);
  }

  /** @param {number} at @returns {number} the first sampled token from there on */
  #sampledFrom(at) {
    const span = this.row?.turns.find((one) => one.end > at && one.end > one.output_start);
    return span ? Math.max(at, span.output_start) : at;
  }

  /** The whole row; a click or a key goes to what was sampled there. @param {TokenPage} row */
  #showBar({ total, turns, outline, tokens, start }) {
    if (!total) return;
    const x = (/** @type {number} */ at) => Number(((at / total) * BAR).toFixed(2));
    const box = (/** @type {number} */ from, /** @type {number} */ to) =>
      `M${x(from)} 0H${Math.max(x(to), x(from) + 0.5)}V10H${x(from)}Z`;
    const sampled = (/** @type {boolean} */ inLoss) =>
      turns.map((one) => ((one.masked === null) === inLoss ? box(one.output_start, one.end) : "")).join("");
    const ticks = (/** @type {number[]} */ places) => places.map((at) => `M${x(at)} 0V10`).join("");
    const range = h("input", { type: "range", min: 0, max: total - 1, "aria-label": "place in the row" });
    range.value = String(this.at ?? start);
    range.addEventListener("change", () => this.#goTo(this.#sampledFrom(Number(range.value))));
    const parts = {
      inloss: sampled(true),
      outofloss: sampled(false),
      undonemark: ticks(this.#gone.map((one) => one.at ?? 0)),
      unlikelymark: ticks(outline?.least.map((one) => one.at) ?? []),
      onpage: box(start, (tokens.at(-1)?.[0] ?? total) + 1),
    };
    const paths = Object.entries(parts).map(([name, d]) => svg("path", { class: name, d }));
    const picture = { viewBox: `0 0 ${BAR} 10`, preserveAspectRatio: "none", "aria-hidden": "true" };
    refill(this.bar, svg("svg", picture, paths), range);
  }

  /** @param {Unlikely} token */
  #unlikely({ at, turn, logprob, id, text, before, after }) {
    const [scale] = this.row?.outline?.scales ?? [];
    const itself = h("mark", { class: scale && `lp${shadeOf(scale, logprob)}` }, text === null ? id : spelled(text));
    const said = h("code", null, spelled(before.slice(-14)), itself, spelled(after.slice(0, 24)));
    const head = h("span", { class: "note" }, `${share(logprob)} · turn ${turn}`);
    const isHere = at === this.at ? "true" : null;
    return h("li", null, button([head, said], () => this.#goTo(at), { dataset: { at }, "aria-current": isHere }));
  }

  #showCells() {
    const { row } = this;
    if (!row) return;
    const from = row.start;
    const to = row.tokens.length < PAGE ? row.total : (row.tokens.at(-1)?.[0] ?? 0) + 1;
    let version = -1;
    const cells = (/** @type {TurnRange} */ { masked }, /** @type {number} */ start, /** @type {number} */ end) => {
      const parts = [];
      for (let at = start; at < end; at += 1) {
        const known = this.known.get(at);
        if (!known) continue;
        const own = known.token[6];
        if (own >= 0 && own !== version) {
          parts.push(h("span", { class: "mark" }, "weights ", named(row.versions[own] ?? "?")));
          version = own;
        }
        parts.push(this.#cell(known, masked));
      }
      return parts;
    };
    const goneAt = (/** @type {number} */ place) => {
      const here = this.#gone.filter((one) => one.at === place);
      return here.map(({ reason, turns, tokens }) => `${reason} here: turn${turns.length > 1 ? "s" : ""} ${ranges(turns)}, ${count(tokens)} tokens`);
    };
    const shown = row.turns.filter((one) => one.end > from && one.start < to);
    const hadFocus = this.cells.contains(document.activeElement);
    replace(
      this.cells,
      shown.map((one) => {
        const prompt = this.opened.get(one.start)?.tokens.length ?? 0;
        const notes = [
          ...goneAt(one.start),
          one.masked && `masked: ${one.masked}`,
          one.trimmed > 0 && `${count(one.trimmed)} trimmed: the next prompt does not have them`,
          !USUAL.has(one.finish_reason) && `ends by ${one.finish_reason}`,
        ];
        return h(
          "section",
          { class: "turnrun", "aria-label": `turn ${one.turn}`, dataset: { turn: one.turn } },
          button(`turn ${one.turn}`, () => this.pick(one.turn, row.branch), { class: "mark turnmark" }),
          one.output_start > one.start && this.#fold(one, prompt),
          h("span", { class: "note" }, notes.filter(Boolean).join(" · ")),
          prompt > 0 && h("div", { class: "promptrun" }, cells(one, one.start, one.start + prompt)),
          h("div", null, cells(one, Math.max(one.output_start, from), Math.min(one.end, to))),
        );
      }),
      to === row.total && h("span", { class: "note" }, goneAt(to).join(" · ")),
    );
    this.cells.querySelector(".tok")?.setAttribute("tabindex", "0");
    if (hadFocus) this.#focusAt();
  }

  /** @param {TurnRange} span @param {number} shown tokens of its prompt */
  #fold({ start, output_start }, shown) {
    const length = output_start - start;
    const first = shown && shown < length ? `, the first ${count(shown)}` : "";
    const open = (/** @type {TokenPage} */ page) => {
      this.#keep(page);
      this.opened.set(start, page);
      this.#showCells();
    };
    const toggle = () => {
      if (!shown) return this.#get(this.prompts, { start, limit: Math.min(PROMPT, length) }, open);
      this.opened.delete(start);
      return this.#showCells();
    };
    const name = [icon(shown ? "down" : "play"), ` prompt, ${count(length)} tokens${first}`];
    return button(name, toggle, { class: "fold", "aria-expanded": String(shown > 0) });
  }

  /** @param {Known} known @param {string|null} why what its turn sampled is masked */
  #cell({ token: [at, id, sampled, lossMask, logprob, entropy], text, columns }, why) {
    const scale = this.#scale;
    const value = scale && { logprob, entropy, column: columns[scale.name] ?? null }[scale.kind];
    const isMasked = sampled > 0 && !lossMask;
    const shade = scale && value != null && !isMasked ? `lp${shadeOf(scale, value)}` : "";
    const kind = `tok ${shade} ${isMasked ? "masked" : sampled ? "" : "prompt"} ${text ? "" : "id"}`;
    const place = { role: "button", tabindex: "-1", title: isMasked && `masked: ${why}`, dataset: { at } };
    return h("span", { class: kind, ...place }, text ? spelled(text) : id);
  }

  /** @param {AbortSignal} closed */
  #listen(closed) {
    /** @param {string} name @param {(cell: HTMLElement, event: Event) => void} action */
    const on = (name, action) =>
      this.cells.addEventListener(name, (event) => {
        const cell = event.target instanceof HTMLElement ? event.target.closest(".tok") : null;
        if (cell instanceof HTMLElement) action(cell, event);
      });
    on("mousemove", (cell) => this.#explain(cell));
    on("focusin", (cell) => this.#focused(cell));
    on("click", (cell) => cell.focus());
    on("keydown", (cell, event) => {
      const all = [...this.cells.querySelectorAll(".tok")];
      const next = all[all.indexOf(cell) + (STEPS[/** @type {KeyboardEvent} */ (event).key] ?? NaN)];
      if (!(next instanceof HTMLElement)) return;
      event.preventDefault();
      next.focus();
    });
    const onKey = (/** @type {KeyboardEvent} */ event) => {
      if (!isForPage(event) || event.key.toLowerCase() !== "u" || !this.element.checkVisibility()) return;
      const places = (this.row?.outline?.least ?? []).map((one) => one.at).sort((a, b) => a - b);
      const here = this.at ?? -1;
      const next = event.key === "u" ? places.find((at) => at > here) : places.findLast((at) => at < here);
      const found = next ?? places.at(event.key === "u" ? 0 : -1);
      if (found !== undefined) this.#goTo(found);
    };
    document.addEventListener("keydown", onKey, { signal: closed });
  }

  #focusAt() {
    const cell = this.cells.querySelector(`.tok[data-at="${this.at}"]`);
    if (!(cell instanceof HTMLElement)) return;
    cell.focus({ preventScroll: true });
    cell.scrollIntoView({ block: "center" });
  }

  /** @param {HTMLElement} cell */
  #focused(cell) {
    const before = this.cells.querySelector('.tok[tabindex="0"]');
    before?.setAttribute("tabindex", "-1");
    before?.removeAttribute("aria-describedby");
    this.#explain(cell);
    cell.setAttribute("tabindex", "0");
    cell.setAttribute("aria-describedby", "token-detail");
    this.at = Number(cell.dataset.at);
    changeQuery({ at: this.at });
    this.least.querySelector("[aria-current]")?.removeAttribute("aria-current");
    this.least.querySelector(`[data-at="${this.at}"]`)?.setAttribute("aria-current", "true");
  }

  /** @param {HTMLElement} cell */
  #explain(cell) {
    const known = this.known.get(Number(cell.dataset.at));
    if (!known) return;
    const [at, id, sampled, , logprob, entropy, version, turn] = known.token;
    const masked = this.#spanOf(turn)?.masked;
    const use = sampled ? (masked ? `masked: ${masked}` : "trained") : "not sampled, not in the loss";
    replace(
      this.detail,
      h("strong", null, `position ${count(at)}`),
      ` · id ${id}`,
      known.text != null && [" · text ", h("code", null, named(JSON.stringify(known.text)))],
      ` · turn ${turn} · ${use}`,
      logprob !== null && ` · logprob ${logprob.toFixed(6)}, probability ${share(logprob)}`,
      entropy !== null && ` · entropy ${figure(entropy)}`,
      version >= 0 && [" · weights ", named(this.row?.versions[version] ?? "?")],
      Object.entries(known.columns).map(([name, value]) => [` · ${name} `, value === null ? "–" : figure(value)]),
    );
  }
}
