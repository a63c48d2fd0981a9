/** The messages up to a turn: roles, reasoning, tool calls and their results, as they are stored. */

import { get, url } from "./api.js";
import { copyCurl } from "./copy.js";
import { badge, button, failure, folded, h, message, panel, replace } from "./dom.js";
import { bytes, count } from "./format.js";
import { LatestRequest } from "./view.js";
import { named, pretty, textBlock } from "./visible.js";

/** @import {ChatMessage, Child, Entry, Session, Transcript, Turn} from "../ui_types.d.ts" */

/** Messages in the document at first; a button adds as many earlier ones. */
const SHOWN = 200;

const ROLES = ["system", "developer", "user", "assistant", "tool", "function"];

/** Fields of a message that have a place of their own. */
const PLACED = new Set([
  "role",
  "content",
  "reasoning_content",
  "reasoning",
  "refusal",
  "tool_calls",
  "function_call",
  "tool_call_id",
  "name",
]);

/** @param {unknown} value @returns {Record<string, unknown>|null} null: no JSON object, but a list perhaps */
function objectOf(value) {
  return value !== null && typeof value === "object" ? /** @type {Record<string, unknown>} */ (value) : null;
}

/** @param {unknown} value @returns {string} a text as it is, anything else as JSON */
function textOf(value) {
  return typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
}

/** @param {string} title @param {unknown} value @returns {HTMLElement} */
function foldedJson(title, value) {
  return folded(title, textBlock(JSON.stringify(value, null, 2), "code"), "offered");
}

/** @param {string} url of an image or a file @returns {string} what it is, never the thing itself */
function describedUrl(url) {
  if (!url.startsWith("data:")) return url;
  const comma = url.indexOf(",");
  const head = comma < 0 ? url : url.slice(0, comma);
  const body = comma < 0 ? 0 : url.length - comma - 1;
  const size = head.endsWith(";base64") ? Math.floor((body * 3) / 4) : body;
  return `${head.slice("data:".length, 100) || "data"}, ${bytes(size)}`;
}

/** Types that a browser shows without running anything. */
const RASTER = new Set(["image/png", "image/jpeg", "image/gif", "image/webp"]);

/** @param {Record<string, unknown>} fields of a stored image @param {string} sessionId @returns {HTMLElement} */
function storedImage({ sha256, media_type, size }, sessionId) {
  const src = url(`/sessions/${encodeURIComponent(sessionId)}/images/${encodeURIComponent(String(sha256))}`);
  const what = `${media_type || "image"}, ${bytes(Number(size))}`;
  if (RASTER.has(String(media_type))) return h("img", { class: "stored", src, loading: "lazy", alt: what });
  return h("p", { class: "placeholder" }, "image: ", named(what));
}

/** @param {unknown} part of a message's content @param {string} sessionId @returns {HTMLElement} */
function contentPart(part, sessionId) {
  const fields = objectOf(part);
  if (!fields) return textBlock(textOf(part));
  if (fields.type === "text" && typeof fields.text === "string") return textBlock(fields.text);
  if (fields.type === "turnlog_image") return storedImage(fields, sessionId);
  const url = objectOf(fields.image_url)?.url ?? fields.image_url;
  if (typeof url === "string") {
    return h(
      "p",
      { class: "placeholder" },
      h("span", { "aria-hidden": "true" }, "▧ "),
      "image: ",
      named(describedUrl(url)),
    );
  }
  const summary = [named(fields.type ?? "part"), ` · ${bytes(JSON.stringify(part).length)}`];
  return folded(summary, textBlock(textOf(part), "code"), "placeholder");
}

/** @param {unknown} content @param {string} sessionId @returns {HTMLElement[]} */
function contentOf(content, sessionId) {
  if (content === null || content === undefined || content === "") return [];
  if (Array.isArray(content)) return content.map((part) => contentPart(part, sessionId));
  return [textBlock(textOf(content))];
}

/** @param {unknown} call @returns {HTMLElement} */
function toolCall(call) {
  const fields = objectOf(call);
  const called = objectOf(fields?.function) ?? fields;
  const given = called?.arguments;
  return h(
    "div",
    { class: "toolcall" },
    h(
      "p",
      null,
      h("span", { class: "what" }, "calls "),
      h("code", null, named(called?.name ?? "?")),
      h("span", { class: "note" }, " ", named(fields?.id ?? "")),
    ),
    given !== undefined && textBlock(typeof given === "string" ? pretty(given) : textOf(given), "code"),
  );
}

/** @param {ChatMessage} chatMessage @returns {Child} */
function reasoningOf({ reasoning_content, reasoning }) {
  const found = [reasoning_content, reasoning].find((one) => one != null && one !== "");
  if (found === undefined) return null;
  const text = textOf(found);
  return folded(`Reasoning · ${count(text.length)} characters`, textBlock(text), "reasoning");
}

/** @param {ChatMessage} chatMessage @returns {Child} the fields that have no place of their own */
function otherFields(chatMessage) {
  const others = Object.entries(chatMessage).filter(([name, value]) => !PLACED.has(name) && value !== null);
  if (!others.length) return null;
  const names = others.map(([name]) => name).join(", ");
  return folded(named(names), textBlock(textOf(Object.fromEntries(others)), "code"), "others");
}

/** @param {Entry} entry @param {string} sessionId @returns {HTMLElement} */
export function messageElement(entry, sessionId) {
  const { index, turn } = entry;
  if (entry.error !== undefined)
    return h("li", { class: "said" }, message("error", `message ${index}, turn ${turn}`, h("p", null, entry.error)));
  /** @type {ChatMessage} */
  const fields = objectOf(entry.message) ?? { content: entry.message };
  const role = String(fields.role ?? "?");
  return h(
    "li",
    { class: "said", dataset: { role: ROLES.includes(role) ? role : "other" } },
    h(
      "p",
      { class: "who" },
      h("strong", null, named(role)),
      fields.name != null && h("code", null, named(fields.name)),
      fields.tool_call_id != null && h("span", { class: "note" }, "answers ", named(fields.tool_call_id)),
      entry.sampled && badge("sampled", "good"),
      h("span", { class: "note" }, `message ${index}`, turn ? `, turn ${turn}` : ""),
    ),
    reasoningOf(fields),
    contentOf(fields.content, sessionId),
    fields.refusal != null && h("div", { class: "refuses" }, "refuses: ", textBlock(textOf(fields.refusal))),
    Array.isArray(fields.tool_calls) && fields.tool_calls.map(toolCall),
    fields.function_call != null && toolCall({ function: fields.function_call }),
    otherFields(fields),
  );
}

/** The conversation of one session, up to a turn. */
export class Conversation {
  /**
   * @param {AbortSignal} closed
   * @param {string} sessionId
   * @param {(turn: number|null) => void} onPick null: the newest live turn
   */
  constructor(closed, sessionId, onPick) {
    this.sessionId = sessionId;
    this.path = `/ui/api/sessions/${encodeURIComponent(sessionId)}/conversation`;
    this.onPick = onPick;
    this.requests = new LatestRequest(closed);
    /** @type {Map<string, HTMLElement>} the messages that are shown; a message does not change */
    this.known = new Map();
    this.shown = SHOWN;
    /** @type {Transcript|null} */
    this.transcript = null;
    this.engine = "";
    this.list = h("ol", { class: "conversation" });
    this.notes = h("div");
    this.turnField = h("input", { type: "number", min: "1", "aria-label": "turn", class: "short" });
    this.turnField.addEventListener("change", () => this.onPick(Number(this.turnField.value) || null));
    this.newest = button("newest", () => this.onPick(null));
    this.copy = h("fieldset", { class: "plain", "aria-label": "Copy" }, copyCurl(() => this.#request(), "request to the engine"));
    this.element = panel(
      "conversation-title",
      "Conversation",
      [h("label", null, "up to turn ", this.turnField), this.newest, h("span", { class: "switches" }, this.copy)],
      this.notes,
      this.list,
    );
  }

  /**
   * @param {Session} session as of the event that is shown
   * @param {number|null} turn whose conversation; null: of the newest live turn
   * @param {number|null} branch of which the newest turn is meant where none is named
   */
  async update(session, turn, branch) {
    const request = async (/** @type {AbortSignal} */ signal) => {
      if (!session.turns.length) return null;
      return /** @type {Transcript} */ (await get(this.path, { seq: session.seq, turn, branch }, signal));
    };
    await this.requests.run(
      request,
      (transcript) => {
        if (transcript?.messages.length) this.#show(transcript, session, turn ?? branch);
        else this.#clear(message("empty", session.erased ? "The content is erased." : "No turn is committed yet."));
      },
      (error) => this.#clear(failure(error, () => this.update(session, turn, branch))),
    );
  }

  /** @param {HTMLElement} note why there is nothing */
  #clear(note) {
    this.transcript = null;
    this.copy.disabled = true;
    this.known.clear();
    replace(this.notes, note);
    replace(this.list);
  }

  /** @param {Transcript} transcript @param {Session} session @param {number|null} picked */
  #show(transcript, session, picked) {
    const { messages, omitted, params } = transcript;
    const turn = session.turns.find((one) => one.turn === transcript.turn);
    this.transcript = transcript;
    this.engine = turn?.engine ?? "";
    this.turnField.max = String(Math.max(...session.turns.map((one) => one.turn)));
    if (document.activeElement !== this.turnField) this.turnField.value = String(transcript.turn);
    this.newest.setAttribute("aria-pressed", String(picked === null));
    const hasImages = messages.some((one) => JSON.stringify(one.message).includes('"turnlog_image"'));
    const isWhole = omitted === 0 && params !== null && messages.every((one) => one.error === undefined) && !hasImages;
    this.copy.disabled = !isWhole || turn?.protocol !== "chat";
    this.#render(transcript, turn);
  }

  /** @param {Transcript} transcript @param {Turn|undefined} turn */
  #render(transcript, turn) {
    const { messages, omitted, tools, params, errors } = transcript;
    const begin = Math.max(0, messages.length - this.shown);
    const showEarlier = () => {
      this.shown += SHOWN;
      this.#render(transcript, turn);
    };
    replace(
      this.notes,
      turn && !turn.live && message("note", `Turn ${turn.turn} was discarded by event ${turn.discarded_by}.`),
      omitted > 0 &&
        message("note", `${count(omitted)} earlier messages are not shown here; GET /sessions/{id} has all.`),
      Object.entries(errors).map(([what, why]) => message("error", what, h("p", null, why))),
      params && foldedJson("Sampling parameters", params),
      tools && foldedJson(tools.length === 1 ? "1 tool" : `${count(tools.length)} tools`, tools),
      begin > 0 && h("p", null, button(`show ${Math.min(SHOWN, begin)} earlier of ${count(begin)}`, showEarlier)),
    );
    /** @type {Map<string, HTMLElement>} */
    const shown = new Map();
    for (const entry of messages.slice(begin)) {
      const key = `${entry.index} ${entry.turn} ${entry.sampled}`;
      shown.set(key, this.known.get(key) ?? messageElement(entry, this.sessionId));
    }
    this.known = shown;
    this.#place([...shown.values()]);
  }

  /** Only new messages enter the document: what somebody reads or has unfolded stays. @param {HTMLElement[]} elements */
  #place(elements) {
    const wanted = new Set(elements);
    for (const child of this.list.querySelectorAll("li")) if (!wanted.has(child)) child.remove();
    elements.forEach((element, at) => {
      const there = this.list.children[at] ?? null;
      if (there !== element) this.list.insertBefore(element, there);
    });
  }

  /**
   * The request whose reply the shown turn is, for the engine that gave it: the session itself would take it as a retry.
   * @returns {import("./copy.js").Command}
   */
  #request() {
    const { messages: entries = [], params = null, tools = null } = this.transcript ?? {};
    const messages = entries.map((entry) => entry.message);
    if (entries.at(-1)?.sampled) messages.pop();
    return { path: "/v1/chat/completions", engine: this.engine, body: { ...params, messages, ...(tools && { tools }) } };
  }
}
