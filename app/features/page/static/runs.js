/** All runs, by name: how much is in each, and how it goes. */

import { h, message } from "./dom.js";
import { count, decimal } from "./format.js";
import { ListView, PAGE } from "./listview.js";
import { listHref } from "./route.js";
import { badgeCell, linkCell, numberColumn, sinceCell } from "./rows.js";

/** @import {Column, ListedRun, Overview, Place, RunPage, SessionRow} from "../ui_types.d.ts" */

/** @extends {ListView<ListedRun, RunPage>} */
export class RunsView extends ListView {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, place) {
    super(root, "", place, {
      label: "Runs",
      noun: "run",
      path: "/runs",
      parameters: { limit: PAGE },
      columns: columns(place),
      keyOf: (one) => one.run,
      rowsOf: (page) => page.runs,
      nothing,
    });
    this.fill("Runs", this.total, this.tools(() => this.request), this.table.element);
    this.gate = place.overview()?.gate.version;
    this.refresh();
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    this.hasNews = true;
  }

  /** @param {Overview} overview */
  onOverview({ gate }) {
    if (gate.version !== this.gate) this.changed();
    this.gate = gate.version;
  }
}

function nothing() {
  return message(
    "empty",
    "There are no runs yet.",
    h("p", null, "A session that names a ", h("code", null, "run"), " makes it; one that names none is in the run ", h("code", null, "default"), "."),
  );
}

/** @param {Place} place @returns {Column<ListedRun>[]} */
function columns({ overview }) {
  const width = "96px";
  return [
    { title: "Run", isHeader: true, fill: linkCell((one) => one.run, ({ run }) => listHref("runs", { run })) },
    { title: "State", width, fill: badgeCell(({ run, status }) => (overview()?.gate.paused_runs.includes(run) ? "paused" : status)) },
    numberColumn("Open", (one) => count(one.sessions.open), { width, hint: "Sessions that are open" }),
    numberColumn("Closed", (one) => count(one.sessions.closed), { width }),
    numberColumn("Turns", (one) => count(one.turns), { width }),
    numberColumn("Groups", (one) => count(one.groups.complete), { width, hint: "Complete ones" }),
    numberColumn("Acknowledged", (one) => count(one.groups.acknowledged), { width: "120px", hint: "Groups that a trainer has taken" }),
    numberColumn("Failed", (one) => count(Object.values(one.failed).reduce((sum, some) => sum + some, 0)), { width, hint: "Rollouts" }),
    numberColumn("Mean reward", (one) => decimal(one.reward?.mean), { width: "112px" }),
    numberColumn("Weights", (one) => String(one.weight_versions.newest ?? "–"), { width, hint: "The newest version that is a number" }),
    { title: "Last change", width: "112px", number: true, fill: sinceCell((one) => one.last_at) },
  ];
}
