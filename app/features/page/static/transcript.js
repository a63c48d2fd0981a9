/** A session's conversation from top to bottom: a block a turn, results under their calls, agents under the call that spawned them. */

import { rowsOf } from "./actionlist.js";
import { url } from "./api.js";
import { callsOf, isResult, messageElement, textsOf } from "./conversation.js";
import { copyButton, copyCurl } from "./copy.js";
import { arrange, badge, failure, folded, h, icon, message, renew, replace } from "./dom.js";
import { amount, bytes, count, duration, milliseconds, serverNow, since } from "./format.js";
import { sessionHref } from "./route.js";
import { verdicts } from "./verdicts.js";
import { every, LatestRequest, SessionPart } from "./view.js";
import { named, textBlock } from "./visible.js";

/** @import {Child, Entry, FailedTurn, OpenTurn, Session, Transcript, Turn, TurnMessages} from "../ui_types.d.ts" */
/** @import {Row} from "./actionlist.js" */

/** Turns of one request; fewer come where they are long. */
const MOST = 8;
/** So far from the window a block is read. */
const NEAR_PX = 1500;
/** The last messages of a prompt that are shown beside it. */
const SHOWN = 50;
/** A turn in flight is looked at again so often. */
const AGAIN_MS = 2000;
const MARKED = 1000;

/**
 * An agent beside the first one. `at`: the turn after whose call it began; null: it began before any.
 * @typedef {{name: string, id: string|null, first: number, at: number|null, last: number, turns: number}} Agent
 * A row's element; until it is read, it has about the height that it will have.
 * @typedef {{row: Row, agents: Agent[], element: HTMLElement, head: HTMLElement, body: HTMLElement, said: HTMLElement}} Block
 */

/**
 * Those with another agent_id than the first turn, and beginnings without one that were made while a call of the first agent was open.
 * @param {Session} session @returns {Map<number, Agent>} by turn
 */
function agentsOf({ tree, turns, open_turns }) {
  const all = new Map([...turns, ...open_turns].map((one) => [one.turn, one]));
  /** @type {Map<string, Agent>} */
  const agents = new Map();
  /** @type {Map<number, Agent>} */
  const byTurn = new Map();
  /** @type {Turn[]} */
  const main = [];
  for (const { turn: number, parent, agent_id: id, cause, branch } of tree?.turns ?? []) {
    const turn = all.get(number);
    if (!turn) continue;
    const before = main.findLast((one) => one.seq < turn.fence);
    const above = byTurn.get(parent);
    let name = above?.id === id ? above.name : null;
    if (id !== tree?.turns[0]?.agent_id) name = id ?? "another agent";
    else if (cause === "root" && turns.some((one) => one.parent === before?.turn && one.fence > turn.fence)) name = `branch ${branch}`;
    if (name === null) {
      if ("seq" in turn) main.push(turn);
      continue;
    }
    const agent = agents.get(name) ?? { name, id, first: number, at: before?.turn ?? null, last: number, turns: 0 };
    agent.turns += 1;
    agent.last = number;
    agents.set(name, agent);
    byTurn.set(number, agent);
  }
  return byTurn;
}

/**
 * Which results answer which call: by its id, which an engine may give twice; without one in order.
 * @param {Entry|undefined} reply @param {Entry[]} brought by the next request
 * @returns {{results: Entry[][], rest: Entry[]}} results by call
 */
function answered(reply, brought) {
  const calls = callsOf(reply?.message);
  /** @type {Entry[][]} */
  const results = calls.map(() => []);
  const rest = brought.filter((entry) => {
    if (!isResult(entry.message)) return true;
    const id = /** @type {{tool_call_id?: unknown}} */ (entry.message).tool_call_id;
    const fitting = results.filter((_, at) => !id || !calls[at]?.id || calls[at].id === id);
    const place = fitting.find((one) => !one.length) ?? (id ? fitting[0] : undefined);
    place?.push(entry);
    return !place;
  });
  return { results, rest };
}

export class TranscriptTab extends SessionPart {
  /** @type {Map<number, TurnMessages>} what was read */
  known = new Map();
  /** @type {Set<number>} turns of which all is wanted */
  whole = new Set();
  /** @type {Map<string, Block>} */
  blocks = new Map();
  /** @type {Map<number, Block>} */
  byTurn = new Map();
  /** @type {Map<string, {element: HTMLDetailsElement, flow: HTMLElement, line: HTMLElement}>} */
  agents = new Map();
  /** @type {Set<Block>} those near the window */
  near = new Set();
  /** @type {Map<number, number>} by the turn that brought results: the turn that asked for them */
  brings = new Map();
  /** What stays where it is while blocks are read; null: the end. @type {{block: Block|null, top: number, is: number, isFailed?: boolean}|undefined} */
  pin;
  /** What is searched for, the turns that have it, and the one that is shown; -1: the turn's last. */
  needle = "";
  /** @type {number[]} */
  hits = [];
  hit = { turn: 0, at: 0, isPending: false };
  /** @type {number|null} */
  branch = null;
  flow = h("div", { class: "flow" });
  problem = h("div");
  element = h("div", { class: "transcript" }, this.problem, this.flow);

  /**
   * @param {AbortSignal} closed @param {string} id
   * @param {(turn: number|null, branch: number|null) => void} pick
   * @param {(turn: number) => void} see somebody scrolled to a turn
   * @param {(turn: number) => string} lineOf what a turn did
   */
  constructor(closed, id, pick, see, lineOf) {
    super(closed, id, pick);
    this.see = see;
    this.lineOf = lineOf;
    const options = /** @type {IntersectionObserverInit} */ ({ scrollMargin: `${NEAR_PX}px`, rootMargin: `${NEAR_PX}px` });
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const block = this.blocks.get(/** @type {HTMLElement} */ (target).dataset.key ?? "");
        if (block) this.near[isIntersecting ? "add" : "delete"](block);
      }
      this.#load();
    }, options);
    closed.addEventListener("abort", () => {
      this.observer.disconnect();
      for (const name of ["found", "hit"]) CSS.highlights?.delete(name);
    });
    // What somebody unfolds grows where it is.
    this.element.addEventListener("click", () => (this.pin = undefined));
    document.addEventListener("scroll", () => this.#scrolled(), { capture: true, passive: true, signal: closed });
    every(closed, AGAIN_MS, () => {
      // A request that takes longer than this is waited for, not made again.
      if (this.requests.isRunning || !this.element.isConnected) return;
      for (const { turn } of this.session?.open_turns ?? []) this.known.delete(turn);
      if (this.session?.open_turns.length) this.#load();
    });
  }

  /** @param {Session} session @param {{turn: number|null, branch: number|null, isNew?: boolean}} at `isNew`: it was not shown before */
  update(session, { turn, branch, isNew }) {
    const isPicked = isNew || turn !== this.turn || branch !== this.branch;
    const last = this.flow.lastElementChild;
    const wasOpen = !!this.session?.open_turns.length;
    const follows = !isPicked && this.#isAtEnd() && (!this.pin?.block || this.pin.block.element === last);
    this.session = session;
    this.turn = turn;
    this.branch = branch;
    const rows = rowsOf(session, branch).filter((row) => row.kind !== "asked");
    for (const { number, kind } of rows) if (kind === "turn" && this.known.get(number)?.state != null) this.known.delete(number);
    this.#arrange(session, rows, branch === null ? agentsOf(session) : new Map());
    if (session.erased || !rows.length) {
      replace(this.flow, message("empty", session.erased ? "The content is erased." : "No turn is committed yet."));
      return;
    }
    if (isPicked && !(isNew && turn === rows[0]?.number)) this.#pinTo(turn);
    else if (follows && (wasOpen || last !== this.flow.lastElementChild)) {
      this.pin = { block: null, top: 0, is: 0 };
      this.turn = rows.at(-1)?.number ?? turn;
      this.see(this.turn ?? 0);
    }
    this.#load();
  }

  /** @param {Session} session @param {Row[]} rows @param {Map<number, Agent>} agents */
  #arrange(session, rows, agents) {
    const before = this.blocks;
    this.blocks = new Map();
    this.byTurn = new Map();
    this.brings = new Map(rows.flatMap(({ child, number }) => (child === null ? [] : [[child, number]])));
    /** @type {Map<HTMLElement, HTMLElement[]>} */
    const inside = new Map([[this.flow, []]]);
    for (const row of session.erased ? [] : rows) {
      const key = String(row.order);
      const block = before.get(key) ?? this.#block(row, key);
      Object.assign(block, { row, agents: [] });
      this.blocks.set(key, block);
      if (row.kind !== "refused") this.byTurn.set(row.number, block);
      const agent = agents.get(row.number);
      const box = agent ? this.#agent(agent) : null;
      if (agent && box && !inside.has(box.flow)) {
        inside.set(box.flow, []);
        const spawner = this.byTurn.get(agent.at ?? 0);
        spawner?.agents.push(agent);
        if (!spawner) inside.get(this.flow)?.push(box.element);
        else if (!spawner.body.contains(box.element)) spawner.body.append(box.element);
      }
      inside.get(box?.flow ?? this.flow)?.push(block.element);
    }
    for (const [key, block] of before) {
      if (this.blocks.has(key)) continue;
      this.observer.unobserve(block.element);
      this.near.delete(block);
    }
    for (const [box, elements] of inside) arrange(box, elements);
  }

  /** @param {Row} row @param {string} key @returns {Block} */
  #block(row, key) {
    const [head, body, said] = /** @type {const} */ ([h("div", { class: "panelhead" }), h("div", { class: "flow" }), h("div")]);
    const { turn, number } = row;
    const style = { "min-height": `${70 + Math.min(800, ((turn?.suffix_tokens ?? 0) + (turn?.output_tokens ?? 0)) * 0.8)}px` };
    const element = h("article", { class: "step", style, "aria-label": `Turn ${number}`, dataset: { turn: number, key } }, head, body, said);
    this.observer.observe(element);
    return { row, agents: [], element, head, body, said };
  }

  /** @param {Agent} agent */
  #agent({ name, turns, last }) {
    let box = this.agents.get(name);
    if (!box) {
      const [flow, line] = [h("div", { class: "flow" }), h("span", { class: "note" })];
      const element = folded([h("strong", null, "agent ", named(name)), " ", line], flow, "agent");
      box = { element, flow, line };
      this.agents.set(name, box);
    }
    replace(box.line, `· ${amount(turns, "turn")} · `, named(this.lineOf(last)));
    return box;
  }

  /** Where it scrolls: on a phone the whole view does. */
  get #scroller() {
    const pane = this.element.parentElement;
    return pane && getComputedStyle(pane).overflowY !== "visible" ? pane : document.documentElement.querySelector("main") ?? document.documentElement;
  }

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < 8;
  }

  /** @param {Block} block @returns {number} pixels below the window's upper end */
  #topOf({ element }) {
    return element.getBoundingClientRect().top - this.#scroller.getBoundingClientRect().top;
  }

  /** @param {number|null} turn */
  #pinTo(turn) {
    const block = this.byTurn.get(turn ?? 0);
    this.pin = block && { block, top: 8, is: 0 };
    for (let fold = block?.element.closest("details"); fold; fold = fold.parentElement?.closest("details")) fold.open = true;
    this.#align();
  }

  /** Have the end of what failed in sight, which says why, if the turn was gone to. */
  seeFailed() {
    if (this.pin) this.pin.isFailed = true;
    this.#align();
  }

  /** Have what is pinned where it was; nothing else moves it while blocks above it are read. */
  #align() {
    const { pin } = this;
    if (!pin || !(pin.block?.element ?? this.element).isConnected) return;
    const scroller = this.#scroller;
    if (!pin.block) scroller.scrollTop = scroller.scrollHeight;
    else {
      scroller.scrollTop += this.#topOf(pin.block) - pin.top;
      const failed = pin.isFailed && pin.block.body.querySelector(".who > [data-tone=bad]")?.closest(".said");
      if (failed) scroller.scrollTop += Math.max(0, failed.getBoundingClientRect().bottom - scroller.getBoundingClientRect().bottom);
      pin.is = this.#topOf(pin.block);
    }
  }

  /** Somebody scrolled, unless what is pinned is where it was: the turn in sight is shown as the chosen one. */
  #scrolled() {
    const { pin } = this;
    if (!this.element.isConnected || (pin && (pin.block ? Math.abs(this.#topOf(pin.block) - pin.is) < 3 : this.#isAtEnd()))) return;
    this.pin = undefined;
    const { left, top, width } = this.#scroller.getBoundingClientRect();
    const inSight = document.elementFromPoint(left + width / 2, Math.max(0, top) + 60)?.closest("[data-key]");
    const turn = Number(/** @type {HTMLElement|undefined} */ (inSight)?.dataset.turn);
    if (!turn || turn === this.turn) return;
    this.turn = turn;
    this.see(turn);
  }

  /** @param {Block} block @returns {number[]} the turns whose messages it shows */
  #needs({ row: { kind, number, child }, agents }) {
    if (kind !== "turn" && kind !== "open") return [];
    const before = this.brings.get(number);
    return [number, ...(before ? [before] : []), ...(child ? [child] : []), ...agents.map((one) => one.first)];
  }

  /** Show the blocks near the window; read what they lack, what is nearest to the chosen turn first. */
  #load() {
    if (!this.element.isConnected) return;
    /** @type {number[]} */
    const missing = [];
    for (const block of this.near) {
      const lacks = this.#needs(block).filter((turn) => !this.known.has(turn));
      if (lacks.length) missing.push(...lacks);
      else this.#show(block);
    }
    this.#align();
    this.#seek();
    if (!missing.length || this.requests.isRunning || this.problem.hasChildNodes()) return;
    const distance = (/** @type {number} */ turn) => Math.abs(turn - (this.turn ?? 0));
    const nearest = missing.reduce((one, other) => (distance(other) < distance(one) ? other : one));
    const whole = this.whole.has(nearest);
    const span = missing.filter((one) => Math.abs(one - nearest) < MOST / 2);
    const start = whole ? nearest : Math.min(...span);
    const limit = whole ? 1 : Math.max(...span) - start + 1;
    const { session } = this;
    this.requests.run(
      { path: `${this.path}/turns`, parameters: { start, limit, whole } },
      (/** @type {TurnMessages[]} */ turns) => {
        // A turn that was in flight may have committed since.
        const isNow = session === this.session;
        for (const one of turns) if ((whole || !this.whole.has(one.turn)) && (isNow || one.state === null)) this.known.set(one.turn, one);
        // What is neither in the store nor in flight here; after the last that came there may be more.
        for (let turn = start; isNow && turn <= (turns.at(-1)?.turn ?? start + limit - 1); turn += 1)
          if (!this.known.has(turn) && (whole || !this.whole.has(turn))) this.known.set(turn, { turn, messages: [], state: "elsewhere", engine: null });
        this.#load();
      },
      (error) => replace(this.problem, failure(error, () => (replace(this.problem), this.#load()))),
    );
  }

  /** @param {number} number @returns {{own: Entry[], reply: Entry|undefined}} what its request brought, and what was sampled */
  #messages(number) {
    const messages = this.known.get(number)?.messages ?? [];
    const { turn, open } = this.byTurn.get(number)?.row ?? {};
    const first = turn ? turn.messages - messages.length : this.byTurn.get(open?.parent ?? 0)?.row.turn?.messages ?? 0;
    const entries = messages.map((one, at) => ({ ...one, error: one.error ?? undefined, index: first + at, turn: number }));
    return { own: entries.filter((one) => !one.sampled), reply: open ? undefined : entries.find((one) => one.sampled) };
  }

  /** @param {Block} block whose messages are known */
  #show(block) {
    const session = /** @type {Session} */ (this.session);
    const { row, agents, element, head, body, said } = block;
    const { kind, number, turn, failed, open, refused, child, begins } = row;
    element.className = `step ${kind}${turn?.live === false ? " discarded" : ""}`;
    element.style.minHeight = "";
    const own = this.known.get(number);
    if (turn) renew(head, [turn.discarded_by, session.seq === session.last_seq || session.seq, begins], () => this.#head(turn, row, session));
    else if (open) renew(head, own, () => openTurn(open, own));
    else if (failed) renew(head, failed, () => failedTurn(failed, this.id));
    else if (refused) renew(head, refused, () => [badge("refused", "warn"), `A request after turn ${refused.turn}: the limit on ${refused.limit} is reached.`, since(refused.at)]);
    if (!own || failed || refused) return;
    const shown = this.#needs(block).map((one) => [one, this.known.get(one)?.messages.length, this.whole.has(one)]);
    renew(body, [kind, shown, agents.map((one) => one.name)], () => this.#body(row, agents, child));
    renew(said, [session.annotations[number], session.turn_rewards[number], session.seq === session.last_seq], () => turn && verdicts(this.id, number, session, () => this.#load()));
  }

  /** @param {Row} row @param {Agent[]} agents @param {number|null} child @returns {Child} */
  #body({ number, kind, turn }, agents, child) {
    const { own, reply } = this.#messages(number);
    const before = this.brings.get(number);
    const rest = before ? answered(this.#messages(before).reply, own).rest : own;
    const { results } = answered(reply, child ? this.#messages(child).own : []);
    const look = (/** @type {number} */ turn) => ({
      sessionId: this.id,
      isUnder: turn === child,
      onWhole: () => {
        this.whole.add(turn);
        this.known.delete(turn);
        this.#load();
      },
    });
    const said = (/** @type {Entry} */ entry) => messageElement(entry, look(entry.turn));
    const calls = callsOf(reply?.message);
    const under = Map.groupBy(agents, (agent) => this.#spawning(calls, agent));
    const elements = (/** @type {number} */ call) => (under.get(call) ?? []).map(({ name }) => this.agents.get(name)?.element);
    return [
      turn?.protocol === "completions" && !own.length && h("p", { class: "note" }, `${count(turn.suffix_tokens)} tokens were given as ids, without a text: the tab Tokens has them.`),
      rest.map(said),
      reply && messageElement(reply, look(number), (call) => [elements(call), results[call]?.map(said)]),
      kind === "turn" && !reply && message("note", "The content of this turn is not in the store."),
      elements(-1),
    ];
  }

  /** @param {ReturnType<typeof callsOf>} calls @param {Agent} agent @returns {number} the call that was given most of what it was asked, else the last */
  #spawning(calls, { first }) {
    const asked = this.#messages(first).own.flatMap(({ message }) => textsOf(message)).map((text) => text.trim());
    const alike = (/** @type {unknown} */ value) => (typeof value === "string" ? asked.map((text) => (text.includes(value.trim()) ? value.trim() : value.includes(text) ? text : "").length) : []);
    const lengths = calls.map(({ given }) => Math.max(0, ...(typeof given === "string" ? [given] : Object.values(given ?? {})).flatMap(alike)));
    const most = Math.max(...lengths);
    return most > 0 ? lengths.indexOf(most) : calls.length - 1;
  }

  /** @param {Turn} turn @param {Row} row @param {Session} session @returns {Child} */
  #head(turn, { begins, agent }, { seq, last_seq }) {
    const { turn: number } = turn;
    const took = turn.opened_at === null ? null : turn.committed_at - turn.opened_at;
    const href = sessionHref(this.id, { turn: number, branch: this.branch });
    return [
      begins?.cause === "compaction" && h("p", { class: "cut" }, "Compaction: from here on, a summary replaces the earlier history."),
      h("h2", null, h("a", { href }, `Turn ${number}`)),
      copyButton(() => new URL(href, location.href).href, "Copy link"),
      turn.discarded_by !== null && badge(`rolled back by event ${turn.discarded_by}`, "warn"),
      begins && h("span", { class: "flag" }, icon("branch"), ` branch ${begins.branch}: ${begins.cause} `, named(agent ?? ""), begins.fork_turn !== null && ` after turn ${begins.fork_turn}`),
      !begins && agent !== null && h("span", { class: "note" }, "agent ", named(agent)),
      turn.segment_cause && badge(`new segment: ${turn.segment_cause}`, "warn"),
      h("span", { class: `fin ${turn.finish_reason ?? ""}` }, named(turn.finish_reason ?? "")),
      took !== null && h("span", null, duration(took)),
      h("span", { class: "note" }, named(turn.engine.replace(/^https?:\/\//, ""))),
      turn.weight_versions.length > 0 && h("span", { class: "note" }, "weights ", named(turn.weight_versions.map((one) => one.version).join(" → "))),
      turn.adapter !== null && h("span", { class: "note" }, "adapter ", named(turn.adapter)),
      h("a", { href: sessionHref(this.id, { turn: number, seq: seq === last_seq ? null : seq, tab: "events" }) }, `event ${turn.seq}`),
      this.#prompt(turn, seq),
    ];
  }

  /** @param {Turn} turn @param {number} seq @returns {HTMLElement} read when it is unfolded */
  #prompt(turn, seq) {
    const content = h("div", { class: "prompt" });
    const cached = turn.cached_tokens ? `, ${count(turn.cached_tokens)} cached` : "";
    const tokens = `${count(turn.prompt_tokens)} → ${count(turn.output_tokens)} tokens, ${count(turn.suffix_tokens)} new${cached}`;
    const element = folded(`Prompt · ${amount(turn.messages - 1, "message")} · ${tokens}`, content, "promptfold");
    element.addEventListener("toggle", () => {
      if (content.hasChildNodes()) return;
      replace(content, "Loading …");
      new LatestRequest(this.closed).run(
        { path: `${this.path}/conversation`, parameters: { seq, turn: turn.turn } },
        (/** @type {Transcript} */ transcript) => this.#showPrompt(content, transcript, turn),
        (error) => replace(content, failure(error)),
      );
    });
    return element;
  }

  /** @param {HTMLElement} content @param {Transcript} transcript @param {Turn} turn */
  #showPrompt(content, transcript, turn) {
    const { omitted, tools, params, errors } = transcript;
    const messages = transcript.messages.filter((one) => one.turn !== turn.turn || !one.sampled);
    const earlier = omitted + Math.max(0, messages.length - SHOWN);
    const hasImages = messages.some((one) => JSON.stringify(one.message).includes('"turnlog_image"'));
    const isWhole = omitted === 0 && params !== null && messages.every((one) => one.error === undefined) && !hasImages;
    const body = () => ({ ...params, messages: messages.map((one) => one.message), ...(tools && { tools }) });
    replace(
      content,
      stagesOf(turn),
      Object.entries(errors).map(([what, why]) => message("error", what, h("p", null, why))),
      isWhole && turn.protocol === "chat" && copyCurl(() => ({ path: "/v1/chat/completions", engine: turn.engine, body: body() }), "request to the engine"),
      params && folded("Sampling parameters", textBlock(JSON.stringify(params, null, 2), "code")),
      tools && folded(amount(tools.length, "tool"), textBlock(JSON.stringify(tools, null, 2), "code")),
      earlier > 0 && message("note", `${count(earlier)} earlier messages are not shown here; GET /sessions/{id}/messages has all.`),
      messages.slice(-SHOWN).map((one) => messageElement(one, { sessionId: this.id })),
    );
  }

  /** Show the first place that has a text. @param {string} text @param {number[]} turns that have it, in their order */
  search(text, turns) {
    this.needle = text.toLowerCase();
    this.hits = turns;
    const turn = turns.includes(this.turn ?? 0) ? this.turn : turns[0];
    if (turn != null) this.#goTo(turn, 0);
    else this.#seek();
  }

  /** @param {number} turn @param {number} at */
  #goTo(turn, at) {
    this.hit = { turn, at, isPending: true };
    if (turn !== this.turn) this.pick(turn, this.branch);
    else this.#pinTo(turn);
    this.#load();
  }

  /** The next place, or the one before. @param {1|-1} by */
  step(by) {
    const { turn, at } = this.hit;
    const block = this.byTurn.get(turn);
    if (!this.hits.length || !block) return;
    const [ranges, next] = [this.#rangesIn(block), at + by];
    if (next >= 0 && next < ranges.length) return this.#goTo(turn, next);
    const place = this.hits.indexOf(turn) + by + this.hits.length;
    this.#goTo(/** @type {number} */ (this.hits[place % this.hits.length]), by > 0 ? 0 : -1);
  }

  /** Mark what is searched for, and scroll to the place that was asked for, once it has been read. */
  #seek() {
    if (!CSS.highlights) return;
    const marked = this.needle ? [...this.near].filter(({ row }) => this.hits.includes(row.number)).flatMap((one) => this.#rangesIn(one)) : [];
    CSS.highlights.set("found", new Highlight(...marked.slice(0, MARKED)));
    const { turn, at, isPending } = this.hit;
    const block = this.byTurn.get(turn);
    if (!this.needle) CSS.highlights.delete("hit");
    if (!isPending || !block || !this.near.has(block) || this.#needs(block).some((one) => !this.known.has(one))) return;
    const ranges = this.#rangesIn(block);
    const cut = /** @type {NodeListOf<HTMLElement>} */ (block.body.querySelectorAll(".textblock > button, .whole"));
    if (!ranges.length && cut.length) {
      for (const one of cut) one.click();
      return;
    }
    const range = ranges.at(at);
    this.hit = { turn, at: Math.max(0, at < 0 ? ranges.length - 1 : at), isPending: false };
    if (!range) return;
    for (let fold = range.startContainer.parentElement?.closest("details"); fold; fold = fold.parentElement?.closest("details")) fold.open = true;
    CSS.highlights.set("hit", new Highlight(range));
    const scroller = this.#scroller;
    scroller.scrollTop += range.getBoundingClientRect().top - scroller.getBoundingClientRect().top - scroller.clientHeight / 3;
    const top = this.#topOf(block);
    this.pin = { block, top, is: top };
  }

  /** @param {Block} block @returns {Range[]} where its own messages have what is searched for */
  #rangesIn({ element, body }) {
    const { needle } = this;
    /** @type {Range[]} */
    const ranges = [];
    const walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      if (node.parentElement?.closest("[data-key]") !== element) continue;
      const content = (node.textContent ?? "").toLowerCase();
      for (let at = content.indexOf(needle); at >= 0 && ranges.length < MARKED; at = content.indexOf(needle, at + needle.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, Math.min(at + needle.length, (node.textContent ?? "").length));
        ranges.push(range);
      }
    }
    return ranges;
  }
}

/** @param {Turn} turn @returns {Child} where its time went in this server, and how its request was sent */
function stagesOf({ timing, fence, base_tokens, trimmed, dialect, protocol, dispatched, parts, payloads }) {
  const total = Object.values(timing ?? {}).reduce((sum, one) => sum + one, 0);
  const stages = Object.entries(timing ?? {}).map(([name, took]) => `${name} ${milliseconds(took)}`);
  return h(
    "p",
    { class: "note stages" },
    timing ? `${stages.join(", ")}; total ${milliseconds(total)}.` : "No stage was timed.",
    ` Fence ${fence}. ${count(base_tokens)} tokens of the prompt were known`,
    trimmed > 0 && `, ${count(trimmed)} trimmed`,
    `. Sent as ${dialect}, ${protocol}`,
    dispatched != null && [", with weights ", named(dispatched)],
    parts.length > 1 && `, joined from ${parts.length} generations`,
    ".",
    payloads.map((one) => ` ${one.kind}: ${count(one.rows)} rows${one.tombstoned ? " (tombstoned)" : ""}.`),
  );
}

/** @param {FailedTurn} failed @param {string} id of the session @returns {Child} */
function failedTurn({ turn, fence, kind, reason, status, detail, kept_bytes, opened_at, ended_at }, id) {
  const href = url(`/sessions/${encodeURIComponent(id)}/rejected/${fence}`);
  return [
    h("h2", null, `Turn ${turn}`),
    badge(kind, kind === "rejected" ? "bad" : "warn"),
    h("span", null, h("strong", null, named(reason)), status !== null && ` ${status}`),
    opened_at !== null && h("span", null, `after ${milliseconds((ended_at - opened_at) * 1000)}`),
    since(ended_at),
    kept_bytes && h("a", { href, download: true }, `the reply's first ${bytes(kept_bytes)}`),
    h("span", { class: "note" }, "Nothing of it was committed; its request is not kept."),
    detail && textBlock(detail, "code"),
  ];
}

/** @param {OpenTurn} open @param {TurnMessages|undefined} own @returns {Child} */
function openTurn(open, own) {
  const told = { gate: "waits at a gate", engine: "is generated", claim: "begins", prepare: "is prepared", validate: "is validated", commit: "is written", reply: "is sent", elsewhere: "at another process, which has its request" };
  return [
    h("h2", null, `Turn ${open.turn}`),
    badge("in flight", "running"),
    since(Math.min(open.opened_at, serverNow()), "for"),
    own?.state != null && h("span", null, told[/** @type {keyof told} */ (own.state)]),
    own?.engine != null && h("span", null, "at ", named(own.engine)),
    open.adapter !== null && h("span", { class: "note" }, "adapter ", named(open.adapter)),
  ];
}
