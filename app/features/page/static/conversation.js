/** A message: its role, reasoning, text, tool calls or result, as they are stored. */

import { url } from "./api.js";
import { copyButton } from "./copy.js";
import { badge, button, folded, h, icon, message } from "./dom.js";
import { bytes, count } from "./format.js";
import { named, parsed, pretty, textBlock } from "./visible.js";

/** @import {ChatMessage, Child, Entry} from "../ui_types.d.ts" */

const ROLES = ["system", "developer", "user", "assistant", "tool", "function"];

/** Fields of a message that have a place of their own. */
const PLACED = new Set(
  "role content reasoning_content reasoning refusal tool_calls function_call tool_call_id name".split(" "),
);

/** @param {unknown} value @returns {Record<string, unknown>|null} null: no JSON object, but a list perhaps */
function objectOf(value) {
  return value !== null && typeof value === "object" ? /** @type {Record<string, unknown>} */ (value) : null;
}

/** @param {unknown} value @returns {string} a text as it is, anything else as JSON */
function textOf(value) {
  return typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
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

/**
 * How a message is shown.
 * @typedef {object} Look
 * @property {string} sessionId
 * @property {boolean} [isUnder] a result stands under its call
 * @property {() => void} [onWhole] somebody wants all of a message that is cut
 */

/** @param {unknown} part of a message's content @param {(text: string) => HTMLElement} show @param {Look} look @returns {HTMLElement} */
function contentPart(part, show, { sessionId }) {
  const fields = objectOf(part);
  if (!fields) return show(textOf(part));
  if (fields.type === "text" && typeof fields.text === "string") return show(fields.text);
  if (fields.type === "turnlog_image") return storedImage(fields, sessionId);
  const url = objectOf(fields.image_url)?.url ?? fields.image_url;
  if (typeof url === "string") return h("p", { class: "placeholder" }, icon("image"), " image: ", named(url.replace(/^data:/, "")));
  const summary = [named(fields.type ?? "part"), ` · ${bytes(JSON.stringify(part).length)}`];
  return folded(summary, textBlock(textOf(part), "code"), "placeholder");
}

/** @param {unknown} content @param {boolean} isResult of a tool @param {Look} look @returns {HTMLElement[]} */
function contentOf(content, isResult, look) {
  if (content === null || content === undefined || content === "") return [];
  const show = (/** @type {string} */ text) => (isResult ? textBlock(pretty(text), "code") : textBlock(text));
  return (Array.isArray(content) ? content : [textOf(content)]).map((part) => contentPart(part, show, look));
}

/** @param {unknown} message @returns {{id: unknown, name: unknown, given: unknown}[]} its calls, with what they were given */
export function callsOf(message) {
  const { tool_calls: calls, function_call: only } = /** @type {ChatMessage} */ (objectOf(message) ?? {});
  return [...(Array.isArray(calls) ? calls : []), ...(only != null ? [only] : [])].map((call) => {
    const fields = objectOf(call);
    const called = objectOf(fields?.function) ?? fields;
    const given = called?.arguments;
    return { id: fields?.id, name: called?.name ?? "?", given: typeof given === "string" ? parsed(given) : given };
  });
}

/** @param {unknown} message @returns {boolean} is it what a tool answered? */
export function isResult(message) {
  return ["tool", "function"].includes(String(objectOf(message)?.role));
}

/** @param {unknown} message @returns {string[]} the texts of its content */
export function textsOf(message) {
  const content = objectOf(message)?.content;
  return (Array.isArray(content) ? content.map((part) => objectOf(part)?.text) : [content]).filter((one) => typeof one === "string");
}

/** @param {unknown} given @returns {HTMLElement[]} each argument by its name: a text as it is, with its line ends */
function argumentsOf(given) {
  if (given === undefined) return [];
  const fields = Array.isArray(given) ? null : objectOf(given);
  if (!fields) return [textBlock(textOf(given), "code")];
  return Object.entries(fields).map(([name, value]) =>
    h("div", { class: "argument" }, h("span", { class: "note" }, named(name)), textBlock(textOf(value), "code")),
  );
}

/** @param {ChatMessage} chatMessage @param {Look} look @returns {Child} */
function reasoningOf({ reasoning_content, reasoning }, look) {
  const reasons = [reasoning_content, reasoning].find((one) => one != null && one !== "");
  if (reasons === undefined) return null;
  return folded(`Reasoning · ${count(textOf(reasons).length)} characters`, contentOf(reasons, false, look), "reasoning");
}

/** @param {ChatMessage} chatMessage @returns {Child} the fields that have no place of their own */
function otherFields(chatMessage) {
  const others = Object.entries(chatMessage).filter(([name, value]) => !PLACED.has(name) && value !== null);
  if (!others.length) return null;
  const names = others.map(([name]) => name).join(", ");
  return folded(named(names), textBlock(textOf(Object.fromEntries(others)), "code"), "others");
}

/**
 * @param {Entry} entry
 * @param {Look} look
 * @param {(call: number) => Child} [under] what stands below a call: its result
 * @returns {HTMLElement} a system prompt is folded
 */
export function messageElement(entry, look, under) {
  const { index, turn, bytes: size } = entry;
  if (entry.error != null) return message("error", `message ${index}, turn ${turn}`, h("p", null, entry.error));
  /** @type {ChatMessage} */
  const fields = objectOf(entry.message) ?? { content: entry.message };
  const role = String(fields.role ?? "?");
  const calls = callsOf(fields);
  const copied = () => (calls.length || Array.isArray(fields.content) ? JSON.stringify(fields, null, 2) : textOf(fields.content));
  const copy = copyButton(copied, "Copy");
  const who = [
    h("strong", null, named(role)),
    fields.name != null && h("code", null, named(fields.name)),
    entry.failed && badge("error", "bad"),
    role === "assistant" && !entry.sampled && badge("not sampled here", "warn"),
    fields.tool_call_id != null && !look.isUnder && h("span", { class: "note" }, "answers ", named(fields.tool_call_id)),
    h("span", { class: "note" }, `message ${index}`),
  ];
  const body = [
    entry.cut && look.onWhole && h("p", null, `The first part of ${bytes(size)}. `, button("show all", look.onWhole, { class: "link whole" })),
    reasoningOf(fields, look),
    contentOf(fields.content, isResult(fields), look),
    fields.refusal != null && h("div", { class: "refuses" }, "refuses: ", textBlock(textOf(fields.refusal))),
    calls.map(({ id, name, given }, at) => [
      h("div", { class: "toolcall" }, h("p", null, h("strong", null, named(name)), h("span", { class: "note" }, " ", named(id ?? ""))), argumentsOf(given)),
      under?.(at),
    ]),
    otherFields(fields),
  ];
  const dataset = { role: ROLES.includes(role) ? role : "other" };
  if (role !== "system" && role !== "developer") return h("div", { class: "said", dataset }, h("p", { class: "who" }, who, copy), body);
  const length = textsOf(fields).reduce((sum, text) => sum + text.length, 0);
  return h("details", { class: "said", dataset }, h("summary", null, who.slice(0, 2), ` · ${count(length)} characters`), copy, body);
}
