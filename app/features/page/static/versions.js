/** The newest weight versions: how many sessions each has, and how they went. Charts are Prometheus' and Grafana's. */

import { get } from "./api.js";
import { copyCurl } from "./copy.js";
import { bar, button, h, message, replace } from "./dom.js";
import { count, decimal } from "./format.js";
import { sinceCell, smallTable, textCell } from "./rows.js";
import { View } from "./view.js";

/** @import {VersionRow} from "../ui_types.d.ts" */

/** @param {string} title @param {(one: VersionRow) => string} text @param {string} [hint] */
const number = (title, text, hint) => ({ title, hint, number: true, fill: textCell(text) });

export class VersionsView extends View {
  /** @param {HTMLElement} root */
  constructor(root) {
    super(root);
    this.nothing = h("div");
    this.table = smallTable(
      "Weight versions",
      [
        { title: "Version", isHeader: true, number: true, fill: textCell((/** @type {VersionRow} */ one) => String(one.version)) },
        number("Sessions", (one) => count(one.sessions), "Sessions whose newest turn's weights are of this version"),
        number("Open", (one) => count(one.open)),
        number("Turns", (one) => count(one.turns)),
        number("Rewarded", (one) => count(one.rewarded)),
        number("Mean reward", (one) => decimal(one.mean_reward)),
        { title: "Last change", number: true, fill: sinceCell((one) => one.updated_at) },
      ],
      (one) => String(one.version),
    );
    const tools = [button("Refresh", () => this.refresh(), { class: "quiet" }), copyCurl(() => ({ path: "/ui/api/versions" }))];
    replace(root, h("h1", { class: "visually-hidden" }, "Versions"), bar(null, tools), this.problem, this.nothing, this.table.element);
    this.refresh();
  }

  refresh() {
    const request = async (/** @type {AbortSignal} */ signal) => /** @type {VersionRow[]} */ (await get("/ui/api/versions", {}, signal));
    return this.read(request, (rows) => {
      replace(this.nothing, !rows.length && message("empty", "No session has a weight version that is a number."));
      this.table.rows.show(rows);
    });
  }
}
