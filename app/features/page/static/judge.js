/** The queue: sessions without a verdict, one after another, each in its own view below what judges it. */

import { ApiError, send } from "./api.js";
import { announce, bar, button, h, message, refill, replace } from "./dom.js";
import { count } from "./format.js";
import { isForPage } from "./keys.js";
import { sessionHref, sessionsHref, setQuery } from "./route.js";
import { SessionView } from "./session.js";
import { annotationPath, VERDICT, VerdictForm, WRITER } from "./verdicts.js";
import { recall, View } from "./view.js";
import { named, visibleText } from "./visible.js";

/** @import {Child, SessionPage, SessionRow} from "../ui_types.d.ts" */
/** @import {Place} from "./view.js" */

/** Rows of a page, as the server has it. */
const MOST = 1000;
/** @type {Record<string, string>} the button that a key presses */
const PRESSED = { y: "passed", 1: "passed", n: "failed", 2: "failed", s: "skip", u: "undo" };

export class JudgeView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, place) {
    super(root);
    this.overview = place.overview;
    this.left = h("span");
    this.head = h("section", { class: "panel", "aria-label": "Queue" });
    /** @type {SessionView|null} of the session to judge */
    this.shown = null;
    /** @type {SessionView|null} of the one after it, which is read meanwhile */
    this.next = null;
    /** @type {Map<string, boolean>} sessions that were judged here (true) or skipped, in this order */
    this.past = new Map();
    replace(root, h("h1", { class: "visually-hidden" }, "Judge"), this.head, this.problem);
    document.addEventListener("keydown", (event) => this.#onKey(event), { signal: this.closed });
    this.closed.addEventListener("abort", () => [this.shown, this.next].forEach((view) => view?.close()));
    this.onQuery(place.query);
  }

  /** @param {URLSearchParams} query the filters of the list, the name of the annotation that is missing, and a turn of who reloads the page */
  onQuery(query) {
    for (const name of ["turn", "branch", "brought", "seq"]) query.delete(name);
    this.filters = { unannotated: VERDICT, sort: "created_at", order: "asc", ...Object.fromEntries(query) };
    this.past.clear();
    this.refresh();
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    for (const view of [this.shown, this.next]) view?.onSessions(rows);
    // Somebody else may have judged it.
    if (rows.some((row) => row.session_id === this.shown?.id)) this.changed();
  }

  onFilterKey() {
    this.shown?.onFilterKey();
  }

  /** @param {string} [back] the session to go back to */
  refresh(back) {
    const parameters = { ...this.filters, limit: Math.min(MOST, this.past.size + 2) };
    return this.read({ path: "/ui/api/sessions", parameters }, (/** @type {SessionPage} */ { sessions, total }) => {
      const rest = sessions.map((row) => row.session_id).filter((id) => !this.past.has(id));
      const wanted = back ?? this.shown?.id;
      const id = rest.find((one) => one === wanted) ?? rest[0];
      this.#show(id, rest.find((one) => one !== id), total - (sessions.length - rest.length));
    });
  }

  /** @param {string|undefined} id @param {string|undefined} next @param {number} left */
  #show(id, next, left) {
    const before = [this.shown, this.next];
    const viewOf = (/** @type {string|undefined} */ of) => (of ? (before.find((view) => view?.id === of) ?? this.#viewOf(of)) : null);
    this.shown = viewOf(id);
    this.next = viewOf(next);
    for (const view of before) if (view && view !== this.shown && view !== this.next) view.close();
    const progress = `${count(left)} of ${count(left + this.past.size)} left`;
    replace(this.left, progress);
    const [was] = before;
    if (was && was === this.shown) return;
    const meanwhile = was && !this.past.has(was.id) ? `${visibleText(was.id)} was judged meanwhile. ` : "";
    was?.root.remove();
    this.root.append(this.shown?.root ?? message("empty", "Nothing is left to judge.", h("p", null, h("a", { href: sessionsHref(this.filters) }, "What was skipped"))));
    setQuery(this.filters);
    refill(this.head, this.#head(meanwhile));
    if (document.activeElement === document.body) this.root.focus({ preventScroll: true });
    announce(meanwhile + progress);
  }

  /** @param {string} meanwhile @returns {Child} */
  #head(meanwhile) {
    const { shown, past } = this;
    const name = this.filters.unannotated;
    const undo = past.size > 0 && button("Undo", () => this.#undo(), { name: "undo", title: "Take back the last (u)" });
    if (!shown) return bar(this.left, undo);
    const { id } = shown;
    const form = new VerdictForm(id, null, () => shown.session?.annotations[0] ?? [], (written) => {
      if (written === name) this.#pass(id, true);
      else form.show(name);
    }, name);
    return [
      bar([h("a", { href: sessionHref(id) }, named(id)), this.left, h("span", { class: "muted" }, meanwhile)], [
        h("span", { class: "muted" }, "y passed, n failed, s skip, u undo"),
        button("Skip", () => this.#pass(id, false), { name: "skip", title: "The next one (s)" }),
        undo,
      ]),
      form.element,
    ];
  }

  /** @param {string} id @param {boolean} isJudged */
  #pass(id, isJudged) {
    this.past.set(id, isJudged);
    this.refresh();
  }

  /** Take back the last verdict, or skip, and go back to its session. */
  async #undo() {
    const [id, isJudged] = [...this.past].at(-1) ?? [""];
    try {
      if (isJudged) await send("DELETE", annotationPath(id, null, this.filters.unannotated, recall(WRITER)));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.onFailure(error);
      return;
    }
    this.past.delete(id);
    this.refresh(id);
  }

  /** @param {string} id @returns {SessionView} that is not in the document yet */
  #viewOf(id) {
    return new SessionView(h("div", { class: "judged" }), { id, query: new URLSearchParams(), overview: this.overview });
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    if (!isForPage(event) || event.defaultPrevented) return;
    const button = this.head.querySelector(`button[name="${PRESSED[event.key]}"]`);
    if (!(button instanceof HTMLElement)) return;
    button.click();
    event.preventDefault();
  }
}
