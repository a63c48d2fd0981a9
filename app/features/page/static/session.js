/** One session: what it is, its turns, its conversation and its log, now or after any of its events. */

import { get } from "./api.js";
import { Conversation } from "./conversation.js";
import { copyCurl } from "./copy.js";
import { badge, button, folded, h, message, replace } from "./dom.js";
import { EventLog } from "./events.js";
import { clock, count, decimal, duration, since } from "./format.js";
import { NoteForm } from "./noteform.js";
import { checkpointHref, groupHref, sessionHref, sessionsHref, setQuery, tokensHref, wholeNumber } from "./route.js";
import { Timeline } from "./timeline.js";
import { Travel } from "./travel.js";
import { TreeTab } from "./tree.js";
import { noSession, View } from "./view.js";
import { named, textBlock } from "./visible.js";

/** @import {Budget, Child, Reward, Session, SessionRow} from "../ui_types.d.ts" */
/** @import {Place} from "./view.js" */

/** Checkpoints that are named; a run may make hundreds. */
const MOST_CHECKPOINTS = 5;

/** @param {string} name @param {...Child} value @returns {HTMLElement} */
function fact(name, ...value) {
  return h("div", null, h("dt", null, name), h("dd", null, ...value));
}

/** @param {Reward} reward @returns {Child} */
function rewardParts({ reward, components }) {
  const parts = Object.entries(components).map(([name, value]) => [named(name), ` ${decimal(value)} `]);
  return [h("strong", null, decimal(reward)), parts.length > 0 && h("span", { class: "note" }, " ", parts)];
}

/** @param {Budget} budget @param {string} id of the session that it holds for @returns {HTMLElement} */
function budgetFact({ session_id, limits, used, left }, id) {
  const parts = [
    limits.turns != null && `${count(used.turns)} of ${count(limits.turns)} turns, ${count(left.turns)} left`,
    limits.tokens != null && `${count(used.tokens)} of ${count(limits.tokens)} tokens, ${count(left.tokens)} left`,
    limits.seconds != null && `${duration(used.seconds)} of ${duration(limits.seconds)}, ${duration(left.seconds)} left`,
    limits.context != null && `context ${count(limits.context)}`,
  ];
  const whose = session_id === id ? null : [" of ", h("a", { href: sessionHref(session_id) }, named(session_id))];
  return fact("Limits", parts.filter(Boolean).join("; "), h("span", { class: "note" }, ` per ${limits.per ?? "rollout"}`, whose));
}

/** @param {Session} session @param {number|null} branch @returns {boolean} false after an event before it began */
function hasBranch({ tree }, branch) {
  return tree !== null && tree.branches.some((one) => one.branch === branch);
}

export class SessionView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { id, query }) {
    super(root);
    this.id = id;
    this.path = `/ui/api/sessions/${encodeURIComponent(id)}`;
    /** @type {Session|null} as it is shown */
    this.session = null;
    this.seq = wholeNumber(query.get("seq"), 1);
    this.turn = wholeNumber(query.get("turn"), 1);
    this.branch = wholeNumber(query.get("branch"), 0);
    /** The last event that was read, and the last that the live stream named. */
    this.lastRead = 0;
    this.lastNamed = 0;
    /** @type {Map<Element, string>} */
    this.keys = new Map();
    this.title = h("div", { class: "panelhead" }, h("h1", null, named(id)));
    this.tokensLink = h("a", { href: tokensHref(id) }, "Tokens");
    this.facts = h("dl", { class: "sessionfacts" });
    this.noteForm = new NoteForm(
      this.closed,
      id,
      () => this.refresh(),
      () => this.title.querySelector("button")?.focus(),
    );
    this.folds = h("div", { class: "folds" });
    this.travel = new Travel(this.closed, (seq) => this.#move(seq));
    this.timeline = new Timeline((turn) => this.#pick(turn));
    this.conversation = new Conversation(this.closed, id, (turn) => this.#pick(turn));
    this.tree = new TreeTab(this.closed, id, (turn, branch) => this.#pick(turn, branch));
    this.log = new EventLog(this.closed, id, () => this.changed());
    this.columns = h(
      "div",
      { class: "columns" },
      this.conversation.element,
      this.log.element,
    );
    replace(
      root,
      h(
        "div",
        { class: "session-view" },
        h(
          "section",
          { class: "panel", "aria-label": "Session" },
          this.title,
          this.problem,
          this.facts,
          this.noteForm.element,
          this.folds,
        ),
        this.travel.element,
        this.timeline.element,
        h("section", { class: "panel" }, this.tree.element),
        this.columns,
      ),
    );
    this.refresh();
  }

  /** @param {string} code */
  absent(code) {
    return code === "session_not_found" ? noSession(this.id) : null;
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    const row = rows.find((one) => one.session_id === this.id);
    if (!row || row.version <= this.lastRead) return;
    this.lastNamed = Math.max(this.lastNamed, row.version);
    this.changed();
  }

  onReset() {
    this.changed();
  }

  get isBehind() {
    return Math.max(this.lastNamed, this.log.last) > this.lastRead;
  }

  /** @param {URLSearchParams} query of a link to another moment of this session */
  onQuery(query) {
    this.seq = wholeNumber(query.get("seq"), 1);
    this.turn = wholeNumber(query.get("turn"), 1);
    this.branch = wholeNumber(query.get("branch"), 0);
    this.refresh();
  }

  /** @param {number|null} seq */
  #move(seq) {
    this.seq = seq;
    this.#remember();
    this.refresh();
  }

  /** @param {number|null} turn @param {number|null} [branch] whose newest turn is meant where `turn` is null */
  #pick(turn, branch = null) {
    this.turn = turn;
    this.branch = branch;
    this.#remember();
    if (!this.session) return;
    this.#mark(this.session);
    this.#readConversation(this.session);
  }

  #remember() {
    setQuery({ seq: this.seq, turn: this.turn, branch: this.branch });
  }

  /** @param {Session} session */
  #mark(session) {
    this.timeline.update(session, this.turn);
    this.tree.update(session, { branch: this.branch, turn: this.turn });
    this.tokensLink.setAttribute("href", tokensHref(this.id, { seq: this.seq, branch: this.branch }));
  }

  refresh() {
    this.conversation.requests.abort();
    return this.read(
      async (signal) => /** @type {Session} */ (await get(this.path, { seq: this.seq }, signal)),
      (session) => {
        this.session = session;
        this.lastRead = Math.max(this.lastRead, session.last_seq);
        this.#show(session);
        return this.#readConversation(session);
      },
    );
  }

  /** @param {Session} session */
  async #readConversation(session) {
    const turn = session.turns.some((one) => one.turn === this.turn) ? this.turn : null;
    const branch = hasBranch(session, this.branch) ? this.branch : null;
    await this.conversation.update(session, turn, branch);
  }

  /** @param {Session} session */
  #show(session) {
    replace(
      this.problem,
      session.problems.map((one) => message("error", `${one.part} cannot be shown`, h("p", null, one.message))),
    );
    const at = this.seq === null ? null : this.#momentOf(session);
    this.travel.update(session.seq, session.last_seq, this.seq === null, at);
    this.#mark(session);
    this.log.mark(this.seq);
    this.log.start(session.last_seq);
    replace(this.facts, facts(session));
    const { config, metadata, turn_rewards: rewards, erased, state, status, note, tags } = session;
    this.#renew(this.title, [erased, state, status, this.seq, note, tags], () => this.#title(session));
    this.#renew(this.folds, [config, metadata, rewards], () => folds(session));
  }

  /**
   * Only where it differs: somebody may have unfolded it, or be about to press a button in it.
   * @param {Element} box
   * @param {unknown[]} parts what it shows
   * @param {() => Child} make
   */
  #renew(box, parts, make) {
    const key = JSON.stringify(parts);
    if (this.keys.get(box) === key) return;
    this.keys.set(box, key);
    const focused = [...box.querySelectorAll("a, button")].findIndex((one) => one === document.activeElement);
    replace(box, make());
    if (focused >= 0) /** @type {HTMLElement|undefined} */ ([...box.querySelectorAll("a, button")][focused])?.focus();
  }

  /** @param {Session} session @returns {number|null} when its event was, if the log has it */
  #momentOf(session) {
    return this.log.events.find((event) => event.seq === session.seq)?.at ?? null;
  }

  /** @param {Session} session @returns {Child} */
  #title(session) {
    const { seq } = this;
    return [
      h("h1", null, named(session.session_id)),
      badge(session.state),
      seq !== null && badge(`as of event ${session.seq}`, "warn"),
      this.tokensLink,
      h(
        "span",
        { class: "switches" },
        seq === null && !session.erased && button("Edit note", () => this.noteForm.open(session), { class: "quiet" }),
        copyCurl(() => ({ path: this.path, parameters: { seq } })),
        copyCurl(() => ({ path: "/export", parameters: { session_id: this.id } }), "export"),
        copyCurl(
          () => ({
            path: `/sessions/${encodeURIComponent(this.id)}/annotations/note`,
            method: "PUT",
            body: { value: session.note ?? "" },
          }),
          "note",
        ),
      ),
    ];
  }
}

/** @param {Session} session @returns {Child} */
function facts({ session_id, note, tags, config, fork, turns, tree, affinity, reward, checkpoints, created_at, closed_at, budgets, limit }) {
  const live = turns.filter((turn) => turn.live);
  const newest = live.at(-1);
  const engine = affinity?.engine ?? newest?.engine;
  const adapter = config.adapter ?? newest?.adapter;
  const discarded = turns.length - live.length;
  const sampled = live.reduce((sum, turn) => sum + turn.output_tokens, 0);
  const suffix = live.reduce((sum, turn) => sum + turn.suffix_tokens, 0);
  return [
    fact(
      "Turns",
      count(live.length),
      discarded > 0 && ` live of ${count(turns.length)}`,
      tree && `, ${count(tree.branches.length)} branches`,
      discarded > 0 && [" ", badge(`${count(discarded)} rolled back`, "warn")],
    ),
    fork != null &&
      fact(
        "Forked from",
        h("a", { href: sessionHref(fork.session, { turn: fork.turn }) }, named(fork.session)),
        ` after turn ${fork.turn}`,
        !fork.loss && h("span", { class: "note" }, " its turns are context"),
      ),
    fact("Reward", reward ? rewardParts(reward) : "none"),
    config.group_id != null &&
      fact(
        "Group",
        h("a", { href: groupHref(config.group_id) }, named(config.group_id)),
        config.attempt != null && ` attempt ${config.attempt}`,
      ),
    fact("Engine", engine ? named(engine) : "none", affinity?.control && [" by ", named(affinity.control)]),
    adapter != null && fact("Adapter", named(adapter)),
    fact("Weights", named(newest?.weight_versions.at(-1)?.version ?? "–")),
    fact("Tokens", count(sampled + suffix), h("span", { class: "note" }, ` of live turns, each once; ${count(sampled)} sampled`)),
    budgets.map((budget) => budgetFact(budget, session_id)),
    limit != null && fact("Limit reached", badge(limit, "warn")),
    note && fact("Note", textBlock(note)),
    tags.length > 0 && fact("Tags", tags.map((tag, at) => [at > 0 && ", ", h("a", { href: sessionsHref({ tag }) }, named(tag))])),
    checkpoints.length > 0 && fact("In checkpoints", inCheckpoints(session_id, checkpoints)),
    fact("Created", since(created_at)),
    closed_at != null && fact("Closed", since(closed_at), h("span", { class: "note" }, ` ${clock(closed_at)}`)),
  ];
}

/** @param {string} id @param {Session["checkpoints"]} all the oldest first @returns {Child} the newest of them */
function inCheckpoints(id, all) {
  const links = all
    .slice(-MOST_CHECKPOINTS)
    .toReversed()
    .map(({ name, seq }, at) => [
      at > 0 && ", ",
      h("a", { href: checkpointHref(name) }, name),
      " at ",
      h("a", { href: sessionHref(id, { seq }) }, `event ${seq}`),
    ]);
  const rest = all.length - links.length;
  return [links, rest > 0 && ` and ${count(rest)} older ones`];
}

/** @param {Session} session @returns {Child} */
function folds({ config, metadata, turn_rewards }) {
  const settings = Object.entries(config).filter(([, value]) => value !== null);
  const rewards = Object.entries(turn_rewards);
  const text = (/** @type {unknown} */ value) => (typeof value === "object" ? JSON.stringify(value) : value);
  return [
    rewards.length > 0 &&
      folded(
        `Rewards of ${count(rewards.length)} turns`,
        h("p", null, rewards.map(([turn, reward]) => [`turn ${turn}: `, rewardParts(reward), "; "])),
      ),
    folded(
      "Configuration",
      h("dl", { class: "sessionfacts" }, settings.map(([name, value]) => fact(name, named(text(value))))),
    ),
    metadata != null && folded("Metadata", textBlock(JSON.stringify(metadata, null, 2), "code")),
  ];
}
