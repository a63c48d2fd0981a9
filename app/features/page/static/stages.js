/** Where a turn's time went in this server: its stages, of all turns on one scale. */

import { button, h, refill, replace, setText } from "./dom.js";
import { clock, count, milliseconds } from "./format.js";
import { SessionPart } from "./view.js";
import { named } from "./visible.js";

/** @import {Child, Session, Stages, Turn} from "../ui_types.d.ts" */

/** In their order. @type {(keyof Stages)[]} */
const STAGES = ["gate", "claim", "prepare", "engine", "validate"];

/** Turns in the document at a time. */
const ROWS = 100;

/** @param {Stages} timing @returns {number} milliseconds */
function total(timing) {
  return STAGES.reduce((sum, stage) => sum + timing[stage], 0);
}

export class StagesTab extends SessionPart {
  body = h("tbody");
  detail = h("p", { class: "stagedetail" });
  pager = h("p", { class: "note" });
  titles = ["Turn", "Stages", "Total", "Opened"].map((name) => h("th", { scope: "col", class: name === "Total" && "number" }, h("span", null, name)));
  table = h("table", { class: "timeline" }, h("thead", null, h("tr", null, this.titles)), this.body);
  element = h("div", { class: "stagesview" }, legend(), this.detail, this.pager, this.table);

  /** @param {Session} session @param {{turn: number|null, branch: number|null}} at */
  update({ turns }, { turn: picked, branch }) {
    const at = Math.max(0, turns.findIndex((one) => one.turn === picked));
    const first = Math.max(0, Math.min(at - ROWS / 2, turns.length - ROWS));
    const shown = turns.slice(first, first + ROWS);
    const scale = Math.max(1e-6, ...shown.map(({ timing }) => (timing ? total(timing) : 0)));
    refill(this.body, shown.map((turn) => this.#row(turn, scale, turn.turn === picked, branch)));
    setText(this.pager, turns.length > ROWS ? `${count(first + 1)} to ${count(first + shown.length)} of ${count(turns.length)}, around the chosen one` : "");
    const turn = turns[at];
    replace(this.detail, turn ? explained(turn) : "No stages yet: they come with a turn's commit.");
    this.body.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  }

  /** @param {Turn} turn @param {number} scale milliseconds that fill a bar @param {boolean} isPicked @param {number|null} branch */
  #row({ turn, timing, opened_at }, scale, isPicked, branch) {
    const parts = STAGES.filter((stage) => timing?.[stage]);
    const width = (/** @type {keyof Stages} */ stage) => `${(100 * (timing?.[stage] ?? 0)) / scale}%`;
    return h(
      "tr",
      { "aria-current": isPicked ? "true" : null },
      h("th", { scope: "row" }, button(String(turn), () => this.pick(turn, branch), { class: "link" })),
      h(
        "td",
        { class: "stages" },
        h("div", { class: "stagebar", "aria-hidden": "true" }, parts.map((stage) => h("div", { class: `stage-${stage}`, style: { width: width(stage) } }))),
        h("span", { class: "visually-hidden" }, timing ? spelled(timing) : "not timed"),
      ),
      h("td", { class: "number" }, timing ? milliseconds(total(timing)) : "–"),
      h("td", null, clock(opened_at)),
    );
  }
}

/** @param {Stages} timing @returns {string} every stage with its time */
function spelled(timing) {
  return STAGES.map((stage) => `${stage} ${milliseconds(timing[stage])}`).join(", ");
}

function legend() {
  const swatch = (/** @type {string} */ stage) => h("span", { class: `swatch stage-${stage}`, "aria-hidden": "true" });
  return h("p", { class: "legend" }, STAGES.map((stage) => h("span", null, swatch(stage), stage)));
}

/** @param {Turn} turn @returns {Child} all that is known of its time */
function explained(turn) {
  const { timing } = turn;
  return [
    h("strong", null, `Turn ${turn.turn}`),
    timing ? ` ${spelled(timing)}; total ${milliseconds(total(timing))}.` : " no stage was timed.",
    ` Fence ${turn.fence}, event ${turn.seq}, opened ${clock(turn.opened_at)}.`,
    ` Prompt ${count(turn.base_tokens)} known + ${count(turn.suffix_tokens)} new`,
    turn.cached_tokens != null && `, ${count(turn.cached_tokens)} cached`,
    turn.trimmed > 0 && `, ${count(turn.trimmed)} trimmed`,
    ". Engine ",
    named(turn.engine),
    ` (${turn.dialect}, ${turn.protocol}).`,
    turn.adapter && [" Adapter ", named(turn.adapter), "."],
    turn.dispatched != null && [" Dispatched with weights ", named(turn.dispatched), "."],
    turn.parts.length > 1 && ` Joined from ${turn.parts.length} generations.`,
    turn.payloads.map((one) => ` ${one.kind}: ${count(one.rows)} rows${one.tombstoned ? " (tombstoned)" : ""}.`),
  ];
}
