/** The queue: sessions without a verdict, one after another, each in its own view below what judges it. */

import { send } from "./api.js";
import { announce, bar, button, h, message, refill, replace } from "./dom.js";
import { count } from "./format.js";
import { isForPage } from "./keys.js";
import { sessionHref, sessionsHref, setQuery } from "./route.js";
import { SessionView } from "./session.js";
import { annotationPath, VERDICT, verdictForm, WRITER } from "./verdicts.js";
import { LatestRequest, recall, View } from "./view.js";
import { named, visibleText } from "./visible.js";

/** @import {Child, SessionPage, SessionRow} from "../ui_types.d.ts" */
/** @import {Place} from "./view.js" */

/** Rows of a page, as the server has it. */
const MOST = 1000;
/** @type {Record<string, string>} the button that a key presses */
const PRESSED = { y: "passed", 1: "passed", n: "failed", 2: "failed", s: "skip", u: "undo" };

/** The list's filters and the name of what is missing; where the page is loaded anew, the query has a turn too. @param {URLSearchParams} query */
function filtersOf(query) {
  for (const name of ["turn", "branch", "brought", "seq"]) query.delete(name);
  return { unannotated: VERDICT, sort: "created_at", order: "asc", ...Object.fromEntries(query) };
}

export class JudgeView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, place) {
    super(root);
    this.overview = place.overview;
    this.progress = h("span");
    this.head = h("section", { class: "panel", "aria-label": "Queue" });
    /** @type {HTMLElement} the session's view, or that there is none */
    this.content = h("div");
    /** @type {SessionView[]} of the session to judge, and of the one after it, which is read meanwhile */
    this.views = [];
    /** @type {Map<string, boolean>} sessions that were judged here (true) or skipped, in this order */
    this.past = new Map();
    this.undoing = new LatestRequest(this.closed);
    replace(root, h("h1", { class: "visually-hidden" }, "Judge"), this.head, this.problem, this.content);
    document.addEventListener("keydown", (event) => this.#onKey(event), { signal: this.closed });
    this.closed.addEventListener("abort", () => this.views.forEach((view) => view.close()));
    /** @type {{unannotated: string, sort: string, order: string}} */
    this.filters = filtersOf(place.query);
    this.refresh();
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.filters = filtersOf(query);
    this.past.clear();
    this.refresh();
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    const [shown] = this.views;
    for (const view of this.views) view.onSessions(rows);
    // Somebody else may have judged it, or there is one again.
    if (!shown || rows.some((row) => row.session_id === shown.id)) this.changed();
  }

  onReset() {
    for (const view of this.views) view.onReset();
    this.refresh();
  }

  onFilterKey() {
    this.views[0]?.onFilterKey();
  }

  /** @param {string} [wanted] the session to show, if it is in the queue */
  refresh(wanted = this.views[0]?.id) {
    const parameters = { ...this.filters, limit: Math.min(MOST, this.past.size + 2) };
    return this.read({ path: "/ui/api/sessions", parameters }, (/** @type {SessionPage} */ { sessions, total }) => {
      const rest = sessions.map((row) => row.session_id).filter((id) => !this.past.has(id));
      const left = total - (sessions.length - rest.length);
      replace(this.progress, `${count(left)} of ${count(left + this.past.size)} left`);
      this.#show([...rest.filter((id) => id === wanted), ...rest.filter((id) => id !== wanted)]);
    });
  }

  /** @param {string[]} ids of the queue's first sessions */
  #show(ids) {
    const before = this.views;
    const viewOf = (/** @type {string} */ id) => new SessionView(h("div", { class: "judged" }), { id, query: new URLSearchParams(), overview: this.overview });
    this.views = ids.slice(0, 2).map((id) => before.find((view) => view.id === id) ?? viewOf(id));
    for (const view of before) if (!this.views.includes(view)) view.close();
    const [shown] = this.views;
    const [was] = before;
    if (was && was === shown) return;
    const gone = was && !this.past.has(was.id) && !ids.includes(was.id) ? `${visibleText(was.id)} has left the queue. ` : "";
    const skipped = h("a", { href: sessionsHref(this.filters) }, "What was skipped");
    const content = shown?.root ?? message("empty", "Nothing is left to judge.", h("p", null, skipped));
    this.content.replaceWith(content);
    this.content = content;
    setQuery(this.filters);
    refill(this.head, this.#head(shown, gone));
    if (document.activeElement === document.body) this.root.focus({ preventScroll: true });
    announce(gone + this.progress.textContent);
  }

  /** @param {SessionView|undefined} shown @param {string} gone @returns {Child} */
  #head(shown, gone) {
    const undo = this.past.size > 0 && button("Undo", () => this.#undo(), { name: "undo", title: "Take back the last (u)" });
    if (!shown) return bar([this.progress, gone], undo);
    const { id } = shown;
    const { unannotated: name } = this.filters;
    const onDone = (/** @type {string} */ written) => (written === name ? this.#pass(id, true) : form.show(name));
    const form = verdictForm(id, null, () => shown.session?.annotations[0] ?? [], onDone, name);
    const keys = h("span", { class: "muted" }, "y passed, n failed, s skip, u undo");
    const skip = button("Skip", () => this.#pass(id, false), { name: "skip", title: "The next one (s)" });
    return [bar([h("a", { href: sessionHref(id) }, named(id)), this.progress, gone], [keys, skip, undo]), form.element];
  }

  /** @param {string} id @param {boolean} isJudged */
  #pass(id, isJudged) {
    this.past.set(id, isJudged);
    this.refresh();
  }

  /** Take back the last verdict, or skip, and go back to its session. */
  #undo() {
    const [id, isJudged] = [...this.past].at(-1) ?? [""];
    const path = annotationPath(id, null, this.filters.unannotated, recall(WRITER));
    const undone = () => (this.past.delete(id), this.refresh(id));
    this.undoing.run(async (signal) => isJudged && send("DELETE", path, {}, signal), undone, (error) => this.onFailure(error));
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const name = PRESSED[event.key];
    if (!name || !isForPage(event) || event.defaultPrevented) return;
    event.preventDefault();
    /** @type {HTMLElement|null} */ (this.head.querySelector(`button[name=${name}]`))?.click();
  }
}
