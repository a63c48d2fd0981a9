/** Requests to the server that served the page. */

import { queryOf } from "./route.js";

/** Where the server's routes begin; a proxy may have put them below a path. */
const BASE = new URL("../..", import.meta.url);

const RETRY_MS = [500, 1000, 2000, 5000, 10000];
/** The overview comes each second: a stream that is silent for so long is dead, whatever TCP believes. */
const SILENCE_MS = 20_000;
/** A browser has six connections to a server for all its tabs: one that nobody looks at gives its stream back. */
const HIDDEN_MS = 5_000;

/** What a server answered instead of what was asked for. */
export class ApiError extends Error {
  /** @param {number} status 0: no answer at all @param {string} code @param {string} text */
  constructor(status, code, text) {
    super(text);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

let needsToken = false;
/** @type {() => void} */
let onUnauthorized = () => {};

/** @param {() => void} listener what to do when a request was answered 401 */
export function whenUnauthorized(listener) {
  onUnauthorized = listener;
}

/** @param {boolean} needed do requests need a token? Then the curl commands name one. */
export function setNeedsToken(needed) {
  needsToken = needed;
}

/**
 * @param {string} path of the server, "/ui/api/sessions"
 * @param {Record<string, unknown>|URLSearchParams} [parameters]
 * @returns {string} absolute
 */
export function url(path, parameters) {
  return new URL(path.slice(1) + queryOf(parameters), BASE).href;
}

/**
 * GET as JSON. Throws ApiError; a 401 leads to the sign-in as well.
 * @param {string} path
 * @param {Record<string, unknown>|URLSearchParams} [parameters]
 * @param {AbortSignal} [signal] an aborted request throws the signal's reason
 * @returns {Promise<any>}
 */
export async function get(path, parameters, signal) {
  return (await request(url(path, parameters), { signal })).json();
}

/**
 * GET whose body is read as it comes, for NDJSON that does not end.
 * @param {string} path
 * @param {Record<string, unknown>|URLSearchParams} [parameters]
 * @param {AbortSignal} [signal]
 * @returns {Promise<ReadableStream<Uint8Array>>}
 */
export async function stream(path, parameters, signal) {
  const response = await request(url(path, parameters), { signal });
  return response.body ?? new ReadableStream();
}

/**
 * POST of JSON: only signing in and out.
 * @param {string} path
 * @param {unknown} body
 * @returns {Promise<void>}
 */
export async function post(path, body) {
  await request(url(path), {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
}

/** @param {string} address @param {RequestInit} options @returns {Promise<Response>} */
async function request(address, options) {
  let response;
  try {
    response = await fetch(address, { ...options, credentials: "same-origin" });
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    throw new ApiError(0, "no_answer", "The server does not answer.");
  }
  if (response.ok) return response;
  const failed = await refusal(response);
  if (failed.status === 401) onUnauthorized();
  throw failed;
}

/** @param {Response} response @returns {Promise<ApiError>} the server's own code and message, where it gives them */
async function refusal(response) {
  const text = await response.text();
  let error;
  try {
    error = JSON.parse(text).error;
  } catch (fault) {
    if (!(fault instanceof SyntaxError)) throw fault;
  }
  return new ApiError(response.status, error?.code ?? `http_${response.status}`, error?.message ?? response.statusText);
}

/**
 * The command that asks the same of the server.
 * @param {string} path
 * @param {Record<string, unknown>|URLSearchParams} [parameters]
 * @param {unknown} [body] with one it is a POST
 * @returns {string}
 */
export function curl(path, parameters, body) {
  const parts = ["curl -sS"];
  if (needsToken) parts.push('-H "Authorization: Bearer $TURNLOG_ADMIN_TOKEN"');
  if (body !== undefined) parts.push(`-H 'content-type: application/json' -d ${quoted(JSON.stringify(body))}`);
  parts.push(quoted(url(path, parameters)));
  return parts.join(" ");
}

/** @param {string} text @returns {string} for a POSIX shell, whatever is in it */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/**
 * @typedef {object} LiveListeners
 * @property {(rows: any[]) => void} onSessions
 * @property {(overview: any) => void} onOverview
 * @property {() => void} onReset the stream begins here, not where this page was: read all anew
 * @property {(state: "connecting"|"live"|"lost") => void} onState
 */

/**
 * Follow the server's changes, over any number of lost connections, until closed.
 * @param {LiveListeners} listeners
 * @returns {() => void} close
 */
export function live(listeners) {
  const connection = new LiveConnection(listeners);
  connection.open();
  return () => connection.close();
}

class LiveConnection {
  /** @param {LiveListeners} listeners */
  constructor(listeners) {
    this.listeners = listeners;
    this.cursor = "";
    this.failures = 0;
    this.isClosed = false;
    /** @type {EventSource|null} */
    this.source = null;
    /** @type {number|undefined} */
    this.retry = undefined;
    /** @type {number|undefined} */
    this.silence = undefined;
    /** @type {number|undefined} */
    this.hiding = undefined;
    this.onVisibility = () => this.#lookAtVisibility();
    document.addEventListener("visibilitychange", this.onVisibility);
  }

  open() {
    this.#drop();
    if (this.isClosed) return;
    const source = new EventSource(url("/ui/api/live", { cursor: this.cursor }));
    this.source = source;
    if (!this.failures) this.listeners.onState("connecting");
    source.addEventListener("hello", (event) => {
      const isGap = !this.cursor;
      this.failures = 0;
      this.cursor = JSON.parse(event.data).cursor;
      this.listeners.onState("live");
      if (isGap) this.listeners.onReset();
    });
    source.addEventListener("sessions", (event) => {
      this.cursor = event.lastEventId || this.cursor;
      this.listeners.onSessions(JSON.parse(event.data).rows);
    });
    source.addEventListener("overview", (event) => this.listeners.onOverview(JSON.parse(event.data)));
    source.addEventListener("reset", () => {
      this.cursor = "";
      this.listeners.onReset();
    });
    source.addEventListener("error", () => this.#lost());
    for (const name of ["hello", "sessions", "overview", "reset"]) {
      source.addEventListener(name, () => this.#heard());
    }
    this.#heard();
  }

  close() {
    this.isClosed = true;
    document.removeEventListener("visibilitychange", this.onVisibility);
    clearTimeout(this.hiding);
    this.#drop();
  }

  #heard() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.#lost(), SILENCE_MS);
  }

  #lost() {
    this.#drop();
    this.listeners.onState("lost");
    this.retry = setTimeout(() => this.open(), RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)]);
    this.failures += 1;
    if (this.failures === 1) this.#askWhy();
  }

  /** An EventSource does not say that it was answered 401; any other request does, and leads to the sign-in. */
  #askWhy() {
    get("/ui/api/me").catch((error) => {
      if (!(error instanceof ApiError)) throw error;
    });
  }

  #drop() {
    clearTimeout(this.retry);
    clearTimeout(this.silence);
    this.source?.close();
    this.source = null;
  }

  #lookAtVisibility() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.#drop(), HIDDEN_MS);
    else if (!this.source && !this.isClosed) this.open();
  }
}
