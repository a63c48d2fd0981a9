/** What one turn did: the message that was sampled, then the results that came back, and the prompt, folded. */

import { get, url } from "./api.js";
import { messageElement } from "./conversation.js";
import { copyCurl } from "./copy.js";
import { badge, button, failure, folded, h, message, replace } from "./dom.js";
import { amount, bytes, count, duration, milliseconds, serverNow, since } from "./format.js";
import { sessionHref } from "./route.js";
import { verdicts } from "./verdicts.js";
import { every, LatestRequest, SessionPart } from "./view.js";
import { named, textBlock } from "./visible.js";

/** @import {Child, FailedTurn, OpenTurn, Session, Transcript, Turn, TurnMessages} from "../ui_types.d.ts" */

/** Turns whose messages are kept; a committed turn's do not change. */
const KEPT = 30;
/** Earlier messages in the document at first; a button adds as many. */
const SHOWN = 50;
/** A turn in flight is looked at again so often. */
const AGAIN_MS = 2000;

export class TurnTab extends SessionPart {
  /** @param {ConstructorParameters<typeof SessionPart>} given */
  constructor(...given) {
    super(...given);
    this.prompts = new LatestRequest(this.closed);
    this.isRendered = false;
    /** @type {Map<string, TurnMessages>} */
    this.kept = new Map();
    /** What is shown: the turn, what followed it, how. */
    this.key = "";
    /** What is searched for, and marked. */
    this.marked = "";
    this.element = h("div", { class: "turnview" });
    this.closed.addEventListener("abort", () => CSS.highlights?.delete("found"));
    every(this.closed, AGAIN_MS, () => {
      // A request that takes longer than this is waited for, not made again.
      if (!this.requests.isRunning && this.session?.open_turns.some((one) => one.turn === this.turn)) this.#read();
    });
  }

  /** @param {Session} session @param {{turn: number|null}} at */
  update(session, { turn }) {
    this.session = session;
    this.turn = turn;
    const committed = session.turns.find((one) => one.turn === turn);
    const key = JSON.stringify([turn, committed?.seq, this.#next?.turn, committed?.discarded_by, this.isRendered, session.erased, session.annotations[turn ?? 0]]);
    if (key === this.key) return;
    this.key = key;
    this.#read();
  }

  /** The turn whose request brought the results of this one; a live one, if there is any. */
  get #next() {
    const after = this.session?.turns.filter((one) => one.parent === this.turn && !one.segment_cause) ?? [];
    return after.find((one) => one.live) ?? after[0];
  }

  /** @param {number} turn @param {boolean} whole @param {AbortSignal} signal @returns {Promise<TurnMessages>} */
  async #messages(turn, whole, signal) {
    const key = `${turn} ${whole}`;
    const known = this.kept.get(key) ?? this.kept.get(`${turn} true`);
    if (known) return known;
    const messages = /** @type {TurnMessages} */ (await get(`${this.path}/turns/${turn}`, { whole }, signal));
    if (messages.state == null) this.kept.set(key, messages);
    if (this.kept.size > KEPT) this.kept.delete(/** @type {string} */ (this.kept.keys().next().value));
    return messages;
  }

  /** @param {number[]} [whole] turns of which all is wanted */
  #read(whole = []) {
    const { session, turn } = this;
    this.prompts.abort();
    const failed = session?.failed_turns.find((one) => one.turn === turn);
    const open = session?.open_turns.find((one) => one.turn === turn);
    if (!session || turn === null || session.erased)
      return replace(this.element, message("empty", session?.erased ? "The content is erased." : "No turn is committed yet."));
    if (failed) return replace(this.element, failedTurn(failed, this.id));
    const next = this.#next;
    this.requests.run(
      (signal) => Promise.all([turn, ...(next ? [next.turn] : [])].map((one) => this.#messages(one, whole.includes(one), signal))),
      ([own, after]) => this.#show(session, own, after, open),
      (error) => replace(this.element, open ? openTurn(open, null) : failure(error, () => this.#read())),
    );
  }

  /** @param {Session} session @param {TurnMessages|undefined} own @param {TurnMessages|undefined} after @param {OpenTurn|undefined} open */
  #show(session, own, after, open) {
    const turn = session.turns.find((one) => one.turn === own?.turn);
    if (!own) return;
    const look = (/** @type {number} */ of) => ({ sessionId: this.id, isRendered: this.isRendered, onWhole: () => this.#read([of]) });
    /** @param {TurnMessages|undefined} messages @param {boolean} sampled @returns {HTMLElement[]} */
    const elements = (messages, sampled) => {
      const total = session.turns.find((one) => one.turn === messages?.turn)?.messages ?? 0;
      return (messages?.messages ?? []).flatMap((one, at, all) => {
        const entry = { ...one, error: one.error ?? undefined, index: total ? total - all.length + at : at, turn: messages?.turn ?? 0 };
        return one.sampled === sampled ? [messageElement(entry, look(entry.turn))] : [];
      });
    };
    if (open) {
      replace(this.element, openTurn(open, own), h("h2", null, "Its request"), list(elements(own, false)));
      return;
    }
    if (!turn) return;
    const results = elements(after, false);
    const rendering = button("Markdown", () => this.#render(), { "aria-pressed": String(this.isRendered) });
    const next = this.#next;
    replace(
      this.element,
      turnHead(turn, session, rendering),
      list(elements(own, true)),
      verdicts(this.id, turn.turn, session),
      results.length > 0 && [
        h("h2", null, "What came back", next?.opened_at != null && h("span", { class: "note" }, ` after ${duration(next.opened_at - turn.committed_at)}`)),
        list(results),
      ],
      this.#prompt(turn, session),
    );
    this.element.scrollTop = 0;
    this.mark(this.marked);
  }

  #render() {
    this.isRendered = !this.isRendered;
    if (this.session) this.update(this.session, { turn: this.turn });
    this.element.querySelector("button")?.focus({ preventScroll: true });
  }

  /** Mark what was searched for. @param {string} text */
  mark(text) {
    this.marked = text;
    if (!CSS.highlights) return;
    const needle = text.toLowerCase();
    const ranges = [];
    const walker = document.createTreeWalker(this.element, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node && needle; node = walker.nextNode()) {
      const content = (node.textContent ?? "").toLowerCase();
      for (let at = content.indexOf(needle); at >= 0 && ranges.length < 1000; at = content.indexOf(needle, at + needle.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, Math.min(at + needle.length, (node.textContent ?? "").length));
        ranges.push(range);
      }
    }
    CSS.highlights.set("found", new Highlight(...ranges));
    if (ranges[0]) ranges[0].startContainer.parentElement?.scrollIntoView({ block: "nearest" });
  }

  /** @param {Turn} turn @param {Session} session @returns {HTMLElement} read when it is unfolded */
  #prompt(turn, session) {
    const content = h("div", { class: "prompt" });
    const cached = turn.cached_tokens ? `, ${count(turn.cached_tokens)} cached` : "";
    const element = folded(`Prompt · ${amount(turn.messages - 1, "message")} · ${amount(turn.prompt_tokens, "token")}, ${count(turn.suffix_tokens)} new${cached}`, content, "promptfold");
    element.addEventListener("toggle", () => {
      if (content.hasChildNodes()) return;
      replace(content, "Loading …");
      this.prompts.run(
        { path: `${this.path}/conversation`, parameters: { seq: session.seq, turn: turn.turn } },
        (/** @type {Transcript} */ transcript) => this.#showPrompt(content, transcript, turn, SHOWN),
        (error) => replace(content, failure(error)),
      );
    });
    return element;
  }

  /** @param {HTMLElement} content @param {Transcript} transcript @param {Turn} turn @param {number} shown */
  #showPrompt(content, transcript, turn, shown) {
    const { omitted, tools, params, errors } = transcript;
    const messages = transcript.messages.filter((one) => one.turn !== turn.turn || !one.sampled);
    const begin = Math.max(0, messages.length - shown);
    const more = () => this.#showPrompt(content, transcript, turn, shown + SHOWN);
    const hasImages = messages.some((one) => JSON.stringify(one.message).includes('"turnlog_image"'));
    const isWhole = omitted === 0 && params !== null && messages.every((one) => one.error === undefined) && !hasImages;
    const body = () => ({ ...params, messages: messages.map((one) => one.message), ...(tools && { tools }) });
    replace(
      content,
      Object.entries(errors).map(([what, why]) => message("error", what, h("p", null, why))),
      h(
        "div",
        { class: "switches" },
        isWhole &&
          turn.protocol === "chat" &&
          copyCurl(() => ({ path: "/v1/chat/completions", engine: turn.engine, body: body() }), "request to the engine"),
      ),
      params && folded("Sampling parameters", textBlock(JSON.stringify(params, null, 2), "code")),
      tools && folded(amount(tools.length, "tool"), textBlock(JSON.stringify(tools, null, 2), "code")),
      omitted > 0 && message("note", `${count(omitted)} earlier messages are not shown here; GET /sessions/{id} has all.`),
      begin > 0 && button(`show ${Math.min(SHOWN, begin)} earlier of ${count(begin)}`, more),
      list(messages.slice(begin).map((one) => messageElement(one, { sessionId: this.id, isRendered: this.isRendered }))),
    );
  }
}

/** @param {HTMLElement[]} elements */
function list(elements) {
  return h("ol", { class: "conversation" }, elements);
}

/** @param {number} turn @param {...Child} facts */
function head(turn, ...facts) {
  return h("div", { class: "panelhead" }, h("h2", null, `Turn ${turn}`), ...facts);
}

/** @param {Turn} turn @param {Session} session @param {HTMLElement} rendering */
function turnHead(turn, { session_id: id, seq, last_seq }, rendering) {
  const took = turn.opened_at === null ? null : turn.committed_at - turn.opened_at;
  return [
    head(
      turn.turn,
      turn.discarded_by !== null && badge(`rolled back by event ${turn.discarded_by}`, "warn"),
      h("span", { class: `fin ${turn.finish_reason ?? ""}` }, named(turn.finish_reason ?? "")),
      took !== null && h("span", null, duration(took)),
      h("span", { class: "note" }, `${count(turn.prompt_tokens)} → ${count(turn.output_tokens)} tokens`),
      h("span", { class: "note" }, named(turn.engine.replace(/^https?:\/\//, ""))),
      turn.weight_versions.length > 0 && h("span", { class: "note" }, "weights ", named(turn.weight_versions.map((one) => one.version).join(" → "))),
      turn.adapter !== null && h("span", { class: "note" }, "adapter ", named(turn.adapter)),
      h("a", { href: sessionHref(id, { turn: turn.turn, seq: seq === last_seq ? null : seq, tab: "events" }) }, `event ${turn.seq}`),
      h("span", { class: "spacer" }),
      rendering,
    ),
  ];
}

/** @param {FailedTurn} failed @param {string} id of the session */
function failedTurn({ turn, fence, kind, reason, status, detail, kept_bytes, opened_at, ended_at }, id) {
  const href = url(`/sessions/${encodeURIComponent(id)}/rejected/${fence}`);
  return [
    head(
      turn,
      badge(kind, kind === "rejected" ? "bad" : "warn"),
      opened_at !== null && h("span", null, `after ${milliseconds((ended_at - opened_at) * 1000)}`),
      since(ended_at),
    ),
    h("p", null, h("strong", null, named(reason)), status !== null && ` ${status}`),
    detail && textBlock(detail, "code"),
    kept_bytes && h("p", null, h("a", { href, download: true }, `the reply's first ${bytes(kept_bytes)}`)),
    h("p", { class: "note" }, "Nothing of it was committed; its request is not kept."),
  ];
}

/** @param {OpenTurn} open @param {TurnMessages|null} own null: another process has it @returns {Child} */
function openTurn(open, own) {
  const told = { gate: "waits at a gate", engine: "is generated", claim: "begins", prepare: "is prepared", validate: "is validated", commit: "is written", reply: "is sent" };
  return [
    head(
      open.turn,
      badge("in flight", "running"),
      since(Math.min(open.opened_at, serverNow()), "for"),
      own && h("span", null, told[/** @type {keyof told} */ (own.state ?? "engine")]),
      own?.engine != null && h("span", null, "at ", named(own.engine)),
      open.adapter !== null && h("span", { class: "note" }, "adapter ", named(open.adapter)),
    ),
    own === null && h("p", { class: "note" }, "Its request is known to the process that serves it."),
  ];
}
