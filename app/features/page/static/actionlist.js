/** A session's turns as what they did, with one time axis for all. */

import { arrange, badge, button, failure, h, icon, renew, replace, setText } from "./dom.js";
import { amount, count, duration, serverNow, since } from "./format.js";
import { isForPage, isNowhere } from "./keys.js";
import { sessionHref } from "./route.js";
import { every, LatestRequest, SessionPart } from "./view.js";
import { actionText, named } from "./visible.js";

/** @import {Child, FailedTurn, OpenTurn, Session, Turn, TurnActions, TreeBranch} from "../ui_types.d.ts" */

/** Turns of one request, as the server has it. */
const MOST = 100;
const SETTLE_MS = 250;
const TICK_MS = 1000;
const BRANCHES = 200;

/**
 * A row. Times are seconds since the epoch: it generated from `begin` to `end`, and its environment worked until `next`.
 * `child`: the turn whose request brought its results, perhaps in flight. `begins`: the branch that begins here.
 * @typedef {object} Row
 * @property {"asked"|"turn"|"failed"|"open"|"refused"} kind "asked": what a conversation begins with; "refused": a limit refused a request
 * @property {number} number of the turn
 * @property {Turn|null} turn
 * @property {FailedTurn|null} failed
 * @property {OpenTurn|null} open
 * @property {Session["refused"][number]|null} refused
 * @property {number} order the event with which it began
 * @property {number|null} begin
 * @property {number|null} end
 * @property {number|null} next
 * @property {number|null} child
 * @property {TreeBranch|null} begins
 * @property {string|null} agent
 */

/**
 * @param {Session} session
 * @param {number|null} branch only what led to its newest turn; null: all turns
 * @returns {Row[]} in the order in which they began
 */
export function rowsOf({ turns, failed_turns, refused, open_turns, tree }, branch) {
  const path = branch === null || !tree ? null : pathOf(tree, branch);
  const children = Map.groupBy([...turns, ...open_turns], (one) => one.parent);
  const first = tree?.turns.filter(({ cause }) => cause && cause !== "start") ?? [];
  const begins = new Map(first.map(({ turn, branch }) => [turn, tree?.branches.find((one) => one.branch === branch)]));
  const agents = new Map(tree?.turns.map((one) => [one.turn, one.agent_id]));
  const nothing = { turn: null, failed: null, open: null, refused: null, begin: null, end: null, next: null, child: null, begins: null, agent: null };
  /** @type {Row[]} */
  const rows = [];
  for (const turn of turns) {
    const { turn: number, fence: order, opened_at: begin, committed_at, live } = turn;
    if (path && !path.has(number)) continue;
    const after = (children.get(number) ?? []).filter((one) => !path || path.has(one.turn));
    const alive = after.filter((one) => !("live" in one) || one.live);
    // A sub-agent may have gone on from here first.
    const next = alive.find((one) => agents.get(one.turn) === agents.get(number)) ?? alive[0] ?? after[0];
    const again = tree ? null : failed_turns.find((one) => one.fence > turn.seq && (!next || one.fence < next.fence));
    const end = begin === null ? null : committed_at;
    const isRoot = turn.parent === 0 || turn.segment_cause === "divergence";
    if (isRoot) rows.push({ ...nothing, kind: "asked", number, turn, order: order - 0.5 });
    rows.push({
      ...nothing,
      ...{ kind: "turn", number, turn, order, begin, end, begins: begins.get(number) ?? null, agent: agents.get(number) ?? null },
      next: live && end !== null ? (again ?? next)?.opened_at ?? null : null,
      child: next && !("segment_cause" in next && next.segment_cause === "divergence") ? next.turn : null,
    });
  }
  for (const one of path ? [] : failed_turns)
    rows.push({ ...nothing, kind: "failed", number: one.turn, failed: one, order: one.fence, begin: one.opened_at, end: one.ended_at });
  for (const one of refused)
    if (!path || path.has(one.turn)) rows.push({ ...nothing, kind: "refused", number: one.turn, refused: one, order: one.seq, begin: null });
  for (const one of open_turns)
    if (!path || path.has(one.parent)) rows.push({ ...nothing, kind: "open", number: one.turn, open: one, order: one.fence, begin: one.opened_at });
  return rows.sort((one, other) => one.order - other.order);
}

/** @param {NonNullable<Session["tree"]>} tree @param {number} branch @returns {Set<number>} its turns and those before them */
function pathOf({ turns, branches }, branch) {
  const parents = new Map(turns.map((one) => [one.turn, one.parent]));
  /** @type {Set<number>} */
  const path = new Set();
  for (let at = branches.find((one) => one.branch === branch)?.leaf; at; at = parents.get(at)) path.add(at);
  return path;
}

/** @param {Row[]} rows @param {number} total from the first turn to the last @returns seconds; what runs at once counts each time */
export function timesOf(rows, total) {
  const sum = (/** @type {(row: Row) => number} */ of) => rows.reduce((before, row) => before + Math.max(0, of(row)), 0);
  const took = (/** @type {boolean} */ hasFailed) =>
    sum(({ kind, begin, end }) => ((kind === "failed") === hasFailed ? (end ?? begin ?? 0) - (begin ?? 0) : 0));
  let last = -Infinity;
  let isParallel = false;
  for (const { begin, end } of rows) {
    isParallel ||= begin !== null && begin < last;
    last = Math.max(last, end ?? last);
  }
  const [generating, failed] = [took(false), took(true)];
  const between = sum(({ end, next }) => (end === null || next === null ? 0 : next - end));
  return { generating, failed, isParallel, environment: isParallel ? between : Math.max(0, total - generating - failed) };
}

/** @param {Turn[]} turns @param {number} number @returns {number} the turn beside which the results stand that this one brought */
export function cameFrom(turns, number) {
  const turn = turns.find((one) => one.turn === number);
  return turn?.parent && turn.segment_cause !== "divergence" ? turn.parent : number;
}

/** What a session's view does with a list's news. @typedef {{known: () => void, found: (text: string, turns: number[]) => void, step: (by: 1|-1) => void, failed: () => void}} Hears */

export class ActionList extends SessionPart {
  /** @type {Row[]} */
  all = [];
  /** @type {Row[]} those that the search has left */
  rows = [];
  /** @type {Map<number, TurnActions>} */
  known = new Map();
  /** @type {Map<number, HTMLElement>} the rows' elements, by their order */
  shown = new Map();
  /** @type {number|null} */
  branch = null;
  /** @type {Set<number>|null} the turns that have the text that is searched */
  matches = null;
  settling = 0;

  /** @param {AbortSignal} closed @param {string} id @param {(turn: number|null, branch: number|null) => void} pick @param {Hears} hears */
  constructor(closed, id, pick, hears) {
    super(closed, id, pick);
    this.hears = hears;
    this.searching = new LatestRequest(closed);
    this.list = h("ol", { class: "acts", "aria-label": "Turns" });
    this.problem = h("div");
    this.scroller = h("div", { class: "actscroll" }, this.list);
    this.search = h("input", { type: "search", placeholder: "Search this session", "aria-label": "Search this session" });
    this.hits = h("span", { class: "note", role: "status" });
    this.errors = h("span", { class: "note" });
    this.branches = h("select", { "aria-label": "Branch", hidden: true });
    this.length = h("span");
    const titles = ["", "action, result", [h("span", null, "0"), this.length], "time", "tokens"];
    const stepper = (/** @type {"left"|"right"|"end"} */ sign, /** @type {string} */ label, /** @type {() => void} */ go) =>
      button(icon(sign), go, { title: label, "aria-label": label });
    this.element = h(
      "section",
      { class: "pane actions", "aria-label": "Turns" },
      h(
        "div",
        { class: "acttools" },
        this.search,
        this.hits,
        this.branches,
        h("span", { class: "spacer" }),
        this.errors,
        stepper("left", "previous error (E)", () => this.#step(-1, this.#isError)),
        stepper("right", "next error (e)", () => this.#step(1, this.#isError)),
        stepper("end", "last turn (End)", () => this.#go(this.rows.length - 1)),
      ),
      h("div", { class: "acthead", "aria-hidden": "true" }, titles.map((title) => h("span", null, title))),
      this.problem,
      this.scroller,
    );
    document.addEventListener("keydown", (event) => this.#onKey(event), { signal: closed });
    every(closed, TICK_MS, () => this.session?.open_turns.length && this.#measure());
    closed.addEventListener("abort", () => clearTimeout(this.settling));
    this.list.addEventListener("click", (event) => {
      const link = event.target instanceof Element ? event.target.closest("a") : null;
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      this.pick(Number(link.dataset.turn), this.branch);
    });
    this.branches.addEventListener("change", () => this.pick(null, this.branches.value === "" ? null : Number(this.branches.value)));
    this.search.addEventListener("input", () => {
      clearTimeout(this.settling);
      this.settling = setTimeout(() => this.find(), SETTLE_MS);
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") hears.step(event.shiftKey ? -1 : 1);
    });
  }

  /** @param {Session} session @param {{turn: number|null, branch: number|null}} at */
  update(session, { turn, branch }) {
    const isElsewhere = turn !== this.turn || branch !== this.branch || this.session === null;
    this.session = session;
    this.branch = branch;
    this.all = rowsOf(session, branch);
    this.#showBranches(session);
    this.#render(session);
    if (isElsewhere) this.mark(turn);
    this.#ask(session);
  }

  /** @param {number|null} turn that is shown */
  mark(turn) {
    this.turn = turn;
    for (const link of this.list.querySelectorAll("[aria-current]")) link.removeAttribute("aria-current");
    const element = this.#elementOf(this.rows[this.#at]);
    if (!element) return;
    element.firstElementChild?.setAttribute("aria-current", "true");
    const { scrollTop, clientHeight } = this.scroller;
    const { offsetTop: top, offsetHeight: height } = element;
    // The first turn is seen with what it was asked.
    const first = top - (element.previousElementSibling?.matches(".asked") ? height : 0);
    if (first < scrollTop) this.scroller.scrollTop = first;
    else if (top + height > scrollTop + clientHeight) this.scroller.scrollTop = top - clientHeight / 2;
  }

  /** @param {number} turn @returns {string} what it did, as far as it is known */
  lineOf(turn) {
    const action = this.known.get(turn)?.actions[0];
    return action ? actionText(action) : "";
  }

  /** @param {Session} session */
  #showBranches({ tree }) {
    this.branches.hidden = tree === null;
    const options = (tree?.branches ?? []).slice(0, BRANCHES).map(({ branch, cause, agent_id, turns }) =>
      h("option", { value: branch }, [`branch ${branch}`, cause, agent_id, `${count(turns)} turns`].filter(Boolean).join(" · ")),
    );
    if (this.branches.options.length !== options.length + 1) replace(this.branches, h("option", { value: "" }, "all branches"), options);
    this.branches.value = String(this.branch ?? "");
  }

  /** Look for what the field has. */
  find() {
    const text = this.search.value.trim();
    const show = (/** @type {number[]} */ turns) => {
      this.matches = text ? new Set(turns) : null;
      if (this.session) this.#render(this.session);
      setText(this.hits, text ? amount(this.rows.length, "turn") : "");
      this.mark(this.turn);
      this.hears.found(text, text ? this.rows.map((row) => row.number) : []);
    };
    this.searching.abort();
    if (!text) return show([]);
    return this.searching.run(
      { path: `${this.path}/find`, parameters: { text } },
      // A result stands under the call that it answers.
      (/** @type {{turns: number[], brought: number[]}} */ { turns, brought }) => show([...turns, ...brought.map((turn) => cameFrom(this.session?.turns ?? [], turn))]),
      (error) => replace(this.problem, failure(error)),
    );
  }

  /** @param {Row} row */
  #isError = (row) => row.kind === "failed" || (row.child !== null && !!this.known.get(row.child)?.failed);

  /** @param {Row|undefined} row */
  #elementOf(row) {
    return row && this.shown.get(row.order);
  }

  /** @param {Session} session */
  #render(session) {
    const { matches } = this;
    this.rows = matches ? this.all.filter((row) => matches.has(row.number) && row.kind !== "asked") : this.all;
    const found = this.all.filter(this.#isError).length;
    setText(this.errors, found ? amount(found, "error") : "no errors");
    this.shown = new Map(
      this.rows.map((row) => {
        // A row that changes stays the same element: it may have the focus, or be about to be clicked.
        const element = this.#elementOf(row) ?? h("li", null, h("a", { dataset: { turn: row.number } }));
        const shown = [row, this.known.get(row.number), this.known.get(row.child ?? 0), session.annotations[row.number]];
        const link = /** @type {HTMLAnchorElement} */ (element.firstElementChild);
        element.className = `act ${row.kind}${row.turn?.live === false ? " discarded" : ""}`;
        link.href = sessionHref(this.id, { turn: row.number, branch: this.branch });
        renew(link, shown, () => this.#line(row, session));
        return [row.order, element];
      }),
    );
    arrange(this.list, [...this.shown.values()]);
    this.#measure();
  }

  /** The one axis of the session: seconds since it was created. */
  #measure() {
    const now = this.session?.open_turns.length ? [serverNow()] : [];
    const times = this.all.flatMap(({ begin, end }) => [begin, end]).filter((one) => one !== null);
    const from = times.reduce((least, one) => Math.min(least, one), Infinity);
    const to = [...times, ...now].reduce((most, one) => Math.max(most, one), -Infinity);
    this.list.style.setProperty("--from", String(times.length ? from - (this.session?.created_at ?? 0) : 0));
    this.list.style.setProperty("--length", String(Math.max(1e-3, times.length ? to - from : 0)));
    setText(this.length, times.length ? duration(to - from) : "");
  }

  /** Read what turns did, those around the chosen one first. @param {Session} session */
  #ask({ turns, erased }) {
    if (this.requests.isRunning || this.problem.hasChildNodes() || erased) return;
    const unknown = turns.map((one) => one.turn).filter((one) => !this.known.has(one));
    const start = unknown.find((one) => one > (this.turn ?? 0) - MOST / 2) ?? unknown[0];
    if (start === undefined) return;
    this.requests.run(
      { path: `${this.path}/actions`, parameters: { start, limit: MOST } },
      (/** @type {TurnActions[]} */ known) => {
        const nothing = { actions: [], results: [], failed: 0, error: null };
        for (const turn of unknown) if (turn >= start && turn < start + MOST) this.known.set(turn, { turn, ...nothing });
        for (const turn of known) this.known.set(turn.turn, turn);
        this.hears.known();
      },
      (error) => replace(this.problem, failure(error, () => (replace(this.problem), this.hears.known()))),
    );
  }

  /** @param {Row} row @param {Session} session @returns {Child} */
  #line(row, { created_at: zero }) {
    const { kind, number, turn, failed, begin, end, next } = row;
    return [
      h("span", { class: "n" }, kind === "asked" || kind === "refused" ? "" : number),
      h("span", { class: "what" }, this.#what(row)),
      h("span", { class: "res" }, this.#result(row)),
      h("span", { class: "wf", "aria-hidden": "true" }, barOf("gen", begin, end, zero, kind === "open"), barOf("env", end, next, zero)),
      h("span", { class: "time" }, kind === "open" ? since(begin, "for") : begin === null ? "" : duration((end ?? begin) - begin)),
      h("span", { class: "env" }, end !== null && next !== null && `+ ${duration(next - end)}`),
      h("span", { class: "size" }, kind === "turn" && turn && count(turn.output_tokens)),
      h("span", { class: `fin ${turn?.finish_reason ?? ""}` }, kind === "turn" ? named(turn?.finish_reason ?? "") : failed ? failed.status : ""),
    ];
  }

  /** @param {Row} row @returns {Child} what it did */
  #what({ kind, number, turn, failed, refused, begins, agent }) {
    if (refused) return [badge("refused", "warn"), ` the limit on ${refused.limit} is reached`];
    if (kind === "open") return badge("in flight", "running");
    if (failed) return [badge(failed.kind, failed.kind === "rejected" ? "bad" : "warn"), " ", named(failed.reason)];
    const known = this.known.get(number);
    if (kind === "asked") {
      const asked = known?.results.findLast((one) => one.role === "user") ?? known?.results.at(-1);
      return asked ? [h("strong", null, named(asked.role)), " ", named(asked.text)] : h("span", { class: "note" }, "prompt");
    }
    const [first, ...more] = known?.actions ?? [];
    return [
      begins && [h("span", { class: "flag" }, icon("branch"), ` ${begins.branch} ${begins.cause}`), " "],
      agent !== null && [h("code", { class: "note" }, named(agent)), " "],
      turn?.live === false && [badge("rolled back", "warn"), " "],
      turn?.segment_cause && [badge(`new segment: ${turn.segment_cause}`, "warn"), " "],
      known?.error && badge("unreadable", "bad"),
      first && (first.tool === null ? h("span", { class: "says" }, named(first.text)) : [h("strong", null, named(first.tool)), " ", h("code", null, named(first.text))]),
      more.length > 0 && h("span", { class: "note" }, ` + ${more.map((one) => one.tool).join(", ")}`),
      (this.session?.annotations[number] ?? []).map(({ name }) => h("span", { class: "note" }, " ", icon("pencil"), " ", named(name))),
    ];
  }

  /** @param {Row} row @returns {Child} what came of it */
  #result({ kind, open, failed, child }) {
    if (failed) return failed.detail && named(failed.detail);
    if (open) return open.adapter !== null && ["adapter ", named(open.adapter)];
    if (kind === "asked" || child === null) return null;
    const results = this.known.get(child)?.results ?? [];
    const first = results.find((one) => one.failed) ?? results[0];
    return (
      first && [
        first.failed ? badge("error", "bad") : first.role === "tool" ? "→" : h("strong", null, named(first.role)),
        " ",
        named(first.text || "nothing"),
        results.length > 1 && h("span", { class: "note" }, ` + ${count(results.length - 1)}`),
      ]
    );
  }

  /** @returns {number} the row that is picked, -1 for none */
  get #at() {
    return this.rows.findIndex((row) => row.number === this.turn && row.kind !== "asked");
  }

  /** @param {number} by @param {(row: Row) => boolean} [isWanted] */
  #step(by, isWanted = (row) => row.kind !== "asked" && row.kind !== "refused") {
    let index = this.#at;
    if (index < 0 && by < 0) index = this.rows.length;
    do index += by;
    while (this.rows[index] && !isWanted(/** @type {Row} */ (this.rows[index])));
    this.#go(index);
    if (isWanted === this.#isError) this.hears.failed();
  }

  /** @param {number} index */
  #go(index) {
    const row = this.rows[index];
    if (!row) return;
    const hadFocus = this.list.contains(document.activeElement);
    this.pick(row.number, this.branch);
    if (hadFocus || isNowhere()) this.#elementOf(row)?.querySelector("a")?.focus({ preventScroll: true });
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    if (!isForPage(event) || !this.list.checkVisibility()) return;
    const isInside = this.list.contains(document.activeElement);
    if (event.key === "j") this.#step(1);
    else if (event.key === "k") this.#step(-1);
    else if (event.key === "e") this.#step(1, this.#isError);
    else if (event.key === "E") this.#step(-1, this.#isError);
    else if (event.key === "Home" && isInside) this.#go(this.rows.findIndex((row) => row.kind !== "asked"));
    else if (event.key === "End" && (isInside || isNowhere())) this.#go(this.rows.length - 1);
    else return;
    event.preventDefault();
  }
}

/** @param {string} kind @param {number|null} from @param {number|null} to @param {number} zero @param {boolean} [isOpen] it has no end yet @returns {Child} */
function barOf(kind, from, to, zero, isOpen) {
  if (from === null || (!isOpen && (to === null || to <= from))) return null;
  return h("i", { class: isOpen ? `${kind} open` : kind, style: { "--begin": from - zero, "--end": (to ?? from) - zero } });
}
