/** What all views share: their end, their requests, and how they keep up with changes. */

import { ApiError, get } from "./api.js";
import { copyCurl } from "./copy.js";
import { bar, button, failure, h, message, replace } from "./dom.js";
import { listHref } from "./route.js";
import { visibleText } from "./visible.js";

/** @import {Asked, Child, Command, Overview, Session, SessionRow} from "../ui_types.d.ts" */
/** @typedef {import("../ui_types.d.ts").Place} Place */

/**
 * What stands in place of a view if what its address names does not exist; the view is shown as soon as it does.
 * @type {Record<string, {code: string, why: string, all: string}>} `code`: of the refusal
 */
const MISSING = {
  session: { code: "session_not_found", why: "Check the spelling: an id is matched exactly.", all: "" },
  group: { code: "not_found", why: "No session has this group_id.", all: "groups" },
  checkpoint: { code: "not_found", why: "It may have been deleted.", all: "checkpoints" },
  run: { code: "not_found", why: "It has no sessions, limits or note.", all: "runs" },
};

/** A view is read anew at most so often, and never more than a part of the time that reading takes. */
const REFRESH_MS = 500;
const REFRESH_SHARE = 4;

/** @param {string} name @returns {string|null} what this browser remembers under the name; without a storage nothing */
export function recall(name) {
  return stored(() => localStorage.getItem(`turnlog ${name}`));
}

/** @param {string} name @param {string} value kept in this browser */
export function remember(name, value) {
  stored(() => localStorage.setItem(`turnlog ${name}`, value));
}

/** @template T @param {() => T} use @returns {T|null} null: the browser has no storage for pages, or it is full */
function stored(use) {
  try {
    return use();
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
    return null;
  }
}

/** One request at a time: a newer one aborts the one before, and so does the end of `closed`. */
export class LatestRequest {
  /** @param {AbortSignal} closed */
  constructor(closed) {
    this.closed = closed;
    this.current = /** @type {AbortController|null} */ (null);
  }

  get isRunning() {
    return this.current !== null;
  }

  abort() {
    this.current?.abort();
    this.current = null;
  }

  /**
   * Neither `done` nor `failed` is called once the request is aborted.
   * @template T @param {Asked<T>} request @param {(value: T) => void} done @param {(error: unknown) => void} failed
   */
  async run(request, done, failed) {
    this.abort();
    const current = new AbortController();
    const signal = AbortSignal.any([current.signal, this.closed]);
    this.current = current;
    let value;
    try {
      const got = typeof request === "function" ? request(signal) : get(request.path, request.parameters, signal);
      value = /** @type {T} */ (await got);
    } catch (error) {
      if (signal.aborted) return;
      this.current = null;
      failed(error);
      return;
    }
    if (signal.aborted) return;
    this.current = null;
    done(value);
  }
}

/** A part of a session's view. */
export class SessionPart {
  /**
   * @param {AbortSignal} closed
   * @param {string} id of the session
   * @param {(turn: number|null, branch: number|null, seq?: number|null) => void} pick show another turn, or a branch's newest
   */
  constructor(closed, id, pick) {
    this.closed = closed;
    this.id = id;
    this.pick = pick;
    this.path = `/ui/api/sessions/${encodeURIComponent(id)}`;
    this.requests = new LatestRequest(closed);
    /** As they are shown. */
    this.session = /** @type {Session|null} */ (null);
    this.turn = /** @type {number|null} */ (null);
  }
}

export class View {
  #life = new AbortController();
  #hasChanged = false;
  #isFollowing = false;
  /** @type {ChildNode[]|null} the view's parts, while it only says that there is nothing of this name */
  #hidden = null;

  /** @param {HTMLElement} root what the view fills @param {string} [kind] of what its address names @param {string} [id] its name */
  constructor(root, kind = "", id = "") {
    this.root = root;
    this.kind = kind;
    this.id = id;
    /** Aborted when the view is left. Listeners, timers and requests end with it. */
    this.closed = this.#life.signal;
    this.requests = new LatestRequest(this.closed);
    /** Where a failed request is shown. */
    this.problem = h("div");
  }

  close() {
    this.#life.abort();
  }

  /** What every list has to the right. @param {() => Command} request */
  tools(request) {
    return [button("Refresh", () => this.refresh(), { class: "quiet" }), copyCurl(request)];
  }

  /** Show a list, whose title only a screen reader needs. @param {string} title @param {Child} left @param {Child} right @param {...Child} content */
  fill(title, left, right, ...content) {
    replace(this.root, h("h1", { class: "visually-hidden" }, title), bar(left, right), this.problem, content);
  }

  /** Sessions changed. @param {SessionRow[]} rows */
  onSessions(rows) {}

  /** @param {Overview} overview */
  onOverview(overview) {}

  /** Changes may have been missed. */
  onReset() {
    this.refresh();
  }

  /** The address has another query. @param {URLSearchParams} query */
  onQuery(query) {}

  /** What `/` does. */
  onFilterKey() {}

  /** Read anew what is shown. @returns {void|Promise<void>} */
  refresh() {}

  /** Is there a change that is not shown yet? */
  get isBehind() {
    return this.#hasChanged;
  }

  /**
   * Read, then show; the problem of an earlier request disappears.
   * @template T @param {Asked<T>} request @param {(value: T) => void} show
   */
  read(request, show) {
    const done = (/** @type {T} */ value) => {
      replace(this.problem);
      if (this.#hidden) replace(this.root, this.#hidden);
      this.#hidden = null;
      show(value);
    };
    return this.requests.run(request, done, (error) => this.onFailure(error));
  }

  /** A request failed. @param {unknown} error */
  onFailure(error) {
    const about = MISSING[this.kind];
    if (about && error instanceof ApiError && error.code === about.code) {
      this.#hidden ??= [...this.root.childNodes];
      const all = h("a", { href: listHref(about.all, this.kind === "run" ? { run: null } : {}) }, `All ${this.kind}s`);
      const title = `There is no ${this.kind} “${visibleText(this.id)}”.`;
      replace(this.root, message("empty", title, h("p", null, about.why), h("p", null, all)));
      return;
    }
    replace(this.problem, failure(error, () => this.refresh()));
  }

  /** Something changed: refresh, then pause. Changes that come meanwhile are read together after the pause. */
  async changed() {
    this.#hasChanged = true;
    if (this.#isFollowing) return;
    this.#isFollowing = true;
    do {
      this.#hasChanged = false;
      const began = performance.now();
      await this.refresh();
      const pause = Math.max(REFRESH_MS, (performance.now() - began) * REFRESH_SHARE);
      await new Promise((resolve) => setTimeout(resolve, pause));
    } while (this.isBehind && !this.closed.aborted);
    this.#isFollowing = false;
  }
}

/**
 * A view that is read anew when the fleet's log has a new event, such as a gate that shuts: a restore, and a checkpoint
 * that waits for turns, hold turns by one. It does not ask again and again, since the server counts many rows for it.
 */
export class FollowsFleet extends View {
  /** @type {number|undefined} the last event of the fleet's log that was known when the view was read */
  #version;

  /** @param {HTMLElement} root @param {string} kind @param {Place} place */
  constructor(root, kind, { id, overview }) {
    super(root, kind, id);
    this.#version = overview()?.gate.version;
  }

  /** @param {Overview} overview */
  onOverview({ gate }) {
    const hasChanged = this.#version !== undefined && this.#version !== gate.version;
    this.#version = gate.version;
    if (hasChanged) this.changed();
  }
}

/** While somebody looks, do this again and again. @param {AbortSignal} closed @param {number} ms @param {() => void} action */
export function every(closed, ms, action) {
  const timer = setInterval(() => document.hidden || action(), ms);
  closed.addEventListener("abort", () => clearInterval(timer));
}
