/** A session's turns by the stages that their time went to; what failed or was rolled back stands in its place. */

import { url } from "./api.js";
import { badge, bytes, clock, count, h, milliseconds, replace, since } from "./dom.js";
import { named } from "./visible.js";

/** The stages of a turn, in their order. */
export const STAGES = ["gate", "claim", "prepare", "engine", "validate"];

const COLUMNS = ["Turn", "State", "Stages", "Total", "Prompt", "Output", "Finish", "Weights", "Opened"];

const NUMBERS = new Set(["Total", "Prompt", "Output", ...STAGES]);

/** Rows in the document at a time: a session may have thousands of turns. */
const ROWS = 100;

/**
 * @typedef {object} Row
 * @property {"turn"|"failed"|"rollback"|"open"} kind
 * @property {number} order the seq it has in the log
 * @property {any} fact as the API gives it
 */

/**
 * A rollback stands before the turn in whose commit it is.
 * @param {any} rollback
 * @param {any[]} turns
 * @returns {number}
 */
function placeOf(rollback, turns) {
  const cause = turns.find(
    (turn) => turn.fence < rollback.seq && turn.seq >= rollback.seq - 1 && !rollback.discarded.includes(turn.turn),
  );
  return cause ? cause.fence - 0.5 : rollback.seq;
}

/**
 * @param {any} session as the API gives it
 * @returns {Row[]} in the order in which they began
 */
function rowsOf(session) {
  const rows = [
    ...session.turns.map((fact) => ({ kind: "turn", order: fact.fence, fact })),
    ...session.failed.map((fact) => ({ kind: "failed", order: fact.fence, fact })),
    ...session.rollbacks.map((fact) => ({ kind: "rollback", order: placeOf(fact, session.turns), fact })),
  ];
  if (session.open_turn) rows.push({ kind: "open", order: session.open_turn.fence, fact: session.open_turn });
  return rows.sort((one, other) => one.order - other.order);
}

/** @param {any} timing @param {boolean} withEngine @returns {number} milliseconds */
function totalOf(timing, withEngine = true) {
  return STAGES.reduce((sum, stage) => sum + (withEngine || stage !== "engine" ? (timing[stage] ?? 0) : 0), 0);
}

/** @param {any} timing @returns {string} every stage with its time */
function spelled(timing) {
  return STAGES.map((stage) => `${stage} ${milliseconds(timing[stage])}`).join(", ");
}

/** The timeline of one session. */
export class Timeline {
  /** @param {(turn: number) => void} onPick somebody wants to read this turn's conversation */
  constructor(onPick) {
    this.onPick = onPick;
    this.withEngine = true;
    this.asNumbers = false;
    /** @type {number|null} the first row shown; null: the newest */
    this.first = null;
    /** @type {number|null} */
    this.picked = null;
    this.body = h("tbody", null);
    this.head = h("tr", null);
    this.pager = h("span", { class: "pager" });
    this.detail = h("p", { class: "stagedetail" });
    this.element = h(
      "section",
      { class: "panel", "aria-labelledby": "timeline-title" },
      h(
        "div",
        { class: "panelhead" },
        h("h2", { id: "timeline-title" }, "Turns"),
        this.#legend(),
        this.pager,
        this.#switches(),
      ),
      h("div", { class: "table-scroll" }, h("table", { class: "timeline" }, h("thead", null, this.head), this.body)),
      this.detail,
    );
    this.body.addEventListener("mouseover", (event) => this.#explain(event));
    this.body.addEventListener("focusin", (event) => this.#explain(event));
  }

  /** @param {any} session @param {number|null} picked the turn whose conversation is shown */
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

  #legend() {
    return h(
      "span",
      { class: "legend" },
      STAGES.map((stage) =>
        h("span", null, h("span", { class: `swatch stage-${stage}`, "aria-hidden": "true" }), stage),
      ),
    );
  }

  #switches() {
    const one = (label, pressed, change) => {
      const button = h("button", { type: "button", "aria-pressed": String(pressed) }, label);
      button.addEventListener("click", () => {
        const now = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(now));
        change(now);
        this.#render();
      });
      return button;
    };
    return h(
      "span",
      { class: "switches" },
      one("without engine", false, (on) => (this.withEngine = !on)),
      one("as numbers", false, (on) => (this.asNumbers = on)),
    );
  }

  #render() {
    if (!this.rows) return;
    const focused = this.body.contains(document.activeElement)
      ? document.activeElement?.getAttribute("data-key")
      : null;
    const first = Math.max(0, Math.min(this.first ?? Infinity, this.rows.length - ROWS));
    const shown = this.rows.slice(first, first + ROWS);
    const scale = Math.max(
      1e-6,
      ...shown.map((row) => (row.kind === "turn" && row.fact.timing ? totalOf(row.fact.timing, this.withEngine) : 0)),
    );
    const columns = this.asNumbers ? COLUMNS.flatMap((name) => (name === "Stages" ? STAGES : [name])) : COLUMNS;
    replace(
      this.head,
      columns.map((name) => h("th", { scope: "col", class: NUMBERS.has(name) ? "number" : null }, name)),
    );
    replace(
      this.body,
      shown.map((row) => this.#row(row, scale, columns.length)),
    );
    this.#page(first);
    if (focused) this.body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  #page(first) {
    const total = this.rows.length;
    if (total <= ROWS) {
      replace(this.pager, total === 0 ? "no turn yet" : null);
      return;
    }
    const go = (to) => () => {
      this.first = to !== null && to + ROWS >= total ? null : to;
      this.#render();
    };
    replace(
      this.pager,
      h("button", { type: "button", disabled: first === 0, onclick: go(Math.max(0, first - ROWS)) }, "earlier"),
      ` ${count(first + 1)} to ${count(Math.min(first + ROWS, total))} of ${count(total)} `,
      h("button", { type: "button", disabled: first + ROWS >= total, onclick: go(first + ROWS) }, "later"),
    );
  }

  /** @param {Row} row @param {number} scale milliseconds that fill a bar @param {number} columns */
  #row(row, scale, columns) {
    if (row.kind === "rollback") return this.#rollback(row.fact, columns);
    if (row.kind === "failed") return this.#failed(row.fact, columns);
    if (row.kind === "open") return this.#open(row.fact, columns);
    return this.#turn(row.fact, scale);
  }

  #turn(turn, scale) {
    const state = turn.live ? badge("committed", "good") : badge("discarded", "muted");
    const cause = turn.segment_cause && badge(`new segment: ${turn.segment_cause}`, "warn");
    const stages = this.asNumbers
      ? STAGES.map((stage) => h("td", { class: "number" }, milliseconds(turn.timing?.[stage])))
      : h("td", { class: "stages" }, turn.timing ? this.#bar(turn.timing, scale) : "–");
    return h(
      "tr",
      {
        class: turn.live ? "" : "discarded",
        dataset: { fence: turn.fence },
        "aria-current": turn.turn === this.picked ? "true" : null,
      },
      h("th", { scope: "row" }, this.#button(turn)),
      h("td", null, state, cause, turn.discarded_by && h("span", { class: "note" }, ` by event ${turn.discarded_by}`)),
      stages,
      h("td", { class: "number" }, turn.timing ? milliseconds(totalOf(turn.timing)) : "–"),
      h("td", { class: "number" }, count(turn.prompt_tokens)),
      h("td", { class: "number" }, count(turn.output_tokens)),
      h("td", null, named(turn.finish_reason ?? "–")),
      h("td", null, named(turn.weight_versions.map((span) => span.version).join(" → ") || "–")),
      h("td", null, since(turn.opened_at)),
    );
  }

  #button(turn) {
    const label = `turn ${turn.turn}${turn.live ? "" : ", discarded"}: read its conversation`;
    return h(
      "button",
      {
        type: "button",
        class: "link",
        "data-key": `turn-${turn.turn}`,
        "aria-label": label,
        onclick: () => this.onPick(turn.turn),
      },
      turn.turn,
    );
  }

  #bar(timing, scale) {
    const parts = STAGES.filter((stage) => (this.withEngine || stage !== "engine") && timing[stage]);
    return [
      h(
        "div",
        { class: "stagebar", "aria-hidden": "true" },
        parts.map((stage) =>
          h("div", { class: `stage-${stage}`, style: { width: `${(100 * timing[stage]) / scale}%` } }),
        ),
      ),
      h("span", { class: "visually-hidden" }, spelled(timing)),
    ];
  }

  #failed(failed, columns) {
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
        failed.ended_at != null &&
          failed.opened_at != null &&
          ` · after ${milliseconds((failed.ended_at - failed.opened_at) * 1000)}`,
      ),
      h("td", null, since(failed.opened_at)),
    );
  }

  #keptReply(failed) {
    const href = url(`/sessions/${encodeURIComponent(this.session.session_id)}/rejected/${failed.fence}`);
    return h("a", { href, download: true }, `the reply's first ${bytes(failed.kept_bytes)}`);
  }

  #rollback(rollback, columns) {
    const gone = rollback.discarded.length === 1 ? "turn" : "turns";
    const to = rollback.to_turn === 0 ? "the beginning" : `turn ${rollback.to_turn}`;
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
      h(
        "td",
        { colspan: columns - 3 },
        `to ${to}: ${gone} ${rollback.discarded.join(", ")} discarded by event ${rollback.seq}`,
      ),
      h("td", null, since(rollback.at)),
    );
  }

  #open(open, columns) {
    return h(
      "tr",
      { class: "open" },
      h("th", { scope: "row" }, open.turn),
      h("td", null, badge("claimed")),
      h("td", { colspan: columns - 3 }, "a turn is in flight", open.adapter && [", adapter ", named(open.adapter)]),
      h("td", null, since(open.opened_at)),
    );
  }

  /** @param {Event} event the pointer or the focus came to a row: say all that is known of its time */
  #explain(event) {
    const fence = Number(event.target.closest?.("tr[data-fence]")?.dataset.fence);
    const turn = this.session?.turns.find((one) => one.fence === fence);
    if (!turn || this.detail.dataset.fence === String(fence)) return;
    this.detail.dataset.fence = String(fence);
    replace(
      this.detail,
      h("strong", null, `Turn ${turn.turn}`),
      turn.timing ? ` ${spelled(turn.timing)}; total ${milliseconds(totalOf(turn.timing))}.` : " no stage was timed.",
      ` Fence ${turn.fence}, event ${turn.seq}, opened ${clock(turn.opened_at)}.`,
      ` Prompt ${count(turn.base_tokens)} known + ${count(turn.suffix_tokens)} new`,
      turn.cached_tokens != null && `, ${count(turn.cached_tokens)} cached`,
      turn.trimmed ? `, ${count(turn.trimmed)} trimmed` : null,
      ". Engine ",
      named(turn.engine),
      ` (${turn.dialect}, ${turn.protocol}).`,
      turn.adapter && [" Adapter ", named(turn.adapter), "."],
      turn.dispatched != null && [" Dispatched with weights ", named(turn.dispatched), "."],
      turn.parts.length > 1 && ` Joined from ${turn.parts.length} generations.`,
      turn.payloads.map((one) => ` ${one.kind}: ${count(one.rows)} rows${one.tombstoned ? " (tombstoned)" : ""}.`),
    );
  }
}
