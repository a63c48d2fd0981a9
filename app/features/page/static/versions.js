/** The newest weight versions: how many sessions each has, and how they went. Charts are Prometheus' and Grafana's. */

import { h, message, replace } from "./dom.js";
import { count, decimal } from "./format.js";
import { chosenRun } from "./route.js";
import { numberColumn, sinceCell, smallTable } from "./rows.js";
import { View } from "./view.js";

/** @import {VersionRow} from "../ui_types.d.ts" */

export class VersionsView extends View {
  /** @param {HTMLElement} root */
  constructor(root) {
    super(root);
    this.nothing = h("div");
    this.table = smallTable(
      "Weight versions",
      [
        numberColumn("Version", (/** @type {VersionRow} */ one) => String(one.version), { isHeader: true }),
        numberColumn("Sessions", (one) => count(one.sessions), { hint: "Sessions whose newest turn's weights are of this version" }),
        numberColumn("Open", (one) => count(one.open)),
        numberColumn("Turns", (one) => count(one.turns)),
        numberColumn("Rewarded", (one) => count(one.rewarded)),
        numberColumn("Mean reward", (one) => decimal(one.mean_reward)),
        { title: "Last change", number: true, fill: sinceCell((one) => one.updated_at) },
      ],
      (one) => String(one.version),
    );
    this.request = { path: "/ui/api/versions", parameters: { run: chosenRun() } };
    this.fill("Versions", null, this.tools(() => this.request), this.nothing, this.table.element);
    this.refresh();
  }

  refresh() {
    return this.read(this.request, (/** @type {VersionRow[]} */ rows) => {
      replace(this.nothing, !rows.length && message("empty", "No session has a weight version that is a number."));
      this.table.rows.show(rows);
    });
  }
}
