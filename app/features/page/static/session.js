/** One session: what its agent did, turn by turn, and what there is to know of each; now or after any of its events. */

import { ActionList, cameFrom, rowsOf, timesOf } from "./actionlist.js";
import { copyCurl } from "./copy.js";
import { badge, folded, h, message, renew, replace } from "./dom.js";
import { EventsTab } from "./events.js";
import { amount, clock, compact, count, duration, since } from "./format.js";
import { changeQuery, checkpointHref, groupHref, sessionHref, wholeNumber } from "./route.js";
import { TokensTab } from "./tokens.js";
import { TreeTab } from "./tree.js";
import { TranscriptTab } from "./transcript.js";
import { verdicts } from "./verdicts.js";
import { SessionPart, View } from "./view.js";
import { named, textBlock } from "./visible.js";

/** @import {Budget, Child, Session, SessionRow} from "../ui_types.d.ts" */
/** @import {Place} from "./view.js" */

/** The newest checkpoints are named; a run may make hundreds. */
const MOST_CHECKPOINTS = 5;
/** So long after the last scrolling the turn in sight stands in the address. */
const REST_MS = 250;

/** @typedef {{element: HTMLElement, update: (session: Session, at: {turn: number|null, branch: number|null, seq: number|null, isNew: boolean}) => void}} Tab */
/** @typedef {"tokens"|"events"|"tree"} Other */
/** @typedef {"transcript"|Other} TabName */
/** @type {Record<Other, new (...given: ConstructorParameters<typeof SessionPart>) => Tab>} */
const TABS = { tokens: TokensTab, events: EventsTab, tree: TreeTab };

/** @param {string} name @param {...Child} value @returns {HTMLElement} */
function fact(name, ...value) {
  return h("div", null, h("dt", null, name), h("dd", null, ...value));
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

/** @param {URLSearchParams} query */
function placeOf(query) {
  const name = query.get("tab") ?? "";
  return {
    turn: wholeNumber(query.get("turn"), 1),
    branch: wholeNumber(query.get("branch"), 0),
    /** What the turn's request brought is meant: it stands beside the turn before. */
    brought: query.has("brought"),
    seq: wholeNumber(query.get("seq"), 1),
    tab: name in TABS ? /** @type {TabName} */ (name) : /** @type {const} */ ("transcript"),
  };
}

export class SessionView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { id, query }) {
    super(root, "session", id);
    /** Of the session's routes for everybody, and of the page's own. */
    this.stable = `/sessions/${encodeURIComponent(id)}`;
    this.path = `/ui/api${this.stable}`;
    /** @type {Session|null} as it is shown */
    this.session = null;
    /** The last event that was read, and the last that the live stream named. */
    this.lastRead = 0;
    this.lastNamed = 0;
    /** Without a turn in the address: has one been in flight? Then the newest is shown. */
    this.isFollowing = false;
    this.at = placeOf(query);
    this.head = h("div", { class: "sessionhead" });
    this.verdicts = h("div");
    this.more = h("div", { class: "folds" });
    this.details = folded("Details", this.more, "sessiondetails");
    const pick = (/** @type {number|null} */ turn, /** @type {number|null} */ branch) => this.#pick(turn, branch);
    this.list = new ActionList(this.closed, id, pick, {
      known: () => this.session && this.#mark(this.session),
      found: (text, turns) => this.#found(text, turns),
      step: (by) => this.transcript.step(by),
      failed: () => this.transcript.seeFailed(),
    });
    this.transcript = new TranscriptTab(this.closed, id, pick, (turn) => this.#see(turn), (turn) => this.list.lineOf(turn));
    /** @type {{transcript: Tab} & Partial<Record<Other, Tab>>} the others are made when they are first shown */
    this.made = { transcript: this.transcript };
    this.resting = 0;
    this.closed.addEventListener("abort", () => clearTimeout(this.resting));
    this.tabs = h("nav", { class: "tabs", "aria-label": "What is shown of the session" });
    this.content = h("div", { class: "tabcontent", tabindex: "0", role: "region", "aria-label": "The session" });
    replace(
      root,
      h(
        "div",
        { class: "session-view" },
        h("section", { class: "panel sessionpanel", "aria-label": "Session" }, this.head, this.problem, this.verdicts, this.details),
        h("div", { class: "panes" }, this.list.element, h("section", { class: "pane", "aria-label": "Turn" }, this.tabs, this.content)),
      ),
    );
    this.refresh();
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
    return this.lastNamed > this.lastRead;
  }

  onFilterKey() {
    this.list.search.focus();
  }

  /** @param {URLSearchParams} query of a link to another turn, tab or moment of this session */
  onQuery(query) {
    const { seq } = this.at;
    this.at = placeOf(query);
    if (this.session && seq === this.at.seq) this.#mark(this.session);
    else this.refresh();
  }

  /** @param {number|null} turn @param {number|null} branch whose newest turn is meant where `turn` is null @param {number|null} [seq] */
  #pick(turn, branch, seq = this.at.seq) {
    const isHere = seq === this.at.seq;
    this.at = { ...this.at, turn, branch, seq, brought: false };
    changeQuery({ turn, branch, seq, brought: null });
    if (this.session && isHere) this.#mark(this.session);
    else this.refresh();
    // On a phone the turn stands below the list.
    if (this.tabs.getBoundingClientRect().top > innerHeight / 2) this.tabs.scrollIntoView();
  }

  /** Somebody scrolled to a turn. @param {number} turn */
  #see(turn) {
    this.at = { ...this.at, turn, brought: false };
    this.list.mark(turn);
    clearTimeout(this.resting);
    this.resting = setTimeout(() => {
      changeQuery({ turn, brought: null });
      if (this.session) this.#showTabs(this.session);
    }, REST_MS);
  }

  /** @param {string} text @param {number[]} turns that have it */
  #found(text, turns) {
    if (text && this.at.tab !== "transcript") {
      this.at.tab = "transcript";
      changeQuery({ tab: null });
      if (this.session) this.#mark(this.session);
    }
    this.transcript.search(text, turns);
  }

  /** @param {Session} session @returns {number|null} the turn to show: that of the address, else the first, or in flight the newest */
  #chosen({ turns, failed_turns, open_turns, tree }) {
    const all = [...turns, ...failed_turns, ...open_turns].map((one) => one.turn);
    if (this.at.turn !== null && all.includes(this.at.turn)) return this.at.brought ? cameFrom(turns, this.at.turn) : this.at.turn;
    const leaf = tree?.branches.find((one) => one.branch === this.at.branch)?.leaf;
    if (leaf !== undefined) return leaf;
    this.isFollowing ||= open_turns.length > 0;
    return this.isFollowing ? Math.max(...all) : (turns[0]?.turn ?? failed_turns[0]?.turn ?? null);
  }

  /** @param {Session} session */
  #mark(session) {
    clearTimeout(this.resting);
    const turn = this.#chosen(session);
    if (this.at.tab === "tree" && !session.tree) this.at.tab = "transcript";
    const { seq, tab: name } = this.at;
    const branch = this.#branchOf(session);
    this.list.update(session, { turn, branch });
    this.#showTabs(session);
    const tab = name === "transcript" ? this.transcript : (this.made[name] ??= new TABS[name](this.closed, this.id, (...place) => this.#pick(...place)));
    const isNew = this.content.firstChild !== tab.element;
    if (isNew) {
      replace(this.content, tab.element);
      this.content.scrollTop = 0;
    }
    tab.update(session, { turn, branch, seq, isNew });
  }

  /** @param {Session} session @returns {number|null} the branch of the address, if there is one */
  #branchOf({ tree }) {
    return tree?.branches.some((one) => one.branch === this.at.branch) ? this.at.branch : null;
  }

  /** @param {Session} session */
  #showTabs(session) {
    const { turn, seq, tab } = this.at;
    const branch = this.#branchOf(session);
    const names = /** @type {TabName[]} */ (["transcript", ...Object.keys(TABS)]).filter((one) => one !== "tree" || session.tree);
    const href = (/** @type {TabName} */ one) => sessionHref(this.id, { turn, branch, seq, tab: one === "transcript" ? null : one });
    renew(this.tabs, [names, this.at, branch], () =>
      names.map((one) => h("a", { href: href(one), "aria-current": one === tab ? "page" : null }, one.charAt(0).toUpperCase() + one.slice(1))),
    );
  }

  refresh() {
    return this.read({ path: this.path, parameters: { seq: this.at.seq } }, (/** @type {Session} */ session) => {
      this.session = session;
      this.lastRead = Math.max(this.lastRead, session.last_seq);
      this.#show(session);
    });
  }

  /** @param {Session} session */
  #show(session) {
    replace(
      this.problem,
      session.problems.map((one) => message("error", `${one.part} cannot be shown`, h("p", null, one.message))),
    );
    this.#mark(session);
    renew(this.head, [session.seq, this.at.seq, session.last_seq, session.state, session.failed], () => this.#head(session));
    const { config, metadata, annotations, reward, erased, note, budgets, checkpoints, seq } = session;
    renew(this.verdicts, [annotations[0], reward, erased, seq === session.last_seq], () => verdicts(this.id, null, session, () => this.refresh()));
    renew(this.more, [config, metadata, note, budgets, checkpoints, seq], () => this.#details(session));
  }

  /** @param {Session} session @returns {Child} */
  #head(session) {
    const { session_id, state, failed: failure, seq, last_seq, config, turns, tree, open_turns, limit } = session;
    const live = turns.filter((turn) => turn.live);
    const rows = rowsOf(session, null).filter((row) => !row.turn || row.turn.live);
    const begin = rows.find((row) => row.begin !== null)?.begin ?? null;
    const end = rows.reduce((last, row) => Math.max(last, row.end ?? 0), 0);
    const { generating, failed, environment, isParallel } = timesOf(rows, end - (begin ?? end));
    const sampled = live.reduce((sum, turn) => sum + turn.output_tokens, 0);
    const suffix = live.reduce((sum, turn) => sum + turn.suffix_tokens, 0);
    const branches = tree ? `, ${count(tree.branches.length)} branches` : "";
    return [
      h("h1", null, named(session_id)),
      badge(state),
      this.at.seq !== null && [badge(`as of event ${seq} of ${last_seq}`, "warn"), h("a", { href: sessionHref(this.id, { tab: this.at.tab }) }, "live")],
      failure && h("span", null, badge(`failed: ${failure.kind}`, "bad"), failure.message && [" ", named(failure.message)]),
      config.group_id != null &&
        h("span", null, h("a", { href: groupHref(config.group_id, config.run ?? undefined) }, named(config.group_id)), config.attempt != null && ` attempt ${config.attempt}`),
      h("span", null, `${amount(live.length, "turn")}${branches}`),
      begin !== null &&
        h(
          "span",
          { title: "from the first turn to the last; generating, and the time between a turn and the next: the environment's" },
          open_turns.length ? since(begin, "for") : duration(end - begin),
          h(
            "span",
            { class: "note" },
            isParallel || open_turns.length ? " ≈ " : " = ",
            [h("i", { class: "key gen" }), ` ${duration(generating)} generating + `, failed > 0 && `${duration(failed)} in failed turns + `],
            [h("i", { class: "key env" }), ` ${duration(environment)} environment`, isParallel && ", some of it at once"],
            open_turns.length > 0 && [" + ", since(Math.min(...open_turns.map((one) => one.opened_at)), "for"), " in flight"],
          ),
        ),
      h("span", { title: `${count(sampled + suffix)} of live turns, each once; ${count(sampled)} sampled` }, `${compact(sampled + suffix)} tokens`, h("span", { class: "note" }, `, ${compact(sampled)} sampled`)),
      session.engine_errors > 0 && badge(amount(session.engine_errors, "engine error"), "bad"),
      session.tool_errors > 0 && badge(amount(session.tool_errors, "tool error"), "warn"),
      limit != null && badge(`limit: ${limit}`, "warn"),
    ];
  }

  /** @param {Session} session @returns {Child} */
  #details(session) {
    const { session_id, note, config, fork, turns, affinity, checkpoints, created_at, closed_at, budgets, metadata } = session;
    const newest = turns.findLast((turn) => turn.live);
    const engine = affinity?.engine ?? newest?.engine;
    const discarded = turns.filter((turn) => !turn.live).length;
    const text = (/** @type {unknown} */ value) => (typeof value === "object" ? JSON.stringify(value) : value);
    const checkpoint = (/** @type {Session["checkpoints"][number]} */ { run, name, seq }, /** @type {number} */ at) =>
      [at > 0 && ", ", h("a", { href: checkpointHref(name, run) }, name), " at ", h("a", { href: sessionHref(session_id, { seq }) }, `event ${seq}`)];
    const settings = Object.entries(config).filter(([, value]) => value !== null);
    return [
      h(
        "dl",
        { class: "sessionfacts" },
        fork != null &&
          fact(
            "Forked from",
            h("a", { href: sessionHref(fork.session, { turn: fork.turn }) }, named(fork.session)),
            ` after turn ${fork.turn}`,
            !fork.loss && h("span", { class: "note" }, " its turns are context"),
          ),
        discarded > 0 && fact("Rolled back", `${count(discarded)} of ${count(turns.length)} turns`),
        engine && fact("Engine", named(engine), affinity?.control && [", chosen by ", named(affinity.control)]),
        fact("Weights", named(newest?.weight_versions.at(-1)?.version ?? "–")),
        budgets.map((budget) => budgetFact(budget, session_id)),
        checkpoints.length > 0 && fact(`In ${amount(checkpoints.length, "checkpoint")}`, checkpoints.slice(-MOST_CHECKPOINTS).toReversed().map(checkpoint)),
        fact("Created", since(created_at), h("span", { class: "note" }, ` ${clock(created_at)}`)),
        closed_at != null && fact("Closed", since(closed_at), h("span", { class: "note" }, ` ${clock(closed_at)}`)),
      ),
      folded("Configuration", h("dl", { class: "sessionfacts" }, settings.map(([name, value]) => fact(name, named(text(value)))))),
      metadata != null && folded("Metadata", textBlock(JSON.stringify(metadata, null, 2), "code")),
      h(
        "span",
        { class: "switches" },
        copyCurl(() => ({ path: this.stable })),
        copyCurl(() => ({ path: `${this.stable}/messages` }), "messages"),
        copyCurl(() => ({ path: "/export", parameters: { session_id: this.id } }), "export"),
        copyCurl(() => ({ path: `${this.stable}/annotations/note`, method: "PUT", body: { value: note ?? "" } }), "note"),
      ),
    ];
  }
}
