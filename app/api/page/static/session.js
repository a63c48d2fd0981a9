/** One session: what it is, its turns, its conversation and its log, now or after any of its events. */

import { curl, get } from "./api.js";
import { Conversation } from "./conversation.js";
import { copyButton } from "./copy.js";
import { badge, clock, count, failure, h, message, replace, since } from "./dom.js";
import { EventLog } from "./events.js";
import { groupHref, setQuery, tokensHref } from "./route.js";
import { Timeline } from "./timeline.js";
import { Travel } from "./travel.js";
import { named, textBlock } from "./visible.js";

/** A live view is read anew at most so often, and never more than a part of the time that reading takes. */
const REFRESH_MS = 500;
const REFRESH_SHARE = 4;

/** @param {string|null} text of the address @returns {number|null} a whole number from 1 */
function numberOf(text) {
  const value = Number(text);
  return text !== null && Number.isInteger(value) && value >= 1 ? value : null;
}

/** @param {string} name @param {...any} value @returns {HTMLElement} */
function fact(name, ...value) {
  return h("div", null, h("dt", null, name), h("dd", null, ...value));
}

/** @param {any} value @returns {string} */
function short(value) {
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/**
 * @param {any} reward
 * @returns {(Node|string)[]}
 */
function rewardParts(reward) {
  const components = Object.entries(reward.components ?? {});
  return [
    h("strong", null, String(reward.reward)),
    components.length
      ? h(
          "span",
          { class: "note" },
          " ",
          components.map(([name, value]) => [named(name), ` ${value} `]),
        )
      : "",
  ];
}

class SessionView {
  /** @param {HTMLElement} root @param {any} params */
  constructor(root, params) {
    this.id = params.id;
    this.path = `/ui/api/sessions/${encodeURIComponent(this.id)}`;
    this.closing = new AbortController();
    /** @type {AbortController|null} of what is being read for the moment that is shown */
    this.reading = null;
    this.seq = numberOf(params.query.get("seq"));
    this.turn = numberOf(params.query.get("turn"));
    /** The last event of the state that was read, and the last that is known of. */
    this.newest = 0;
    this.told = 0;
    /** @type {Map<Element, string>} */
    this.keys = new Map();
    this.title = h("div", { class: "panelhead" }, h("h1", null, named(this.id)));
    this.facts = h("dl", { class: "sessionfacts" });
    this.folds = h("div", { class: "folds" });
    this.trouble = h("div", null);
    this.head = h(
      "section",
      { class: "panel", "aria-label": "Session" },
      this.title,
      this.trouble,
      this.facts,
      this.folds,
    );
    this.travel = new Travel((seq) => this.#move(seq));
    this.timeline = new Timeline((turn) => this.#pick(turn));
    this.conversation = new Conversation(this.id, (turn) => this.#pick(turn));
    this.log = new EventLog(this.id, () => this.#grown());
    replace(
      root,
      h(
        "div",
        { class: "session-view" },
        this.head,
        this.travel.element,
        this.timeline.element,
        h("div", { class: "columns" }, this.conversation.element, this.log.element),
      ),
    );
    this.#read();
  }

  close() {
    this.closing.abort();
    this.reading?.abort();
    clearTimeout(this.waiting);
    this.travel.close();
    this.log.close();
  }

  /** @param {any[]} rows sessions that changed */
  onSessions(rows) {
    const row = rows.find((one) => one.session_id === this.id);
    if (!row || row.version <= this.newest) return;
    this.told = Math.max(this.told, row.version);
    this.#grown();
  }

  onReset() {
    this.#grown();
  }

  /** @param {URLSearchParams} query somebody followed a link to another moment of this session */
  onQuery(query) {
    this.seq = numberOf(query.get("seq"));
    this.turn = numberOf(query.get("turn"));
    this.#read();
  }

  #move(seq) {
    this.seq = seq;
    this.#remember();
    this.#read();
  }

  #pick(turn) {
    this.turn = turn;
    this.#remember();
    if (!this.session) return;
    this.timeline.update(this.session, turn);
    this.#readConversation();
  }

  #remember() {
    setQuery({ seq: this.seq, turn: this.turn });
  }

  /** The log has grown: what is shown is behind, unless somebody looks at an earlier moment. */
  #grown() {
    if (this.waiting !== undefined || this.closing.signal.aborted) return;
    this.waiting = setTimeout(async () => {
      const began = performance.now();
      await this.#read();
      const pause = Math.max(REFRESH_MS, (performance.now() - began) * REFRESH_SHARE);
      this.waiting = setTimeout(() => {
        this.waiting = undefined;
        if (Math.max(this.told, this.log.last) > this.newest) this.#grown();
      }, pause);
    }, 0);
  }

  async #read() {
    this.reading?.abort();
    const reading = new AbortController();
    this.reading = reading;
    let session;
    try {
      session = await get(this.path, { seq: this.seq }, reading.signal);
    } catch (error) {
      if (reading.signal.aborted) return;
      replace(
        this.trouble,
        failure(error, () => this.#read()),
      );
      return;
    }
    replace(
      this.trouble,
      session.problems.map((one) => message("error", `${one.part} cannot be shown`, h("p", null, one.message))),
    );
    this.session = session;
    this.newest = Math.max(this.newest, session.last_seq);
    this.#show();
    await this.#readConversation();
  }

  async #readConversation() {
    const turn = this.turn !== null && this.session.turns.some((one) => one.turn === this.turn) ? this.turn : null;
    await this.conversation.update(this.session, turn, this.reading?.signal ?? this.closing.signal);
  }

  #show() {
    const { session } = this;
    const at = this.seq === null ? null : this.#momentOf(session);
    this.travel.update(session.seq, session.last_seq, this.seq === null, at);
    this.timeline.update(session, this.turn);
    this.log.mark(this.seq);
    this.log.start(session.last_seq);
    replace(this.facts, this.#facts());
    const { config, metadata, turn_rewards: rewards, erased, state, status } = session;
    this.#renew(this.title, [erased, state, status, this.seq], () => this.#title());
    this.#renew(this.folds, [config, metadata, rewards], () => this.#folds());
  }

  /** What somebody may have unfolded, or be about to press, is made anew only where it differs. */
  #renew(box, parts, make) {
    const key = JSON.stringify(parts);
    if (this.keys.get(box) === key) return;
    this.keys.set(box, key);
    replace(box, make());
  }

  /** @returns {number|null} when the event that is shown was, where the log is here */
  #momentOf(session) {
    return this.log.events.find((event) => event.seq === session.seq)?.at ?? null;
  }

  #title() {
    const { session } = this;
    const own = { session_id: this.id };
    return [
      h("h1", null, named(session.session_id)),
      badge(session.erased ? "erased" : (session.state ?? session.status)),
      this.seq !== null && badge(`as of event ${session.seq}`, "warn"),
      h("a", { href: tokensHref(this.id, { seq: this.seq }) }, "Tokens"),
      h(
        "span",
        { class: "switches" },
        copyButton(() => curl(this.path, { seq: this.seq }), "Copy as curl"),
        copyButton(() => curl("/export", own), "Copy export as curl"),
      ),
    ];
  }

  #facts() {
    const { session } = this;
    const { config } = session;
    const live = session.turns.filter((turn) => turn.live);
    const newest = live.at(-1);
    const engine = session.affinity?.engine ?? newest?.engine;
    const segments = new Set(live.map((turn) => turn.segment)).size;
    const gone = session.turns.length - live.length;
    return [
      fact(
        "Turns",
        count(live.length),
        gone > 0 && ` live of ${count(session.turns.length)}`,
        segments > 1 && `, ${segments} segments`,
        gone > 0 && [" ", badge(`${count(gone)} rolled back`, "warn")],
      ),
      fact("Reward", session.reward ? rewardParts(session.reward) : "none"),
      config.group_id != null &&
        fact(
          "Group",
          h("a", { href: groupHref(config.group_id) }, named(config.group_id)),
          config.attempt != null && ` attempt ${config.attempt}`,
        ),
      fact(
        "Engine",
        engine ? named(engine) : "none",
        session.affinity?.control && [" by ", named(session.affinity.control)],
      ),
      (config.adapter ?? newest?.adapter) != null && fact("Adapter", named(config.adapter ?? newest.adapter)),
      fact("Weights", named(newest?.weight_versions.at(-1)?.version ?? "–")),
      fact("Tokens", newest ? count(newest.prompt_tokens + newest.output_tokens) : "–"),
      fact("Created", since(session.created_at)),
      session.closed_at != null &&
        fact("Closed", since(session.closed_at), h("span", { class: "note" }, ` ${clock(session.closed_at)}`)),
    ];
  }

  #folds() {
    const { session } = this;
    const chosen = Object.entries(session.config).filter(([, value]) => value !== null);
    const rewards = Object.entries(session.turn_rewards ?? {});
    return [
      rewards.length > 0 &&
        h(
          "details",
          null,
          h("summary", null, `Rewards of ${count(rewards.length)} turns`),
          h(
            "p",
            null,
            rewards.map(([turn, reward]) => [`turn ${turn}: `, rewardParts(reward), "; "]),
          ),
        ),
      h(
        "details",
        null,
        h("summary", null, "Configuration"),
        h(
          "dl",
          { class: "sessionfacts" },
          chosen.map(([name, value]) => fact(name, named(short(value)))),
        ),
      ),
      session.metadata != null &&
        h(
          "details",
          null,
          h("summary", null, "Metadata"),
          textBlock(JSON.stringify(session.metadata, null, 2), "code"),
        ),
    ];
  }
}

/**
 * @param {HTMLElement} root
 * @param {any} params
 * @returns {import("./app.js").View}
 */
export function view(root, params) {
  return new SessionView(root, params);
}
