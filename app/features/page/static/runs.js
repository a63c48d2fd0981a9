/** All runs, by name: how much is in each, and how it goes. */

import { button, h, message, setText } from "./dom.js";
import { amount, count, decimal } from "./format.js";
import { listHref } from "./route.js";
import { badgeCell, linkCell, numberColumn, sinceCell } from "./rows.js";
import { LongTable } from "./table.js";
import { every, View } from "./view.js";

/** @import {ListedRun, RunPage, SessionRow} from "../ui_types.d.ts" */
/** @import {Column} from "./rows.js" */

const PAGE = 200;
const REFRESH_MS = 5000;

export class RunsView extends View {
  /** @param {HTMLElement} root */
  constructor(root) {
    super(root);
    /** @type {ListedRun[]} */
    this.runs = [];
    /** @type {string|null} */
    this.cursor = null;
    this.hasNews = false;
    this.table = new LongTable(this.closed, {
      label: "Runs",
      columns: columns(),
      keyOf: (/** @type {ListedRun} */ one) => one.run,
      onNearEnd: () => this.#more(),
    });
    this.total = h("span", { role: "status" });
    this.fill("Runs", this.total, this.tools(() => ({ path: "/runs", parameters: { limit: PAGE } })), this.table.element);
    this.table.setFoot("Loading …");
    every(this.closed, REFRESH_MS, () => {
      if (this.hasNews && !this.requests.isRunning && !this.table.isHeld && this.table.isAtTop) this.refresh();
    });
    this.refresh();
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    this.hasNews = true;
  }

  refresh() {
    this.hasNews = false;
    return this.#read(null);
  }

  #more() {
    if (this.cursor && !this.requests.isRunning) this.#read(this.cursor);
  }

  /** @param {string|null} cursor */
  #read(cursor) {
    return this.read({ path: "/runs", parameters: { limit: PAGE, cursor } }, (/** @type {RunPage} */ page) => {
      this.runs = cursor === null ? page.runs : [...this.runs, ...page.runs];
      this.cursor = page.next_cursor;
      this.table.show(this.runs, this.runs.length, false);
      setText(this.total, `${amount(this.runs.length, "run")}${this.cursor ? " or more" : ""}`);
      if (this.cursor) this.table.setFoot(`${count(this.runs.length)} loaded`, button("Load more", () => this.#more()));
      else this.table.setFoot(this.runs.length ? "All shown" : nothing());
    });
  }
}

function nothing() {
  return message(
    "empty",
    "There are no runs yet.",
    h("p", null, "A session that names a ", h("code", null, "run"), " makes it; one that names none is in the run ", h("code", null, "default"), "."),
  );
}

/** @returns {Column<ListedRun>[]} */
function columns() {
  const width = "96px";
  return [
    { title: "Run", isHeader: true, fill: linkCell((one) => one.run, ({ run }) => listHref("runs", { run })) },
    { title: "State", width, fill: badgeCell((one) => one.status) },
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
