/** Requests to the server that served the page. */

import { queryOf } from "./route.js";

/** @import {LiveListeners, Parameters} from "../ui_types.d.ts" */

/** Where the server's routes begin; a proxy may have put them below a path. */
const BASE = new URL("../..", import.meta.url);

const RETRY_MS = [500, 1000, 2000, 5000, 10000];
/** The overview comes each second: a stream that is silent for so long is dead, even if TCP has not noticed. */
const SILENCE_MS = 20_000;
/** A browser has six connections to a server for all its tabs: a hidden tab gives its stream back. */
const HIDDEN_MS = 5_000;

/** A request that the server refused or did not answer. */
export class ApiError extends Error {
  /** @param {number} status 0: no answer at all @param {string} code @param {string} text */
  constructor(status, code, text) {
    super(text);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

/** Must a request outside this browser name a token, and what happens when one is answered 401? */
export const access = { needsToken: false, onUnauthorized: () => {} };

/** An absolute address. @param {string} path of the server, "/ui/api/sessions" @param {Parameters} [parameters] */
export function url(path, parameters) {
  return new URL(path.slice(1) + queryOf(sent(parameters)), BASE).href;
}

/**
 * A form has a filter by metadata in one field, `key=value`; the server reads the key in the parameter's name.
 * @param {Parameters} [parameters]
 */
function sent(parameters) {
  if (!parameters || parameters instanceof URLSearchParams || !parameters.metadata) return parameters;
  const { metadata, ...others } = parameters;
  const [key, ...value] = String(metadata).split("=");
  return { ...others, [`metadata.${key}`]: value.join("=") };
}

/**
 * GET of JSON; the caller names its type. Throws ApiError, or once it is aborted the signal's reason; a 401 also leads to
 * the sign-in.
 * @param {string} path @param {Parameters} [parameters] @param {AbortSignal} [signal] @returns {Promise<unknown>}
 */
export async function get(path, parameters, signal) {
  return (await request(url(path, parameters), { signal })).json();
}

/**
 * GET of NDJSON, which may be endless: its lines as they come. It ends before one of more than `most` characters.
 * @param {string} path @param {Parameters} parameters @param {AbortSignal} signal @param {number} [most]
 */
export async function* lines(path, parameters, signal, most = Infinity) {
  const response = await request(url(path, parameters), { signal });
  const reader = (response.body ?? new ReadableStream()).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    while (rest.length <= most) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = parts.pop() ?? "";
      yield* parts.filter((part) => part !== "");
    }
  } finally {
    await reader.cancel();
  }
}

/**
 * JSON to the server: to sign in and out, and annotations. The header proves that the page sends it.
 * @param {"POST"|"PUT"|"DELETE"} method @param {string} path @param {unknown} [body] @param {AbortSignal} [signal]
 */
export async function send(method, path, body, signal) {
  const headers = { "content-type": "application/json", "x-turnlog-page": "1" };
  await request(url(path), { method, headers, body: JSON.stringify(body), signal });
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
  if (failed.status === 401) access.onUnauthorized();
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

/** Follows the server's changes until it is closed; a lost connection is opened again. */
export class LiveConnection {
  #life = new AbortController();

  /** @param {string|null} run whose changes; null: those of all @param {LiveListeners} listeners */
  constructor(run, listeners) {
    this.run = run;
    this.listeners = listeners;
    this.cursor = "";
    this.failures = 0;
    this.source = /** @type {EventSource|null} */ (null);
    this.retry = 0;
    this.silence = 0;
    this.hiding = 0;
    document.addEventListener("visibilitychange", () => this.#visibilityChanged(), { signal: this.#life.signal });
    this.#open();
  }

  close() {
    this.#life.abort();
    clearTimeout(this.hiding);
    this.#drop();
  }

  #open() {
    this.#drop();
    const source = new EventSource(url("/ui/api/live", { run: this.run, cursor: this.cursor }));
    this.source = source;
    if (!this.failures) this.listeners.onState("connecting");
    this.#on("hello", ({ data }) => {
      const isGap = !this.cursor;
      this.failures = 0;
      this.cursor = JSON.parse(data).cursor;
      this.listeners.onState("live");
      if (isGap) this.listeners.onReset();
    });
    this.#on("sessions", ({ data, lastEventId }) => {
      this.cursor = lastEventId || this.cursor;
      this.listeners.onSessions(JSON.parse(data).rows);
    });
    this.#on("overview", ({ data }) => this.listeners.onOverview(JSON.parse(data)));
    this.#on("reset", () => {
      this.cursor = "";
      this.listeners.onReset();
    });
    source.addEventListener("error", () => this.#lost());
    this.#expectMore();
  }

  /** @param {string} name @param {(event: MessageEvent<string>) => void} listener */
  #on(name, listener) {
    this.source?.addEventListener(name, (event) => {
      this.#expectMore();
      listener(event);
    });
  }

  #expectMore() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.#lost(), SILENCE_MS);
  }

  #lost() {
    this.#drop();
    this.listeners.onState("lost");
    this.retry = setTimeout(() => this.#open(), RETRY_MS[this.failures] ?? RETRY_MS.at(-1));
    this.failures += 1;
    if (this.failures > 1) return;
    // An EventSource hides a 401; any other request shows it, and leads to the sign-in.
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

  #visibilityChanged() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.#drop(), HIDDEN_MS);
    else if (!this.source) this.#open();
  }
}
