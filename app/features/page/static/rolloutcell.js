/** What stands in the columns of rollouts side by side: a column's head, and a turn. */

import { messageElement } from "./conversation.js";
import { badge, h, message, svg } from "./dom.js";
import { count, decimal } from "./format.js";
import { classOf } from "./logprobs.js";
import { sessionHref } from "./route.js";
import { named } from "./visible.js";

/** @import {Child, RolloutStep} from "../ui_types.d.ts" */
/** @import {Column} from "./rolloutdata.js" */

/**
 * The probabilities of a turn's tokens as a strip: the colours of the tokens view, the lowest of each part.
 * @param {RolloutStep} step
 * @returns {Child}
 */
function probabilityStrip({ strip, mean_logprob: mean, output_tokens: tokens }) {
  if (!strip.length) return null;
  const lowest = Math.exp(Math.min(...strip));
  const text = `Probabilities of ${count(tokens)} tokens: mean ${percent(Math.exp(mean ?? 0))}, lowest ${percent(lowest)}`;
  return svg(
    "svg",
    { class: "strip", viewBox: `0 0 ${strip.length} 1`, preserveAspectRatio: "none", role: "img", "aria-label": text },
    svg("title", null, text),
    strip.map((logprob, at) => svg("rect", { x: at, y: 0, width: 1.02, height: 1, class: `lp${classOf(logprob)}` })),
  );
}

/** @param {number} probability @returns {string} */
function percent(probability) {
  return `${(100 * probability).toPrecision(2).replace(/\.?0+$/, "") || 0} %`.replace(/^(\d+)e\+?\d+ %$/, "100 %");
}

/**
 * @param {Column} column
 * @param {number} index of the turn
 * @param {RolloutStep|Error|null} step
 * @param {boolean} isDifferent here the rollout begins to differ from the first column
 * @returns {Child}
 */
export function turnCell(column, index, step, isDifferent) {
  const known = column.head?.marks[index];
  if (!known) return null;
  const [turn] = known;
  const link = h("a", { href: sessionHref(column.sessionId, { turn }) }, `turn ${turn}`);
  if (step === null) return [h("p", { class: "who" }, link), h("p", { class: "note" }, "Loading …")];
  if (step instanceof Error) return [h("p", { class: "who" }, link), message("error", step.message)];
  return [
    h(
      "p",
      { class: "who" },
      link,
      isDifferent && badge("first difference", "warn"),
      step.finish_reason && h("span", { class: "note" }, named(step.finish_reason)),
      h("span", { class: "note" }, `${count(step.prompt_tokens)} + ${count(step.output_tokens)} tokens`),
    ),
    probabilityStrip(step),
    step.error && h("p", { class: "note" }, named(step.error)),
    h("ol", { class: "conversation" }, step.messages.map((entry) => messageElement(entry, { sessionId: column.sessionId }))),
  ];
}

/**
 * @typedef {object} HeadOptions
 * @property {boolean} isReference the others are compared with this column
 * @property {number|null} differsFrom the index of the first turn that differs
 * @property {boolean} isChosen for the diff
 * @property {(isChosen: boolean) => void} onChoose
 * @property {(branch: number) => void} onBranch
 */

/** @param {Column} column @param {HeadOptions} options @returns {Child} */
export function columnHead(column, options) {
  const { key, sessionId, head, error } = column;
  const name = h("a", { href: sessionHref(sessionId) }, named(sessionId));
  if (error) return [h("strong", null, name), h("p", { class: "note" }, String(/** @type {Error} */ (error).message))];
  if (!head) return [h("strong", null, name), h("p", { class: "note" }, "Loading …")];
  const box = h("input", { type: "checkbox", "data-key": `choose ${key}`, "aria-label": `compare ${key}` });
  box.checked = options.isChosen;
  box.addEventListener("change", () => options.onChoose(box.checked));
  return [
    h(
      "p",
      { class: "who" },
      h("label", { class: "check" }, box, "diff"),
      h("strong", null, name),
      head.attempt !== null && h("span", { class: "note" }, `attempt ${head.attempt}`),
      badge(head.status === "open" ? "open" : head.status),
    ),
    h(
      "p",
      { class: "who" },
      h("span", { class: "reward" }, head.reward === null ? "no reward" : `reward ${decimal(head.reward)}`),
      Object.entries(head.components).map(([part, value]) =>
        h("span", { class: "note" }, named(part), ` ${decimal(value)}`),
      ),
    ),
    h(
      "p",
      { class: "note" },
      `${count(head.turns)} ${head.turns === 1 ? "turn" : "turns"}, `,
      h("a", { href: sessionHref(sessionId, { branch: head.branch, tab: "tokens" }) }, `${count(head.tokens)} tokens`),
      `, ${count(head.output_tokens)} sampled`,
      head.turns > 0 && [", ends with ", named(head.marks.at(-1)?.[3] ?? "–")],
    ),
    h("p", { class: "note" }, difference(options), branchChoice(column, options)),
  ];
}

/** @param {HeadOptions} options @returns {string} */
function difference({ isReference, differsFrom }) {
  if (isReference) return "the others are compared with this one";
  return differsFrom === null ? "as the first column" : `differs from step ${differsFrom + 1} on`;
}

/** @param {Column} column @param {HeadOptions} options @returns {Child} */
function branchChoice({ key, sessionId, head }, { onBranch }) {
  if (!head?.branches.length) return null;
  const select = h(
    "select",
    { "aria-label": `branch of ${sessionId}`, "data-key": `branch ${key}` },
    head.branches.map(({ branch, cause, step }) =>
      h("option", { value: branch }, `branch ${branch}${cause ? `, ${cause}` : ""}${step ? ` after step ${step}` : ""}`),
    ),
  );
  select.value = String(head.branch);
  select.addEventListener("change", () => onBranch(Number(select.value)));
  return [` · ${count(head.branches.length)} branches `, select];
}
