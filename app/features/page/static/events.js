/** A session's log: each event with all of its fields, as it grows; and the way back to any moment of it. */

import { ApiError, lines } from "./api.js";
import { copyCurl } from "./copy.js";
import { announce, arrange, button, failure, folded, h, replace, setText } from "./dom.js";
import { clock, count, iso } from "./format.js";
import { sessionHref } from "./route.js";
import { SessionPart } from "./view.js";
import { named, textBlock } from "./visible.js";

/** @import {LogEvent, Session} from "../ui_types.d.ts" */

/** Events that are kept and shown, and how many a press of "earlier" adds. */
const SHOWN = 300;
/** New lines are added together, at most so often. */
const FLUSH_MS = 100;
const RETRY_MS = 2000;

/** The fields of an event that its line shows, and characters of one. */
const MOST_TOLD = 300;
const SUMMARY = (
  "turn to_turn discarded turns reason status detail segment_cause " +
  "branch branch_cause carries finish_reason reward engine cause limit name value column writer"
).split(" ");

/** @param {LogEvent} event @returns {string} */
function summaryOf(event) {
  const text = (/** @type {unknown} */ value) => (typeof value === "object" ? JSON.stringify(value) : String(value)).slice(0, MOST_TOLD);
  return SUMMARY.filter((name) => event[name] != null)
    .map((name) => `${name} ${text(event[name])}`)
    .join(" · ");
}

export class EventsTab extends SessionPart {
  /** @param {ConstructorParameters<typeof SessionPart>} given */
  constructor(...given) {
    super(...given);
    const { closed } = this;
    this.path = `/sessions/${encodeURIComponent(this.id)}/events`;
    this.slider = h("input", { type: "range", min: "1", "aria-label": "event, of this session's log" });
    this.field = h("input", { type: "number", min: "1", class: "short", "aria-label": "event number" });
    this.of = h("span", { class: "note" });
    this.moment = h("span", { class: "note" });
    this.live = button("live", () => this.pick(this.turn, null, null), { "aria-pressed": "true" });
    for (const input of [this.slider, this.field]) input.addEventListener("change", () => this.#goTo(Number(input.value)));
    const parts = [h("label", null, "after event ", this.field), this.of, this.slider, this.live, this.moment];
    const travel = h("div", { class: "travel", role: "group", "aria-label": "Time travel" }, parts);
    this.shown = SHOWN;
    this.events = /** @type {LogEvent[]} */ ([]);
    /** So many events are before those. */
    this.begin = 0;
    /** The event whose state is shown; null: the last. */
    this.at = /** @type {number|null} */ (null);
    this.flushing = 0;
    this.retry = 0;
    this.list = h("ol", { class: "events" });
    this.earlier = button("", () => this.#earlier(), { hidden: true });
    this.state = h("span", { class: "note", role: "status" });
    this.notes = h("div");
    const tools = h("div", { class: "panelhead" }, this.state, h("span", { class: "spacer" }), copyCurl(() => ({ path: this.path })));
    this.element = h("div", { class: "eventsview" }, travel, tools, this.notes, this.earlier, this.list);
    const onVisibility = () => (document.hidden ? this.#stop() : this.#resume());
    document.addEventListener("visibilitychange", onVisibility, { signal: closed });
    closed.addEventListener("abort", () => {
      clearTimeout(this.retry);
      clearTimeout(this.flushing);
    });
  }

  /** @param {Session} session @param {{turn: number|null, seq: number|null}} at */
  update(session, { turn, seq }) {
    this.turn = turn;
    this.session = session;
    this.#showMoment(session, seq === null);
    if (this.at !== seq) {
      this.at = seq;
      for (const element of this.#lines) this.#markOne(element);
      this.list.querySelector(".here")?.scrollIntoView({ block: "nearest" });
    }
    if (this.requests.isRunning || this.events.length) return;
    this.begin = Math.max(0, session.last_seq - SHOWN); // The log is followed from somewhat before its end.
    if (!document.hidden) this.#resume();
  }

  /** @param {Session} session @param {boolean} isLive */
  #showMoment({ seq, last_seq: last }, isLive) {
    this.slider.max = this.field.max = String(last);
    // What somebody drags or types stays while the log grows.
    for (const input of [this.slider, this.field]) if (document.activeElement !== input || !isLive) input.value = String(seq);
    this.slider.setAttribute("aria-valuetext", `event ${seq} of ${last}`);
    setText(this.of, `of ${last}`);
    setText(this.moment, isLive ? "" : clock(this.events.find((event) => event.seq === seq)?.at));
    this.live.setAttribute("aria-pressed", String(isLive));
  }

  /** @param {number} seq */
  #goTo(seq) {
    const last = this.session?.last_seq ?? 1;
    const wanted = Math.max(1, Math.min(Math.trunc(seq) || 1, last));
    announce(`event ${wanted} of ${last}`);
    this.pick(this.turn, null, wanted);
  }

  get #lines() {
    return [...this.list.querySelectorAll("li")];
  }

  #stop() {
    this.requests.abort();
    if (this.flushing) this.#flush();
  }

  #resume() {
    if (!this.requests.isRunning) this.#follow();
  }

  /** The newest event that has come. */
  get last() {
    return this.events.at(-1)?.seq ?? this.begin;
  }

  #follow() {
    setText(this.state, "following");
    const request = async (/** @type {AbortSignal} */ signal) => {
      for await (const line of lines(this.path, { after: this.last, follow: true }, signal)) {
        this.events.push(JSON.parse(line));
        this.flushing ||= setTimeout(() => this.#flush(), FLUSH_MS);
      }
    };
    this.requests.run(request, () => this.#ended(null), (error) => {
      if (!(error instanceof ApiError) && !(error instanceof TypeError)) throw error; // TypeError: the connection broke
      this.#ended(error);
    });
  }

  /** The log or the server ended the stream, or the connection broke, or it was refused. @param {Error|null} error */
  #ended(error) {
    if (this.events.at(-1)?.type === "SessionErased") {
      setText(this.state, "complete");
      return;
    }
    const isRefused = error instanceof ApiError && error.status >= 400 && error.status < 500;
    setText(this.state, isRefused ? "" : "not connected, retrying");
    replace(this.notes, isRefused && failure(error));
    if (!isRefused) this.retry = setTimeout(() => this.#resume(), RETRY_MS);
  }

  #flush() {
    clearTimeout(this.flushing);
    this.flushing = 0;
    const dropped = this.events.splice(0, this.events.length - this.shown);
    this.begin = dropped.at(-1)?.seq ?? this.begin;
    this.#render();
  }

  /** Follow the log from further back. */
  #earlier() {
    this.shown += SHOWN;
    this.begin = Math.max(0, this.begin - SHOWN);
    this.events = [];
    this.#follow();
  }

  /** Elements of events that stay are kept, with what is unfolded in them. */
  #render() {
    const isAtEnd = this.list.scrollTop + this.list.clientHeight >= this.list.scrollHeight - 4;
    const known = new Map(this.#lines.map((element) => [Number(element.dataset.seq), element]));
    arrange(this.list, this.events.map((event) => known.get(event.seq) ?? this.#line(event)));
    this.earlier.hidden = this.begin === 0;
    setText(this.earlier, `show ${count(Math.min(SHOWN, this.begin))} earlier of ${count(this.begin)}`);
    if (isAtEnd && this.at === null) this.list.scrollTop = this.list.scrollHeight;
  }

  /** @param {LogEvent} event */
  #line(event) {
    const fields = h("div");
    const summary = [h("strong", null, named(event.type)), " ", h("span", { class: "told" }, named(summaryOf(event)))];
    const details = folded(summary, fields);
    details.addEventListener("toggle", () => {
      if (!fields.hasChildNodes()) fields.append(textBlock(JSON.stringify(event, null, 2), "code"));
    });
    const href = sessionHref(this.id, { seq: event.seq, tab: "events" });
    const element = h(
      "li",
      { dataset: { seq: event.seq } },
      h("a", { href, title: "the session as of this event" }, event.seq),
      h("time", { title: clock(event.at) }, iso(event.at).slice(11, 23)),
      details,
    );
    this.#markOne(element);
    return element;
  }

  /** @param {HTMLElement} element */
  #markOne(element) {
    const seq = Number(element.dataset.seq);
    element.classList.toggle("later", this.at !== null && seq > this.at);
    element.classList.toggle("here", seq === this.at);
    element.ariaCurrent = seq === this.at ? "step" : null;
  }
}
