/** A session's turns, with the stages of their time; failed turns and rollbacks stand in their place among them. */

import { url } from "./api.js";
import { badge, button, h, panel, replace } from "./dom.js";
import { bytes, clock, count, milliseconds, since } from "./format.js";
import { named } from "./visible.js";

/** @import {Child, FailedTurn, OpenTurn, Rollback, Session, Stages, Turn} from "../ui_types.d.ts" */

/**
 * @typedef {{kind: "turn", order: number, fact: Turn} | {kind: "failed", order: number, fact: FailedTurn}
 *   | {kind: "rollback", order: number, fact: Rollback} | {kind: "open", order: number, fact: OpenTurn}} Row
 *   `order` is the event with which it began
 */

/**
 * The stages of a turn, in their order.
 * @type {(keyof Stages)[]}
 */
const STAGES = ["gate", "claim", "prepare", "engine", "validate"];

const COLUMNS = ["Turn", "State", "Stages", "Total", "Prompt", "Output", "Finish", "Weights", "Opened"];

/** @type {Set<string>} */
const NUMBERS = new Set(["Total", "Prompt", "Output"]);

/** Rows in the document at a time: a session may have thousands of turns. */
const ROWS = 100;

/**
 * A rollback stands before the turn in whose commit it is.
 * @param {Rollback} rollback
 * @param {Turn[]} turns
 * @returns {number}
 */
function orderOf(rollback, turns) {
  const cause = turns.find(
    (turn) => turn.fence < rollback.seq && turn.seq >= rollback.seq - 1 && !rollback.discarded.includes(turn.turn),
  );
  return cause ? cause.fence - 0.5 : rollback.seq;
}

/** @param {Session} session @returns {Row[]} in the order in which they began */
function rowsOf({ turns, failed, rollbacks, open_turns }) {
  /** @type {Row[]} */
  const rows = [
    ...turns.map((fact) => ({ kind: /** @type {const} */ ("turn"), order: fact.fence, fact })),
    ...failed.map((fact) => ({ kind: /** @type {const} */ ("failed"), order: fact.fence, fact })),
    ...rollbacks.map((fact) => ({ kind: /** @type {const} */ ("rollback"), order: orderOf(fact, turns), fact })),
    ...open_turns.map((fact) => ({ kind: /** @type {const} */ ("open"), order: fact.fence, fact })),
  ];
  return rows.sort((one, other) => one.order - other.order);
}

/** @param {Stages} timing @returns {string} every stage with its time */
function spelled(timing) {
  return STAGES.map((stage) => `${stage} ${milliseconds(timing[stage])}`).join(", ");
}

/** @param {Child} content */
function number(content) {
  return h("td", { class: "number" }, content);
}

/** The timeline of one session. */
export class Timeline {
  /** @param {(turn: number) => void} onPick somebody wants to read this turn's conversation */
  constructor(onPick) {
    this.onPick = onPick;
    /** @type {Session|null} */
    this.session = null;
    /** @type {Row[]} */
    this.rows = [];
    /** @type {number|null} the first row shown; null: the newest */
    this.first = null;
    /** @type {number|null} */
    this.picked = null;
    this.body = h("tbody");
    const titles = COLUMNS.map((name) => h("th", { scope: "col", class: NUMBERS.has(name) ? "number" : null }, name));
    this.pager = h("span", { class: "pager" });
    this.detail = h("p", { class: "stagedetail" });
    this.element = panel(
      "timeline-title",
      "Turns",
      [legend(), this.pager],
      h("div", { class: "table-scroll" }, h("table", { class: "timeline" }, h("thead", null, h("tr", null, titles)), this.body)),
      this.detail,
    );
    this.body.addEventListener("mouseover", (event) => this.#explain(event));
    this.body.addEventListener("focusin", (event) => this.#explain(event));
  }

  /** @param {Session} session @param {number|null} picked the turn whose conversation is shown */
  update(session, picked) {
    this.session = session;
    this.rows = rowsOf(session);
    this.picked = picked;
    if (!session.turns.some((turn) => String(turn.fence) === this.detail.dataset.fence)) {
      delete this.detail.dataset.fence;
      replace(this.detail);
    }
    this.#render();
  }

  #render() {
    const focused = this.body.contains(document.activeElement)
      ? document.activeElement?.getAttribute("data-key")
      : null;
    const first = Math.max(0, Math.min(this.first ?? Infinity, this.rows.length - ROWS));
    const shown = this.rows.slice(first, first + ROWS);
    const totals = shown.map(({ kind, fact }) => (kind === "turn" && fact.timing ? sum(fact.timing, STAGES) : 0));
    const scale = Math.max(1e-6, ...totals);
    replace(
      this.body,
      shown.map((row) => this.#row(row, scale, COLUMNS.length)),
    );
    this.#showPager(first);
    if (!focused) return;
    const again = this.body.querySelector(`[data-key="${CSS.escape(focused)}"]`);
    if (again instanceof HTMLElement) again.focus({ preventScroll: true });
  }

  /** @param {number} first row that is shown */
  #showPager(first) {
    const total = this.rows.length;
    if (total <= ROWS) {
      replace(this.pager, total === 0 ? "no turn yet" : null);
      return;
    }
    const go = (/** @type {number} */ to) => () => {
      this.first = to + ROWS >= total ? null : to;
      this.#render();
    };
    replace(
      this.pager,
      button("earlier", go(Math.max(0, first - ROWS)), { disabled: first === 0 }),
      ` ${count(first + 1)} to ${count(Math.min(first + ROWS, total))} of ${count(total)} `,
      button("later", go(first + ROWS), { disabled: first + ROWS >= total }),
    );
  }

  /** @param {Row} row @param {number} scale milliseconds that fill a bar @param {number} columns */
  #row({ kind, fact }, scale, columns) {
    if (kind === "rollback") return rollbackRow(fact, columns);
    if (kind === "failed") return this.#failed(fact, columns);
    if (kind === "open") return openRow(fact, columns);
    return this.#turn(fact, scale);
  }

  /** @param {Turn} turn @param {number} scale */
  #turn(turn, scale) {
    const { timing } = turn;
    const state = turn.live ? badge("committed", "good") : badge("discarded", "muted");
    const cause = turn.segment_cause && badge(`new segment: ${turn.segment_cause}`, "warn");
    return h(
      "tr",
      {
        class: turn.live ? "" : "discarded",
        dataset: { fence: turn.fence },
        "aria-current": turn.turn === this.picked ? "true" : null,
      },
      h("th", { scope: "row" }, this.#turnButton(turn)),
      h("td", null, state, cause, turn.discarded_by && h("span", { class: "note" }, ` by event ${turn.discarded_by}`)),
      h("td", { class: "stages" }, timing ? this.#bar(timing, scale) : "–"),
      number(timing ? milliseconds(sum(timing, STAGES)) : "–"),
      number(count(turn.prompt_tokens)),
      number(count(turn.output_tokens)),
      h("td", null, named(turn.finish_reason ?? "–")),
      h("td", null, named(turn.weight_versions.map((span) => span.version).join(" → ") || "–")),
      h("td", null, since(turn.opened_at)),
    );
  }

  /** @param {Turn} turn */
  #turnButton({ turn, live }) {
    return button(String(turn), () => this.onPick(turn), {
      class: "link",
      "data-key": `turn-${turn}`,
      "aria-label": `turn ${turn}${live ? "" : ", discarded"}: read its conversation`,
    });
  }

  /** @param {Stages} timing @param {number} scale */
  #bar(timing, scale) {
    const parts = STAGES.filter((stage) => timing[stage]);
    const width = (/** @type {keyof Stages} */ stage) => `${(100 * timing[stage]) / scale}%`;
    return [
      h(
        "div",
        { class: "stagebar", "aria-hidden": "true" },
        parts.map((stage) => h("div", { class: `stage-${stage}`, style: { width: width(stage) } })),
      ),
      h("span", { class: "visually-hidden" }, spelled(timing)),
    ];
  }

  /** @param {FailedTurn} failed @param {number} columns */
  #failed(failed, columns) {
    const tookS = failed.opened_at != null && failed.ended_at - failed.opened_at;
    return h(
      "tr",
      { class: "failed", dataset: { fence: failed.fence } },
      h("th", { scope: "row" }, h("s", null, failed.turn)),
      h("td", null, badge(failed.kind, failed.kind === "rejected" ? "bad" : "warn")),
      h(
        "td",
        { colspan: columns - 3 },
        h("strong", null, named(failed.reason)),
        failed.status != null && ` ${failed.status}`,
        failed.detail && [" · ", named(failed.detail)],
        failed.kept_bytes && [" · ", this.#keptReply(failed)],
        tookS !== false && ` · after ${milliseconds(tookS * 1000)}`,
      ),
      h("td", null, since(failed.opened_at)),
    );
  }

  /** @param {FailedTurn} failed */
  #keptReply({ fence, kept_bytes }) {
    const href = url(`/sessions/${encodeURIComponent(this.session?.session_id ?? "")}/rejected/${fence}`);
    return h("a", { href, download: true }, `the reply's first ${bytes(kept_bytes)}`);
  }

  /** The pointer or the focus came to a row: show all that is known of its time. @param {Event} event */
  #explain(event) {
    const row = event.target instanceof Element ? event.target.closest("tr") : null;
    const fence = Number(row?.dataset.fence);
    const turn = this.session?.turns.find((one) => one.fence === fence);
    if (!turn || this.detail.dataset.fence === String(fence)) return;
    this.detail.dataset.fence = String(fence);
    replace(this.detail, explained(turn));
  }
}

/** @param {Stages} timing @param {(keyof Stages)[]} stages @returns {number} milliseconds */
function sum(timing, stages) {
  return stages.reduce((total, stage) => total + timing[stage], 0);
}

function legend() {
  const swatch = (/** @type {string} */ stage) => h("span", { class: `swatch stage-${stage}`, "aria-hidden": "true" });
  return h("span", { class: "legend" }, STAGES.map((stage) => h("span", null, swatch(stage), stage)));
}

/** @param {Rollback} rollback @param {number} columns */
function rollbackRow({ seq, at, to_turn, discarded }, columns) {
  const turns = discarded.length === 1 ? "turn" : "turns";
  const to = to_turn === 0 ? "the beginning" : `turn ${to_turn}`;
  return h(
    "tr",
    { class: "rollback" },
    h(
      "th",
      { scope: "row" },
      h("span", { "aria-hidden": "true" }, "↶"),
      h("span", { class: "visually-hidden" }, "rollback"),
    ),
    h("td", null, badge("rolled back", "warn")),
    h("td", { colspan: columns - 3 }, `to ${to}: ${turns} ${discarded.join(", ")} discarded by event ${seq}`),
    h("td", null, since(at)),
  );
}

/** @param {OpenTurn} open @param {number} columns */
function openRow(open, columns) {
  return h(
    "tr",
    { class: "open" },
    h("th", { scope: "row" }, open.turn),
    h("td", null, badge("running")),
    h("td", { colspan: columns - 3 }, "a turn is in flight", open.adapter && [", adapter ", named(open.adapter)]),
    h("td", null, since(open.opened_at)),
  );
}

/** @param {Turn} turn @returns {Child} all that is known of its time */
function explained(turn) {
  const { timing } = turn;
  return [
    h("strong", null, `Turn ${turn.turn}`),
    timing ? ` ${spelled(timing)}; total ${milliseconds(sum(timing, STAGES))}.` : " no stage was timed.",
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
