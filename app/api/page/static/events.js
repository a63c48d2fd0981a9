/** A session's log, as it is written: each event with all of its fields, and what comes is added while one looks. */

import { ApiError, curl, stream } from "./api.js";
import { copyButton } from "./copy.js";
import { clock, count, h, message, replace, setText } from "./dom.js";
import { sessionHref } from "./route.js";
import { named, textBlock } from "./visible.js";

/** Events in the document at a time, and how many a press of "earlier" adds. */
const SHOWN = 300;
const MORE = 300;
/** Events in memory while nobody asks for earlier ones. */
const KEPT = 2000;
/** Lines are added together so often, however fast they come. */
const FLUSH_MS = 100;
const RETRY_MS = 2000;

/** The fields of an event that say most about it, for its line. */
const TOLD = [
  "turn",
  "to_turn",
  "discarded",
  "turns",
  "reason",
  "status",
  "detail",
  "segment_cause",
  "finish_reason",
  "reward",
  "engine",
  "cause",
];

/** @param {any} event @returns {string} */
function told(event) {
  return TOLD.filter((name) => event[name] !== undefined && event[name] !== null)
    .map((name) => `${name} ${typeof event[name] === "object" ? JSON.stringify(event[name]) : event[name]}`)
    .join(" · ");
}

/**
 * The lines of NDJSON that does not end.
 * @param {ReadableStream<Uint8Array>} body
 */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop() ?? "";
      yield* parts.filter((part) => part !== "");
    }
  } finally {
    reader.releaseLock();
  }
}

/** The log of one session, live. */
export class EventLog {
  /**
   * @param {string} sessionId
   * @param {() => void} onGrown events have come
   */
  constructor(sessionId, onGrown) {
    this.sessionId = sessionId;
    this.path = `/sessions/${encodeURIComponent(sessionId)}/events`;
    this.onGrown = onGrown;
    this.shown = SHOWN;
    /** @type {any[]} */
    this.events = [];
    this.begin = 0;
    /** @type {number|null} the event whose state is shown; null: the last */
    this.at = null;
    this.isPaused = false;
    /** @type {AbortController|null} */
    this.following = null;
    this.list = h("ol", { class: "events" });
    this.earlier = h("button", { type: "button", hidden: true, onclick: () => this.#earlier() });
    this.state = h("span", { class: "note", role: "status" });
    this.pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.#toggle() }, "pause");
    this.notes = h("div", null);
    this.element = h(
      "section",
      { class: "panel", "aria-labelledby": "events-title" },
      h(
        "div",
        { class: "panelhead" },
        h("h2", { id: "events-title" }, "Event log"),
        this.state,
        h(
          "span",
          { class: "switches" },
          this.pause,
          copyButton(() => curl(this.path), "Copy as curl"),
        ),
      ),
      this.notes,
      this.earlier,
      this.list,
    );
    this.onVisibility = () => (document.hidden ? this.#stop() : this.#resume());
    document.addEventListener("visibilitychange", this.onVisibility);
  }

  /** @param {number} last the newest event that is known: the log is followed from somewhat before it */
  start(last) {
    if (this.following || this.events.length) return;
    this.begin = Math.max(0, last - SHOWN);
    if (!this.isPaused && !document.hidden) this.#follow();
  }

  /** @param {number|null} at the event whose state the view shows; later ones are dimmed */
  mark(at) {
    if (this.at === at) return;
    this.at = at;
    for (const element of this.list.children) this.#markOne(element);
    this.#scrollTo(this.list.querySelector(".here"));
  }

  /** In the list alone: the rest of the page stays where it is. */
  #scrollTo(element) {
    if (!element) return;
    const { list } = this;
    const above = element.offsetTop - list.offsetTop;
    if (above < list.scrollTop || above + element.offsetHeight > list.scrollTop + list.clientHeight)
      list.scrollTop = above - list.clientHeight / 2;
  }

  close() {
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.onGrown = () => {};
    clearTimeout(this.retry);
    this.#stop();
  }

  #stop() {
    this.following?.abort();
    this.following = null;
    if (this.flushing !== undefined) this.#flush();
  }

  #resume() {
    if (!this.isPaused && !this.following) this.#follow();
  }

  #toggle() {
    this.isPaused = !this.isPaused;
    this.pause.setAttribute("aria-pressed", String(this.isPaused));
    if (this.isPaused) {
      this.#stop();
      setText(this.state, "paused");
    } else this.#follow();
  }

  /** The newest event that has come. */
  get last() {
    return this.events.length ? this.events[this.events.length - 1].seq : this.begin;
  }

  async #follow() {
    const following = new AbortController();
    this.following = following;
    setText(this.state, "following");
    try {
      const body = await stream(this.path, { after: this.last, follow: true }, following.signal);
      for await (const line of lines(body)) this.#arrived(JSON.parse(line));
      this.#ended(following, null);
    } catch (error) {
      if (following.signal.aborted) return;
      if (!(error instanceof ApiError) && !(error instanceof TypeError)) throw error; // TypeError: the connection broke
      this.#ended(following, error);
    }
  }

  /** The stream is over: the log is, the server stops, the connection broke, or it was refused. */
  #ended(following, error) {
    if (this.following !== following) return;
    this.following = null;
    if (this.events.at(-1)?.type === "SessionErased") {
      setText(this.state, "complete");
      return;
    }
    const isRefused = error instanceof ApiError && error.status >= 400 && error.status < 500;
    setText(this.state, isRefused ? "" : "not connected, trying again");
    replace(this.notes, isRefused && message("error", error.code, h("p", null, error.message)));
    if (!isRefused) this.retry = setTimeout(() => this.#resume(), RETRY_MS);
  }

  #arrived(event) {
    this.events.push(event);
    this.flushing ??= setTimeout(() => this.#flush(), FLUSH_MS);
  }

  #flush() {
    clearTimeout(this.flushing);
    this.flushing = undefined;
    const most = Math.max(this.shown, KEPT);
    if (this.events.length > most) {
      this.events.splice(0, this.events.length - most);
      this.begin = this.events[0].seq - 1;
    }
    this.#render();
    this.onGrown();
  }

  async #earlier() {
    this.shown += MORE;
    if (this.begin > 0 && this.shown > this.events.length) {
      const after = Math.max(0, this.begin - MORE);
      this.earlier.disabled = true;
      try {
        await this.#readEarlier(after, this.begin);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        replace(this.notes, message("error", error.code, h("p", null, error.message)));
      } finally {
        this.earlier.disabled = false;
      }
    }
    this.#render();
  }

  async #readEarlier(after, upto) {
    const reading = new AbortController();
    const found = [];
    const body = await stream(this.path, { after }, reading.signal);
    for await (const line of lines(body)) {
      const event = JSON.parse(line);
      if (event.seq > upto) break;
      found.push(event);
    }
    reading.abort();
    this.events.unshift(...found);
    this.begin = after;
  }

  /** Elements of events that stay are kept, with what is unfolded in them. */
  #render() {
    const shown = this.events.slice(-this.shown);
    const first = shown[0]?.seq ?? 0;
    const isAtEnd = this.list.scrollTop + this.list.clientHeight >= this.list.scrollHeight - 4;
    const known = new Map([...this.list.children].map((element) => [Number(element.dataset.seq), element]));
    for (const [seq, element] of known) if (seq < first) element.remove();
    const oldest = known.size ? Math.min(...known.keys()) : Infinity;
    const before = this.list.firstChild;
    for (const event of shown) {
      if (known.has(event.seq)) continue;
      this.list.insertBefore(this.#line(event), event.seq < oldest ? before : null);
    }
    const hidden = this.begin + this.events.length - shown.length;
    this.earlier.hidden = hidden <= 0;
    setText(this.earlier, `show ${count(Math.min(MORE, hidden))} earlier of ${count(hidden)}`);
    if (isAtEnd && this.at === null) this.list.scrollTop = this.list.scrollHeight;
  }

  #line(event) {
    const fields = h("div", null);
    const details = h(
      "details",
      null,
      h("summary", null, h("strong", null, named(event.type)), " ", h("span", { class: "told" }, named(told(event)))),
      fields,
    );
    details.addEventListener("toggle", () => {
      if (details.open && !fields.hasChildNodes()) fields.append(textBlock(JSON.stringify(event, null, 2), "code"));
    });
    const element = h(
      "li",
      { dataset: { seq: event.seq } },
      h(
        "a",
        { href: sessionHref(this.sessionId, { seq: event.seq }), title: "the session as of this event" },
        event.seq,
      ),
      h("time", { title: clock(event.at) }, new Date(event.at * 1000).toISOString().slice(11, 23)),
      details,
    );
    this.#markOne(element);
    return element;
  }

  #markOne(element) {
    const seq = Number(element.dataset.seq);
    element.classList.toggle("later", this.at !== null && seq > this.at);
    element.classList.toggle("here", seq === this.at);
    if (seq === this.at) element.setAttribute("aria-current", "step");
    else element.removeAttribute("aria-current");
  }
}
