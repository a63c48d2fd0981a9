/** What was said of a session or a turn after it: its reward, its annotations, who wrote them and when; and the form that writes one. */

import { ApiError, send } from "./api.js";
import { announce, badge, button, folded, h, replace } from "./dom.js";
import { field } from "./form.js";
import { bytes, count, decimal, since } from "./format.js";
import { queryOf, sessionsHref } from "./route.js";
import { recall, remember } from "./view.js";
import { named, textBlock } from "./visible.js";

/** @import {Annotation, Child, Reward, Session} from "../ui_types.d.ts" */

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
 * @param {() => void} [onWritten] one was written from here
 * @returns {HTMLElement|null} null: nothing was said, and nothing can be
 */
export function verdicts(id, turn, session, onWritten) {
  const said = session.annotations[turn ?? 0] ?? [];
  const reward = turn === null ? session.reward : session.turn_rewards[turn];
  const isWritable = !session.erased && session.seq === session.last_seq;
  if (!said.length && !reward && !isWritable) return null;
  const judge = button("Judge", () => (form ? close() : open()), { class: "quiet", title: "Write a verdict, a note, tags", "data-judge": true });
  const label = turn === null ? "Verdicts" : `Verdicts of turn ${turn}`;
  const box = h("div", { class: "verdicts", role: "group", "aria-label": label }, reward && chip("reward", rewardParts(reward)), said.map(saidChip), isWritable && judge);
  /** @type {VerdictForm|null} */
  let form = null;
  return box;

  function open() {
    const onDone = () => {
      close();
      onWritten?.();
    };
    form = new VerdictForm(id, turn, () => said, onDone);
    form.element.addEventListener("keydown", (event) => event.key === "Escape" && close());
    box.append(form.element);
    form.text.focus();
  }

  function close() {
    form?.element.remove();
    form = null;
    judge.focus();
  }
}

/** @param {string} name @param {Child} value @param {Child} [by] */
function chip(name, value, by) {
  return h("span", { class: "verdict" }, h("b", null, named(name)), " ", value, by && h("span", { class: "note" }, " ", by));
}

/** @param {Annotation} one */
function saidChip(one) {
  return chip(one.name, valueOf(one), [one.writer && [named(one.writer), ", "], since(one.at)]);
}

/** @param {Reward} reward @returns {Child} */
function rewardParts({ reward, components }) {
  const parts = Object.entries(components).map(([name, value]) => [named(name), ` ${decimal(value)} `]);
  return [decimal(reward), parts.length > 0 && h("span", { class: "note" }, " ", parts)];
}

/** @param {Annotation} one @returns {Child} */
function valueOf({ name, value, dtype, over, length, size }) {
  if (dtype) return `${count(length)} numbers, ${dtype} over ${over}`;
  if (value === undefined) return bytes(size);
  const passed = isPassed(value);
  if (passed !== null) return badge(passed ? "passed" : "failed", passed ? "good" : "bad");
  if (name === "tags" && Array.isArray(value)) return value.map((tag, at) => [at > 0 && ", ", h("a", { href: sessionsHref({ tag }) }, named(tag))]);
  const text = written(value);
  return text.length <= SHORT && !text.includes("\n") ? named(text) : folded(named(`${text.slice(0, SHORT)} …`), textBlock(text));
}

/** @param {unknown} value @returns {boolean|null} what a thumb says, null where it is no thumb */
function isPassed(value) {
  const said = typeof value === "object" && value !== null && "passed" in value && Object.keys(value).length === 1 ? value.passed : null;
  return typeof said === "boolean" ? said : null;
}

/** @param {unknown} value @returns {string} as somebody types it: a text, else JSON */
function written(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** @param {string} name @param {string} text @returns {unknown} JSON, else the text; a note is a text, tags have commas between them */
function typed(name, text) {
  if (name === "note") return text;
  if (name === "tags" && !text.startsWith("[")) return text.split(",").map((tag) => tag.trim()).filter(Boolean);
  try {
    return JSON.parse(text);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return text;
  }
}

/** @param {string} id of the session @param {number|null} turn @param {string} name @param {string|null} writer who writes or removes it */
export function annotationPath(id, turn, name, writer) {
  const of = turn === null ? "" : `/turns/${turn}`;
  return `/sessions/${encodeURIComponent(id)}${of}/annotations/${name}${queryOf({ writer })}`;
}

/** The form in which a person writes or removes an annotation: by a thumb, as a number, or as a text. */
export class VerdictForm {
  /**
   * @param {string} id of the session
   * @param {number|null} turn null: the session itself
   * @param {() => Annotation[]} said what is there
   * @param {(name: string) => void} onDone what was written or removed
   * @param {string} [name] that is chosen first
   */
  constructor(id, turn, said, onDone, name = VERDICT) {
    this.id = id;
    this.turn = turn;
    this.said = said;
    this.onDone = onDone;
    const others = [VERDICT, ...(turn === null ? ["note", "tags"] : []), ...said().flatMap((one) => (one.dtype ? [] : one.name))];
    const names = h("datalist", { id: `names-${turn ?? "session"}` }, [...new Set(others)].map((value) => h("option", { value })));
    this.name = h("input", { name: "name", required: true, pattern: "[A-Za-z0-9_\\-]{1,64}", list: names.id, spellcheck: "false" });
    this.writer = h("input", { name: "writer", value: recall(WRITER) ?? "", required: true, maxlength: "128", spellcheck: "false" });
    this.text = h("textarea", { name: "value", rows: "1", required: true, placeholder: "0.5, or a text" });
    this.passed = button("Passed", () => this.#send("PUT", { passed: true }), { name: "passed" });
    this.failed = button("Failed", () => this.#send("PUT", { passed: false }), { name: "failed" });
    this.remove = button("Delete", () => this.#send("DELETE"), { class: "quiet" });
    this.replaced = h("span", { class: "note" });
    this.refusal = h("p", { class: "refusal", role: "alert" });
    const save = h("button", { class: "primary" }, "Save");
    const fields = [field("Name", this.name), field("Number or text", this.text), field("Your name", this.writer)];
    this.element = h("form", { class: "verdictform", "aria-label": "Judge" }, this.passed, this.failed, names, fields, save, this.remove, this.replaced, this.refusal);
    this.name.addEventListener("input", () => this.show(this.name.value));
    this.writer.addEventListener("input", () => this.#tell());
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      this.element.requestSubmit();
    });
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send("PUT", typed(this.name.value, this.text.value));
    });
    this.show(name);
  }

  /** @returns {Annotation|undefined} what is there under the name */
  get #there() {
    return this.said().find((one) => one.name === this.name.value);
  }

  /** @param {string} name show what is there under it */
  show(name) {
    if (this.name.value !== name) this.name.value = name;
    const value = this.#there?.value;
    const passed = isPassed(value);
    this.passed.ariaPressed = String(passed === true);
    this.failed.ariaPressed = String(passed === false);
    const isList = name === "tags" && Array.isArray(value) && !value.some((tag) => /^[\s[]|,|\s$/.test(tag));
    this.text.value = value === undefined || passed !== null ? "" : isList ? value.join(", ") : written(value);
    this.#tell();
  }

  /** A person removes what is theirs, and is told what they replace of others. */
  #tell() {
    const there = this.#there;
    const isOthers = there?.writer != null && there.writer !== this.writer.value.trim();
    this.remove.hidden = !there || isOthers;
    replace(this.replaced, isOthers && ["replaces that of ", named(there.writer)]);
  }

  /** @param {"PUT"|"DELETE"} method @param {unknown} [value] */
  async #send(method, value) {
    if (![this.name, this.writer].every((one) => one.reportValidity())) return;
    const name = this.name.value;
    const writer = this.writer.value.trim();
    remember(WRITER, writer);
    try {
      await send(method, annotationPath(this.id, this.turn, name, writer), method === "PUT" ? { value } : undefined);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      replace(this.refusal, error.message);
      return;
    }
    announce(method === "PUT" ? "Saved" : "Deleted");
    this.onDone(name);
  }
}
