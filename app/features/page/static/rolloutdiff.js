/** Two rollouts as a diff: step by step, equal ones folded, the words that differ marked. */

import { difference } from "./diff.js";
import { button, h, replace } from "./dom.js";
import { count, decimal } from "./format.js";
import { sessionHref } from "./route.js";
import { named, pretty, visible } from "./visible.js";

/** @import {ChatMessage, Child, RolloutStep} from "../ui_types.d.ts" */
/** @import {Column, RolloutData} from "./rolloutdata.js" */

/** Steps in the document at first; a button adds as many. */
const SHOWN = 10;

export class RolloutDiff {
  /** @param {RolloutData} data @param {() => void} onEnd */
  constructor(data, onEnd) {
    this.data = data;
    this.onEnd = onEnd;
    this.shown = SHOWN;
    /** Somebody wants to see the equal steps, too. */
    this.isWhole = false;
    this.key = "";
    this.head = h("div", { class: "panelhead" });
    this.list = h("ol", { class: "difflist" });
    this.more = h("div");
    this.element = h("section", { class: "panel session-view", "aria-label": "Diff" }, this.head, this.list, this.more);
    this.element.hidden = true;
  }

  /** @param {[Column, Column]|null} pair */
  show(pair) {
    this.element.hidden = pair === null;
    if (pair === null) return;
    const [one, other] = pair;
    const steps = Math.max(one.head?.marks.length ?? 0, other.head?.marks.length ?? 0);
    const places = Array.from({ length: steps }, (_, index) => index);
    const unequal = places.filter((index) => !isEqual(one, other, index));
    const visibleSteps = (this.isWhole ? places : unequal).slice(0, this.shown);
    const left = (this.isWhole ? places : unequal).length - visibleSteps.length;
    const pairs = visibleSteps.map((index) => [index, this.#step(one, index), this.#step(other, index)]);
    const key = JSON.stringify([one.sessionId, other.sessionId, one.branch, other.branch, this.isWhole, steps, pairs.map(stateOf)]);
    if (key === this.key) return;
    this.key = key;
    this.#showHead(pair, steps, steps - unequal.length);
    replace(
      this.list,
      pairs.map(([index, mine, theirs]) => stepItem(Number(index), asStep(mine), asStep(theirs))),
    );
    const showMore = () => {
      this.shown += SHOWN;
      this.show(pair);
    };
    replace(this.more, left > 0 && button(`show ${Math.min(SHOWN, left)} more of ${count(left)}`, showMore));
  }

  /** @param {Column} column @param {number} index */
  #step(column, index) {
    return index < (column.head?.marks.length ?? 0) ? this.data.step(column, index) : undefined;
  }

  /** @param {[Column, Column]} pair @param {number} steps @param {number} equal */
  #showHead(pair, steps, equal) {
    const [one, other] = pair;
    const toggle = () => {
      this.isWhole = !this.isWhole;
      this.show(pair);
    };
    replace(
      this.head,
      h("h2", null, "Diff of ", named(one.key), " and ", named(other.key)),
      h("span", { class: "note" }, pair.map(rewardOf).join(" and ")),
      equal > 0 && h("span", { class: "note" }, `${count(equal)} of ${count(steps)} steps are equal`),
      equal > 0 && button("show them", toggle, { "aria-pressed": String(this.isWhole) }),
      button("Back to all", () => this.onEnd()),
      h("span", { class: "switches" }, pair.map(({ sessionId }) => [h("a", { href: sessionHref(sessionId) }, named(sessionId)), " "])),
    );
  }
}

/** @param {Column} column @returns {string} */
function rewardOf({ head }) {
  return head?.reward == null ? "no reward" : `reward ${decimal(head.reward)}`;
}

/** @param {unknown} value */
function asStep(value) {
  return /** @type {RolloutStep|Error|null|undefined} */ (value);
}

/** @param {unknown[]} pair @returns {unknown[]} what decides how it is shown */
function stateOf([index, ...steps]) {
  const states = steps.map((step) => (step instanceof Error ? "failed" : step ? "read" : String(step)));
  return [index, ...states];
}

/** Do a step's own messages agree? The marks are of all before, too. @param {Column} one @param {Column} other @param {number} index */
function isEqual(one, other, index) {
  return one.head?.marks[index]?.[1] === other.head?.marks[index]?.[1];
}

/** @param {number} index @param {RolloutStep|Error|null|undefined} one @param {RolloutStep|Error|null|undefined} other */
function stepItem(index, one, other) {
  const title = h("h3", null, `Step ${index + 1}`);
  if (one === null || other === null) return h("li", null, title, h("p", { class: "note" }, "Loading …"));
  const failed = [one, other].find((step) => step instanceof Error);
  if (failed instanceof Error) return h("li", null, title, h("p", { class: "note" }, failed.message));
  const [left, right] = [textOf(/** @type {any} */ (one)), textOf(/** @type {any} */ (other))];
  const parts = difference(left, right);
  const side = (/** @type {"removed"|"added"} */ own) => {
    const shown = parts.filter((part) => part.kind === "same" || part.kind === own);
    return h("pre", { class: "text", dir: "auto", tabindex: "0" }, shown.map((part) => marked(part)));
  };
  const isSame = left === right;
  return h(
    "li",
    null,
    title,
    isSame && h("p", { class: "note" }, "The messages of this step are equal."),
    h("div", { class: "sides" }, one === undefined ? ended() : side("removed"), other === undefined ? ended() : side("added")),
  );
}

function ended() {
  return h("p", { class: "note" }, "This rollout has ended.");
}

/** @param {import("./diff.js").Part} part @returns {Child} */
function marked({ kind, text }) {
  if (kind === "same") return visible(text);
  return h(kind === "removed" ? "del" : "ins", null, visible(text));
}

/** @param {RolloutStep|undefined} step @returns {string} its messages as one text */
function textOf(step) {
  return (step?.messages ?? [])
    .map(({ message, error }) => {
      if (error !== undefined) return `[${error}]`;
      const fields = /** @type {ChatMessage} */ (message ?? {});
      const reasoning = fields.reasoning_content ?? fields.reasoning;
      return [
        `${fields.role ?? "?"}:`,
        reasoning && `(reasoning) ${plain(reasoning)}`,
        plain(fields.content),
        Array.isArray(fields.tool_calls) && fields.tool_calls.map(callText).join("\n"),
      ]
        .filter(Boolean)
        .join("\n");
    })
    .join("\n\n");
}

/** @param {any} call @returns {string} */
function callText(call) {
  const { name = "?", arguments: given = "" } = call?.function ?? {};
  return `calls ${name} ${typeof given === "string" ? pretty(given) : JSON.stringify(given, null, 2)}`;
}

/** @param {unknown} content @returns {string} */
function plain(content) {
  if (content == null) return "";
  return typeof content === "string" ? content : JSON.stringify(content, null, 2);
}
