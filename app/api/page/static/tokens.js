/** A segment's tokens, as a trainer gets them: loss mask, logprobs, weight versions, and where each comes from. */

import { curl, get } from "./api.js";
import { copyButton } from "./copy.js";
import { badge, count, failure, h, message, replace, setText } from "./dom.js";
import { Counts, classOf, show } from "./logprobs.js";
import { sessionHref, setQuery, tokensHref } from "./route.js";
import { named, visibleText } from "./visible.js";

/** Tokens of a page, each an element. */
const PAGE = 2000;
/** Tokens that are read at a time to be counted, the most that the server gives. */
const COUNTED = 10000;
const REFRESH_MS = 1000;
/** Places that are offered to jump to. */
const JUMPS = 40;

const CAUSES = {
  drift: "the engine's prompt ids did not continue the stored ones",
  divergence: "the messages did not continue the history",
};

/** @param {string|null} text @param {number} least @returns {number|null} */
function wholeOf(text, least) {
  const value = Number(text);
  return text !== null && text !== "" && Number.isInteger(value) && value >= least ? value : null;
}

/** @param {string} text of one token @returns {string} with what breaks a line made visible, and the break kept */
function spelled(text) {
  return visibleText(text).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}

class TokensView {
  /** @param {HTMLElement} root @param {any} params */
  constructor(root, params) {
    this.id = params.id;
    this.path = `/ui/api/sessions/${encodeURIComponent(this.id)}/tokens`;
    /** @type {AbortController|null} */
    this.reading = null;
    this.closing = new AbortController();
    this.#take(params.query);
    this.title = h("div", { class: "panelhead" });
    this.segments = h("div", { class: "segments" });
    this.pager = h("div", { class: "panelhead" });
    this.notes = h("div", null);
    this.counts = h("div", { class: "counts" });
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
        h("section", { class: "panel" }, this.title, this.segments, this.counts),
        h("section", { class: "panel" }, this.pager, this.notes, this.cells, this.detail),
      ),
    );
    this.#read();
  }

  close() {
    this.closing.abort();
    this.reading?.abort();
    clearTimeout(this.waiting);
  }

  /** @param {any[]} rows sessions that changed */
  onSessions(rows) {
    if (this.seq !== null || this.waiting !== undefined || !rows.some((row) => row.session_id === this.id)) return;
    this.waiting = setTimeout(() => {
      this.waiting = undefined;
      this.#read();
    }, REFRESH_MS);
  }

  onReset() {
    this.#read();
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.#take(query);
    this.#read();
  }

  /** @param {URLSearchParams} query */
  #take(query) {
    this.seq = wholeOf(query.get("seq"), 1);
    this.segment = wholeOf(query.get("segment"), 0);
    this.at = wholeOf(query.get("at"), 0);
    this.start = wholeOf(query.get("start"), 0) ?? (this.at === null ? 0 : this.at - (this.at % PAGE));
  }

  /** Go to a position, and to the page that has it. @param {number} at */
  #goTo(at) {
    this.at = Math.max(0, Math.min(Math.trunc(at) || 0, Math.max(0, (this.found?.total ?? 1) - 1)));
    const start = this.at - (this.at % PAGE);
    const isHere = start === this.start;
    this.start = start;
    this.#remember();
    if (isHere) this.#focusAt();
    else this.#read();
  }

  #remember() {
    setQuery({ seq: this.seq, segment: this.segment, start: this.start || null, at: this.at });
  }

  get #parameters() {
    return { seq: this.seq, segment: this.segment, start: this.start, limit: PAGE };
  }

  async #read() {
    this.reading?.abort();
    const reading = new AbortController();
    this.reading = reading;
    let found;
    try {
      found = await get(this.path, this.#parameters, reading.signal);
    } catch (error) {
      if (reading.signal.aborted) return;
      replace(
        this.notes,
        failure(error, () => this.#read()),
      );
      this.#renderTitle();
      return;
    }
    const isSame =
      this.found &&
      this.found.segment === found.segment &&
      this.found.start === found.start &&
      this.found.tokens.length === found.tokens.length;
    this.found = found;
    replace(
      this.notes,
      found.error !== null && message("error", "These tokens cannot be shown", h("p", null, found.error)),
      found.error === null && found.total === 0 && message("empty", "No token is stored yet."),
    );
    this.#renderTitle();
    this.#renderPager();
    if (isSame) return;
    this.#renderCells();
    const counts = new Counts();
    counts.add(found.tokens);
    show(this.counts, counts, `these ${count(found.tokens.length)} tokens`);
    if (found.total > found.tokens.length) this.counts.append(this.#wholeButton());
  }

  #renderTitle() {
    replace(
      this.title,
      h("h1", null, "Tokens of ", h("a", { href: sessionHref(this.id, { seq: this.seq }) }, named(this.id))),
      this.seq !== null && badge(`as of event ${this.seq}`, "warn"),
      h(
        "span",
        { class: "switches" },
        copyButton(() => curl(this.path, this.#parameters), "Copy as curl"),
      ),
    );
    const segments = this.found?.segments ?? [];
    const own = segments.find((one) => one.segment === this.found?.segment);
    replace(
      this.segments,
      segments.length > 1 &&
        h(
          "nav",
          { class: "chips", "aria-label": "Segments" },
          segments.map((one) => this.#segmentLink(one)),
        ),
      own?.cause &&
        h(
          "p",
          { class: "note" },
          badge(own.cause, "warn"),
          ` Segment ${own.segment} began because ${CAUSES[own.cause] ?? own.cause}.`,
        ),
    );
  }

  #segmentLink(one) {
    const href = tokensHref(this.id, { seq: this.seq, segment: one.segment });
    const cause = one.cause ? `, ${one.cause}` : "";
    return h(
      "a",
      { href, "aria-current": one.segment === this.found.segment ? "true" : null },
      `segment ${one.segment}${cause}: ${count(one.tokens)} tokens`,
    );
  }

  #renderPager() {
    const { total, start, tokens, boundaries, turns } = this.found;
    const page = (to, label) =>
      h("button", { type: "button", disabled: to < 0 || to >= total, onclick: () => this.#goTo(to) }, label);
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
      total > PAGE && [page(start - PAGE, "previous"), page(start + PAGE, "next")],
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
          boundaries.slice(0, JUMPS).map((one) => this.#jump(one)),
        ),
      boundaries.length > JUMPS && h("span", { class: "note" }, `and ${count(boundaries.length - JUMPS)} more`),
    );
  }

  #jump(boundary) {
    return h(
      "button",
      { type: "button", class: "jump", onclick: () => this.#goTo(boundary.at) },
      "weights ",
      named(boundary.version),
      ` from ${count(boundary.at)}`,
    );
  }

  #renderCells() {
    const hadFocus = this.cells.contains(document.activeElement);
    const { tokens, start, versions, texts } = this.found;
    let [turn, version] = [null, null];
    const parts = [];
    tokens.forEach((token, place) => {
      if (token[5] !== turn) {
        turn = token[5];
        parts.push(h("span", { class: "mark turnmark" }, `turn ${turn}`));
      }
      if (token[1] && token[4] >= 0 && token[4] !== version) {
        version = token[4];
        parts.push(h("span", { class: "mark weightmark" }, "weights ", named(versions[version] ?? "?")));
      }
      parts.push(this.#cell(token, start + place, texts?.[place] ?? null));
    });
    replace(this.cells, parts);
    const first = this.cells.querySelector(".tok");
    first?.setAttribute("tabindex", "0");
    if (this.at !== null || hadFocus) this.#focusAt();
  }

  #cell([id, sampled, mask, logprob], position, text) {
    const kind = sampled ? (logprob === null ? "sampled" : `lp${classOf(logprob)}`) : "prompt";
    const name = text === null || text === "" ? String(id) : spelled(text);
    const isId = text === null || text === "";
    return h(
      "span",
      {
        class: `tok ${kind}${sampled && !mask ? " masked" : ""}${isId ? " id" : ""}`,
        role: "button",
        tabindex: "-1",
        dataset: { at: position },
      },
      name,
    );
  }

  #listen() {
    const of = (event) => event.target.closest?.(".tok");
    this.cells.addEventListener("mouseover", (event) => of(event) && this.#explain(of(event)));
    this.cells.addEventListener("focusin", (event) => of(event) && this.#focused(of(event)));
    this.cells.addEventListener("click", (event) => of(event)?.focus());
    this.cells.addEventListener("keydown", (event) => {
      const cell = of(event);
      if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
      const at = Number(cell.dataset.at);
      const end = (this.found?.total ?? 1) - 1;
      const to = {
        ArrowRight: at + 1,
        ArrowLeft: at - 1,
        PageDown: at + PAGE,
        PageUp: at - PAGE,
        Home: 0,
        End: end,
        ...this.#lineKeys(event.key, cell),
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.#goTo(Math.max(0, Math.min(to, end)));
    });
  }

  /** Up and down: the token that is nearest in the line above or below. */
  #lineKeys(key, cell) {
    if (key !== "ArrowUp" && key !== "ArrowDown") return {};
    const { left, top, height } = cell.getBoundingClientRect();
    const step = key === "ArrowDown" ? 1 : -1;
    let place = Number(cell.dataset.at) - this.found.start;
    let best = null;
    const all = this.cells.querySelectorAll(".tok");
    for (place += step; place >= 0 && place < all.length; place += step) {
      const box = all[place].getBoundingClientRect();
      const lines = Math.abs(box.top - top) / Math.max(1, height);
      if (lines < 0.5) continue;
      if (best && Math.abs(box.top - best.top) > 2) break;
      const off = Math.abs(box.left - left);
      if (!best || off < best.off) best = { off, top: box.top, at: Number(all[place].dataset.at) };
    }
    return best ? { [key]: best.at } : {};
  }

  #focusAt() {
    const cell = this.cells.querySelector(`.tok[data-at="${this.at}"]`);
    if (!cell) return;
    cell.focus();
    cell.scrollIntoView({ block: "nearest" });
  }

  #focused(cell) {
    const before = this.cells.querySelector('.tok[tabindex="0"]');
    if (before) {
      before.setAttribute("tabindex", "-1");
      before.removeAttribute("aria-describedby");
    }
    this.#explain(cell);
    cell.setAttribute("tabindex", "0");
    cell.setAttribute("aria-describedby", "token-detail");
    this.at = Number(cell.dataset.at);
    this.#remember();
  }

  #explain(cell) {
    const at = Number(cell.dataset.at);
    const [id, sampled, mask, logprob, version, turn] = this.found.tokens[at - this.found.start];
    const text = this.found.texts?.[at - this.found.start];
    replace(
      this.detail,
      h("strong", null, `position ${count(at)}`),
      ` · id ${id}`,
      text != null && [" · text ", h("code", null, named(JSON.stringify(text)))],
      ` · turn ${turn} · ${sampled ? "sampled" : "not sampled"}, ${mask ? "in the loss" : "not in the loss"}`,
      logprob !== null && sampled
        ? ` · logprob ${logprob.toFixed(6)}, probability ${Math.exp(logprob).toPrecision(4)}`
        : null,
      version >= 0 && [" · weights ", named(this.found.versions[version] ?? "?")],
    );
  }

  #wholeButton() {
    const button = h("button", { type: "button" }, `count all ${count(this.found.total)} tokens`);
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        await this.#countWhole(button);
      } catch (error) {
        if (this.closing.signal.aborted) return;
        button.replaceWith(failure(error));
      }
    });
    return button;
  }

  /** Page through the segment for its counts; nothing of it is kept. */
  async #countWhole(button) {
    const { segment, total } = this.found;
    const counts = new Counts();
    while (counts.tokens < total) {
      const parameters = { seq: this.seq, segment, start: counts.tokens, limit: COUNTED };
      const { tokens } = await get(this.path, parameters, this.closing.signal);
      if (!tokens.length || !button.isConnected) break;
      counts.add(tokens);
      setText(button, `${count(counts.tokens)} of ${count(total)}`);
    }
    if (button.isConnected) show(this.counts, counts, `all ${count(counts.tokens)} tokens of the segment`);
  }
}

/**
 * @param {HTMLElement} root
 * @param {any} params
 * @returns {import("./app.js").View}
 */
export function view(root, params) {
  return new TokensView(root, params);
}
