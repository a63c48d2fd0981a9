/** The form above the exports: filters and options of GET /export, by their own names. */

import { folded, h } from "./dom.js";
import { checkbox, choice, chosen, field, numberField, QueryForm, textField } from "./form.js";

/** @import {Values} from "./form.js" */

const SHAPES = ["turnlog", "slime", "miles", "verl", "skyrl", "trl", "trl-async", "openenv", "tinker", "areal", "xtuner", "rllm", "prime-rl", "atropos", "tree"];

/** @param {AbortSignal} closed @param {(query: Values) => void} onChange */
export function exportForm(closed, onChange) {
  return new QueryForm(closed, onChange, "change", fields());
}

function fields() {
  const atLeast0 = { step: "1", min: "0" };
  const time = (/** @type {string} */ name) => h("input", { name, type: "datetime-local", step: "1" });
  return h(
    "form",
    { class: "filters", "aria-label": "What to export" },
    field("Session", textField("session_id")),
    chosen("run"),
    field("Group", textField("group_id")),
    field("Group begins with", textField("group_prefix")),
    field("Metadata key=value", textField("metadata", { pattern: "[^=]+=.*" })),
    field("Row's status", choice("status", ["completed", "truncated", "aborted"])),
    field("Session is", choice("session_status", ["open", "closed", "erased"])),
    field("Reward from", numberField("min_reward", { step: "any" })),
    field("to", numberField("max_reward", { step: "any" })),
    field("Shape", choice("shape", SHAPES)),
    field("Advantage", choice("advantage", ["grpo"], "none")),
    field("Tokens, at most", numberField("max_seq_len", atLeast0)),
    field("Rows, at most", numberField("limit", atLeast0)),
    folded("More", [
      field("Name", textField("name")),
      field("Generation", numberField("generation", { step: "1", min: "1" })),
      field("Staleness, at most", numberField("max_staleness", atLeast0)),
      field("of weights", numberField("weight_version", atLeast0)),
      field("staler ones", choice("stale", ["mask", "keep"], "drop")),
      field("Committed from, UTC", time("since")),
      field("until, UTC", time("until")),
      field("Branches", choice("branches", ["kept", "main", "longest", "all"], "the server's")),
      field("Each turn in the loss", choice("loss", ["every"], "once")),
      field("Rewards", choice("rewards", ["turn"], "total")),
      field("Columns", textField("columns")),
      field("Most likely tokens", numberField("top_k", { step: "1", min: "1", max: "20" })),
      field("cut", choice("truncate", ["token"], "turn")),
      field("Images", choice("images", ["inline", "none"], "hash")),
      field("Payload rows", choice("routing", ["sampled"], "newest")),
      field("Failed rollouts", choice("failed", ["keep"], "drop")),
      checkbox("evaluation", "evaluations too"),
      checkbox("replay", "replay payloads"),
      checkbox("explain", "rows that say what is left out"),
    ]),
    h("button", null, "Count"),
  );
}
