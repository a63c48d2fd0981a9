/** All checkpoints. The command line makes, restores and deletes them; the page only shows what there is. */

import { get } from "./api.js";
import { copyCurl } from "./copy.js";
import { bar, button, h, message, replace, setText } from "./dom.js";
import { amount, count } from "./format.js";
import { checkpointHref } from "./route.js";
import { badgeCell, linkCell, sinceCell, textCell } from "./rows.js";
import { LongTable } from "./table.js";
import { View } from "./view.js";

/** @import {Checkpoint, CheckpointList, Overview} from "../ui_types.d.ts" */
/** @import {Column} from "./rows.js" */
/** @import {Place} from "./view.js" */

/**
 * A view that is read anew when the fleet's log has a new event: a restore, and a checkpoint that waits for turns, hold
 * all turns by one. It does not ask again and again, since the server counts all rows of a checkpoint.
 */
export class FollowsFleet extends View {
  /** @type {number|undefined} the last event of the fleet's log that was known when the view was read */
  #version;

  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { overview }) {
    super(root);
    this.#version = overview()?.gate.version;
  }

  /** @param {Overview} overview */
  onOverview({ gate }) {
    const hasChanged = this.#version !== undefined && this.#version !== gate.version;
    this.#version = gate.version;
    if (hasChanged) this.changed();
  }
}

export class CheckpointsView extends FollowsFleet {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, place) {
    super(root, place);
    this.table = new LongTable(this.closed, {
      label: "Checkpoints",
      columns: columns(),
      keyOf: (/** @type {Checkpoint} */ one) => one.name,
    });
    this.total = h("span", { role: "status" });
    const again = button("Refresh", () => this.refresh(), { class: "quiet" });
    replace(
      root,
      h("h1", { class: "visually-hidden" }, "Checkpoints"),
      bar(this.total, [again, copyCurl(() => ({ path: "/checkpoints" }))]),
      this.problem,
      this.table.element,
    );
    this.table.setFoot("Loading …");
    this.refresh();
  }

  /** @param {unknown} error */
  onFailure(error) {
    this.table.setFoot();
    super.onFailure(error);
  }

  refresh() {
    return this.read(
      async (signal) => /** @type {CheckpointList} */ (await get("/checkpoints", {}, signal)),
      ({ checkpoints }) => {
        const newest = checkpoints.toReversed();
        this.table.show(newest, newest.length, false);
        setText(this.total, `${amount(newest.length, "checkpoint")}, newest first`);
        this.table.setFoot(newest.length ? "All shown" : nothing());
      },
    );
  }
}

function nothing() {
  return message(
    "empty",
    "There are no checkpoints.",
    h("p", null, h("code", null, "turnlog checkpoint make step-40"), " makes one: the store can be taken back to it."),
  );
}

/** @returns {Column<Checkpoint>[]} */
function columns() {
  const number = (/** @type {string} */ title, /** @type {(one: Checkpoint) => string} */ text, more = {}) => ({
    title,
    width: "96px",
    number: true,
    fill: textCell(text),
    ...more,
  });
  return [
    { title: "Checkpoint", isHeader: true, fill: linkCell((one) => one.name, (one) => checkpointHref(one.name)) },
    { title: "Made", width: "96px", number: true, fill: sinceCell((one) => one.created_at) },
    number("Sessions", (one) => count(one.sessions)),
    number("Groups", (one) => count(one.groups), { hint: "Of the training feed" }),
    number("Erased", (one) => count(one.erased), { hint: "Its sessions whose content has been erased since" }),
    {
      title: "Cut",
      hint: "now: at one moment; drain: after the turns in flight had ended; restore: what a restore replaced",
      width: "96px",
      fill: textCell((one) => one.cut),
    },
    {
      title: "State",
      width: "130px",
      fill: badgeCell((one) => one.state, (one) => (one.state === "made" ? "good" : "warn")),
    },
    { title: "Before the restore of", width: "180px", fill: textCell((one) => one.restores ?? "–") },
  ];
}
