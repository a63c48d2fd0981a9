/** Rollouts as they are read: each first in short, then a few turns at a time when somebody looks at them. */

import { get } from "./api.js";
import { wholeNumber } from "./route.js";

/** @import {Rollout, RolloutStep} from "../ui_types.d.ts" */

/** Turns in one request, and requests at a time. */
export const BLOCK = 5;
const AT_ONCE = 4;
/** Blocks of turns that are kept; those that were asked for longest ago are forgotten, and read again when needed. */
const KEPT = 400;
/** Rollouts that change are read again at most so often. */
const REFRESH_MS = 500;

/** A rollout, also before it is read; `key` is its session, or `session@branch`. */
/** @typedef {{key: string, sessionId: string, head: Rollout|null, branch: number|null, error: unknown}} Column */

export class RolloutData {
  /** @param {AbortSignal} closed ends all requests @param {() => void} onChange something was read */
  constructor(closed, onChange) {
    this.closed = closed;
    this.onChange = onChange;
    /** @type {Column[]} */
    this.columns = [];
    /** @type {Map<string, RolloutStep[]|Error|null>} by block; null: being read */
    this.blocks = new Map();
    /** @type {(() => Promise<void>)[]} */
    this.waiting = [];
    this.running = 0;
    /** @type {Set<Column>} have changed since they were read */
    this.changed = new Set();
    /** @type {number|undefined} */
    this.refreshing = undefined;
    closed.addEventListener("abort", () => clearTimeout(this.refreshing));
  }

  get isBusy() {
    return this.running > 0;
  }

  /** @param {string[]} keys in the order of the address */
  open(keys) {
    this.columns = keys.map((key) => {
      const [sessionId = "", branch] = key.split("@");
      return { key, sessionId, head: null, branch: wholeNumber(branch ?? null, 0), error: null };
    });
    this.blocks.clear();
    this.waiting = [];
    this.changed.clear();
    for (const column of this.columns) this.#readHead(column);
  }

  /** @param {string} key @returns {Column|undefined} */
  column(key) {
    return this.columns.find((one) => one.key === key);
  }

  /** Read this again: it has changed. @param {Column} column */
  refresh(column) {
    this.changed.add(column);
    this.refreshing ??= setTimeout(() => this.#readChanged(), REFRESH_MS);
  }

  /** Once what was asked for before has come: changes that come faster than they can be read do not pile up. */
  #readChanged() {
    this.refreshing = undefined;
    if (this.isBusy) {
      this.refreshing = setTimeout(() => this.#readChanged(), REFRESH_MS);
      return;
    }
    for (const column of this.changed) this.#readHead(column);
    this.changed.clear();
  }

  /** @param {Column} column @param {number} branch */
  choose(column, branch) {
    column.branch = branch;
    this.#readHead(column);
  }

  /**
   * A turn, or null while it is being read, which this begins.
   * @param {Column} column
   * @param {number} index of the turn in the rollout
   * @returns {RolloutStep|Error|null}
   */
  step(column, index) {
    const block = Math.floor(index / BLOCK);
    const key = keyOf(column, block);
    const found = this.blocks.get(key);
    if (found === undefined) {
      this.#readBlock(column, block, key);
      return null;
    }
    // Asked for last: a map keeps the order in which its keys came.
    this.blocks.delete(key);
    this.blocks.set(key, found);
    return Array.isArray(found) ? (found[index % BLOCK] ?? null) : found;
  }

  /** @param {string} key of a block @returns {boolean} may it be forgotten? */
  #isRead(key) {
    return this.blocks.get(key) !== null;
  }

  /** @param {Column} column */
  #readHead(column) {
    this.#enqueue(async () => {
      try {
        const head = /** @type {Rollout} */ (await this.#get(column, { limit: 0 }));
        column.head = head;
        column.error = null;
      } catch (error) {
        if (this.closed.aborted) throw error;
        column.error = error;
      }
    });
  }

  /** @param {Column} column @param {number} block @param {string} key */
  #readBlock(column, block, key) {
    this.blocks.set(key, null);
    this.#enqueue(async () => {
      try {
        const { steps } = /** @type {Rollout} */ (await this.#get(column, { start: block * BLOCK, limit: BLOCK }));
        this.blocks.set(key, steps);
      } catch (error) {
        if (this.closed.aborted || !(error instanceof Error)) throw error;
        this.blocks.set(key, error);
      }
      for (const old of this.blocks.keys()) {
        if (this.blocks.size <= KEPT) break;
        if (this.#isRead(old)) this.blocks.delete(old);
      }
    });
  }

  /** @param {Column} column @param {Record<string, number>} parameters */
  #get({ sessionId, branch }, parameters) {
    return get(`/ui/api/sessions/${encodeURIComponent(sessionId)}/rollout`, { branch, ...parameters }, this.closed);
  }

  /** @param {() => Promise<void>} request */
  #enqueue(request) {
    this.waiting.push(request);
    this.#next();
  }

  /** The newest first: what is in sight now, not what was scrolled past. */
  #next() {
    while (this.running < AT_ONCE && !this.closed.aborted) {
      const request = this.waiting.pop();
      if (!request) return;
      this.running += 1;
      request().then(
        () => this.#done(),
        (error) => {
          if (!this.closed.aborted) throw error;
        },
      );
    }
  }

  #done() {
    this.running -= 1;
    this.onChange();
    this.#next();
  }
}

/** @param {Column} column @param {number} block @returns {string} another one when the rollout's end has changed */
function keyOf({ sessionId, branch, head }, block) {
  const from = block * BLOCK;
  const known = (head?.marks ?? []).slice(from, from + BLOCK).map(([turn]) => turn);
  return `${sessionId} ${branch ?? ""} ${block} ${known.join(",")}`;
}

/**
 * The first turn in which a rollout differs from another, counted from 0.
 * @param {Rollout} one
 * @param {Rollout} other
 * @returns {number|null} null: neither does
 */
export function firstDifference(one, other) {
  const turns = Math.max(one.marks.length, other.marks.length);
  for (let index = 0; index < turns; index += 1) {
    if (one.marks[index]?.[1] !== other.marks[index]?.[1]) return index;
  }
  return null;
}
