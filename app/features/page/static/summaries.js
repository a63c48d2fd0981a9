/** What sessions are about: read for the rows in sight, and again once a session has changed. */

import { ApiError, get } from "./api.js";

/** @import {SessionRow, Summary} from "../ui_types.d.ts" */

/** Sessions in one request. */
const AT_ONCE = 50;
/** Rows that come into sight together are read together. */
const SOON_MS = 100;

/** @param {string[]} ids @param {AbortSignal} signal @returns {Promise<Record<string, Summary>>} */
export async function readSummaries(ids, signal) {
  const parts = [];
  for (let at = 0; at < ids.length; at += AT_ONCE) {
    const query = new URLSearchParams(ids.slice(at, at + AT_ONCE).map((id) => ["session_id", id]));
    parts.push(get("/ui/api/summaries", query, signal));
  }
  return Object.assign({}, ...(await Promise.all(parts)));
}

export class Summaries {
  /** @param {AbortSignal} closed @param {(ids: string[]) => void} onRead */
  constructor(closed, onRead) {
    this.closed = closed;
    this.onRead = onRead;
    this.known = /** @type {Map<string, Summary>} */ (new Map());
    /** @type {Map<string, number>} the version for which a session was asked for last */
    this.asked = new Map();
    this.wanted = /** @type {Map<string, number>} */ (new Map());
    this.timer = 0;
  }

  /** @param {SessionRow[]} rows that are in sight */
  want(rows) {
    for (const { session_id: id, version } of rows) if (this.asked.get(id) !== version) this.wanted.set(id, version);
    if (this.wanted.size) this.timer ||= setTimeout(() => this.#read(), SOON_MS);
  }

  async #read() {
    const ids = [...this.wanted.keys()].slice(-AT_ONCE);
    for (const id of ids) {
      this.asked.set(id, this.wanted.get(id) ?? 0);
      this.wanted.delete(id);
    }
    try {
      const found = await readSummaries(ids, this.closed);
      for (const [id, summary] of Object.entries(found)) this.known.set(id, summary);
      this.onRead(ids);
    } catch (error) {
      if (!this.closed.aborted && !(error instanceof ApiError)) throw error;
      for (const id of ids) this.asked.delete(id);
    }
    this.timer = 0;
    if (!this.closed.aborted) this.want([]);
  }
}
