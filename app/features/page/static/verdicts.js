/** What was said of a session or a turn after it: its reward, its annotations, who wrote them and when; and the form that writes one. */

import { ApiError, send } from "./api.js";
import { announce, badge, button, folded, h, replace } from "./dom.js";
import { field } from "./form.js";
import { bytes, count, decimal, since } from "./format.js";
import { queryOf, sessionsHref } from "./route.js";
import { recall, remember } from "./view.js";
import { named, parsed, textBlock } from "./visible.js";

/** @import {Annotation, Child, Session} from "../ui_types.d.ts" */

/** The name under which a person judges, unless another is chosen. */
export const VERDICT = "verdict";
/** Where this browser keeps who judges. */
export const WRITER = "writer";
/** A longer value is folded. */
const SHORT = 100;

/**
 * @param {string} id of the session
 * @param {number|null} turn null: the session itself
 * @param {Session} session
 * @param {() => void} [onClosed] the form was closed: show what came meanwhile
 * @returns {HTMLElement|null} null: nothing was said, and nothing can be
 */
export function verdicts(id, turn, session, onClosed) {
  const said = session.annotations[turn ?? 0] ?? [];
  const reward = turn === null ? session.reward : session.turn_rewards[turn];
  const isWritable = !session.erased && session.seq === session.last_seq;
  if (!said.length && !reward && !isWritable) return null;
  const close = () => {
    box.querySelector("form")?.remove();
    judge.focus();
    onClosed?.();
  };
  const open = () => {
    const form = verdictForm(id, turn, () => said, close);
    box.append(form.element);
    form.text.focus();
  };
  const judge = button("Judge", () => (box.querySelector("form") ? close() : open()), { class: "quiet", title: "Write a verdict, a note, tags", "data-judge": true });
  const box = h(
    "div",
    { class: "verdicts", role: "group", "aria-label": turn === null ? "Verdicts" : `Verdicts of turn ${turn}`, onkeydown: (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && close() },
    reward && chip("reward", decimal(reward.reward), Object.entries(reward.components).map(([name, value]) => [named(name), ` ${decimal(value)} `])),
    said.map((one) => chip(one.name, valueOf(one), [one.writer && [named(one.writer), ", "], since(one.at)])),
    isWritable && judge,
  );
  return box;
}

/** @param {string} name @param {Child} value @param {Child} more */
function chip(name, value, more) {
  return h("span", { class: "verdict" }, h("strong", null, named(name)), " ", value, h("span", { class: "note" }, " ", more));
}

/** @param {Annotation} one @returns {Child} */
function valueOf({ name, value, dtype, over, length, size }) {
  if (dtype) return `${count(length)} numbers, ${dtype} over ${over}`;
  if (value === undefined) return bytes(size);
  const passed = isPassed(value);
  if (passed !== null) return badge(inWords(value), passed ? "good" : "bad");
  if (name === "tags" && Array.isArray(value)) return value.map((tag, at) => [at > 0 && ", ", h("a", { href: sessionsHref({ tag }) }, named(tag))]);
  const text = written(value);
  return text.length <= SHORT && !text.includes("\n") ? named(text) : folded(named(`${text.slice(0, SHORT)} …`), textBlock(text));
}

/** @param {unknown} value @returns {boolean|null} what a thumb says, null where it is no thumb */
function isPassed(value) {
  const said = typeof value === "object" && value !== null && "passed" in value && Object.keys(value).length === 1 ? value.passed : null;
  return typeof said === "boolean" ? said : null;
}

/** @param {unknown} value @returns {string} */
export function inWords(value) {
  if (value === undefined) return "";
  const passed = isPassed(value);
  if (passed !== null) return passed ? "passed" : "failed";
  return Array.isArray(value) ? value.map(written).join(", ") : written(value);
}

/** @param {unknown} value @returns {string} as somebody types it: a text, else JSON */
function written(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** @param {string} name @param {string} text @returns {unknown} a number, a list, an object, else the text; a note is a text, tags have commas between them */
function typed(name, text) {
  if (name === "note") return text;
  if (name === "tags" && !text.startsWith("[")) return text.split(",").map((tag) => tag.trim()).filter(Boolean);
  const number = Number(text);
  return text.trim() && Number.isFinite(number) ? number : parsed(text);
}

/** @param {string} id of the session @param {number|null} turn @param {string} name @param {string|null} writer who writes or removes it */
export function annotationPath(id, turn, name, writer) {
  return `/sessions/${encodeURIComponent(id)}${turn === null ? "" : `/turns/${turn}`}/annotations/${name}${queryOf({ writer })}`;
}

/**
 * The form in which a person writes or removes an annotation: by a thumb, as a number, or as a text.
 * @param {string} id of the session
 * @param {number|null} turn null: the session itself
 * @param {() => Annotation[]} said what is there
 * @param {(name: string) => void} onDone what was written or removed
 * @param {string} [first] the name that is chosen first
 */
export function verdictForm(id, turn, said, onDone, first = VERDICT) {
  const known = [VERDICT, ...(turn === null ? ["note", "tags"] : []), ...said().flatMap((one) => (one.dtype ? [] : one.name))];
  const names = h("datalist", { id: `names-${turn ?? "session"}` }, [...new Set(known)].map((value) => h("option", { value })));
  const name = h("input", { name: "name", required: true, pattern: "[A-Za-z0-9_\\-]{1,64}", list: names.id, spellcheck: "false", oninput: () => show(name.value) });
  const writer = h("input", { name: "writer", value: recall(WRITER) ?? "", required: true, maxlength: "128", spellcheck: "false", oninput: tell, onkeydown: goOn });
  const text = h("textarea", { name: "value", rows: "1", required: true, placeholder: "0.5, or a text", onkeydown: submitByEnter });
  const passed = button("Passed", () => act("PUT", { passed: true }), { name: "passed" });
  const failed = button("Failed", () => act("PUT", { passed: false }), { name: "failed" });
  const remove = button("Delete", () => act("DELETE"), { class: "quiet" });
  const replaced = h("span", { class: "note" });
  const refusal = h("p", { class: "refusal", role: "alert" });
  const fields = [field("Name", name), field("Number or text", text), field("Your name", writer)];
  const element = h("form", { class: "filters verdictform", "aria-label": turn === null ? "Judge" : `Judge turn ${turn}` }, passed, failed, names, fields, h("button", { class: "primary" }, "Save"), remove, replaced, refusal);
  element.addEventListener("submit", (event) => {
    event.preventDefault();
    act("PUT", typed(name.value, text.value));
  });
  const there = () => said().find((one) => one.name === name.value);
  /** @type {["PUT"|"DELETE", unknown]|null} */
  let held = null;
  show(first);
  return { element, text, show };

  /** @param {string} chosen a name: show what is there under it */
  function show(chosen) {
    if (name.value !== chosen) name.value = chosen;
    const value = there()?.value;
    const is = isPassed(value);
    passed.ariaPressed = String(is === true);
    failed.ariaPressed = String(is === false);
    const isList = chosen === "tags" && Array.isArray(value) && !value.some((tag) => /^[\s[]|,|\s$/.test(tag));
    text.value = value === undefined || is !== null ? "" : isList ? value.join(", ") : written(value);
    tell();
  }

  /** A person removes what is theirs, and is told what they replace of others. */
  function tell() {
    const by = there()?.writer;
    const isOthers = by != null && by !== writer.value.trim();
    remove.hidden = !there() || isOthers;
    replace(replaced, isOthers && ["replaces that of ", named(by)]);
  }

  /** @param {KeyboardEvent} event in the field of who judges: do what was pressed before somebody was named */
  function goOn(event) {
    if (event.key !== "Enter" || !held || text.value) return;
    event.preventDefault();
    writer.blur();
    act(...held);
  }

  /** @param {KeyboardEvent} event */
  function submitByEnter(event) {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    element.requestSubmit();
  }

  /** @param {"PUT"|"DELETE"} method @param {unknown} [value] */
  async function act(method, value) {
    held = [method, value];
    if (![name, writer].every((one) => one.reportValidity())) return;
    const written = name.value;
    remember(WRITER, writer.value.trim());
    try {
      await send(method, annotationPath(id, turn, written, writer.value.trim()), { value });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      replace(refusal, error.message);
      return;
    }
    announce(method === "PUT" ? "Saved" : "Deleted");
    onDone(written);
  }
}
