/** All groups: which have no variance, which lack attempts. */

import { h, message, replace } from "./dom.js";
import { count, decimal, ranges } from "./format.js";
import { ListView, PAGE } from "./listview.js";
import { chosenRun, groupHref, listHref } from "./route.js";
import { badgeCell, column, linkCell, numberColumn } from "./rows.js";
import { visibleText } from "./visible.js";

/** @import {Column, GroupPage, GroupRow, Place, SessionRow} from "../ui_types.d.ts" */

/** The filters, over the loaded groups. @type {{name: string, title: string, fits: (group: GroupRow) => boolean}[]} */
const FILTERS = [
  { name: "", title: "All", fits: () => true },
  { name: "flat", title: "Zero variance", fits: (group) => group.zero_variance },
  { name: "missing", title: "Missing attempts", fits: (group) => group.missing_attempts.length > 0 },
  { name: "unrewarded", title: "Not all rewarded", fits: (group) => group.rewarded < group.sessions },
];

/** @extends {ListView<GroupRow, GroupPage>} */
export class GroupsView extends ListView {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, place) {
    const run = chosenRun();
    super(root, "", place, {
      label: "Groups",
      noun: "group",
      path: "/groups",
      parameters: { run, limit: PAGE },
      columns: columns(run === null),
      keyOf: (group) => (run === null ? JSON.stringify([group.run, group.group_id]) : group.group_id),
      rowsOf: (page) => page.groups,
      nothing,
    });
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "Which groups" });
    this.fill("Groups", this.chips, [this.total, this.tools(() => this.request)], this.table.element);
    this.onQuery(place.query);
    this.refresh();
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.only = FILTERS.find(({ name }) => name === query.get("only")) ?? FILTERS[0];
    replace(
      this.chips,
      FILTERS.map((one) => h("a", { href: listHref("groups", { only: one.name }), "aria-current": one === this.only ? "true" : null }, one.title)),
    );
    if (this.rows.length) this.show();
  }

  /** @param {GroupRow} group */
  fits(group) {
    return this.only?.fits(group) ?? true;
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    this.hasNews ||= rows.some((row) => row.group_id !== null);
  }
}

/** @param {boolean} isFiltered */
function nothing(isFiltered) {
  if (isFiltered) {
    return message("empty", "No such group.", h("p", null, h("a", { href: listHref("groups") }, "Show all groups")));
  }
  return message(
    "empty",
    "There are no groups yet.",
    h("p", null, "A group is the sessions with one ", h("code", null, "group_id"), ", which a session is created with."),
  );
}

/** @template {GroupRow} Row @returns {Column<Row>} */
export function groupNameColumn() {
  const fill = linkCell((/** @type {Row} */ group) => visibleText(group.group_id), (group) => groupHref(group.group_id, group.run));
  return { title: "Group", isHeader: true, fill };
}

/** @param {GroupRow} group @returns {string} */
function verdict(group) {
  if (group.zero_variance) return "zero variance";
  if (group.missing_attempts.length) return "missing attempts";
  return group.state;
}

/** @param {GroupRow} group @returns {string|undefined} */
function tone(group) {
  if (group.zero_variance || group.missing_attempts.length) return "warn";
  return group.state === "complete" ? "good" : undefined;
}

/** @param {boolean} isOfAll runs @returns {Column<GroupRow>[]} */
function columns(isOfAll) {
  const narrow = { width: "84px" };
  return [
    groupNameColumn(),
    ...(isOfAll ? [column("Run", (/** @type {GroupRow} */ group) => group.run, { width: "112px" })] : []),
    { title: "State", width: "148px", fill: badgeCell(verdict, tone) },
    numberColumn("Sessions", (group) => count(group.sessions), narrow),
    numberColumn("Closed", (group) => count(group.closed), narrow),
    numberColumn("Failed", (group) => count(group.failed), narrow),
    numberColumn("Rewarded", (group) => count(group.rewarded), narrow),
    numberColumn("Mean", (group) => decimal(group.mean), narrow),
    numberColumn("Std. dev.", (group) => decimal(group.std), { ...narrow, hint: "Of the sample, with n − 1" }),
    numberColumn("Min", (group) => decimal(group.min), narrow),
    numberColumn("Max", (group) => decimal(group.max), narrow),
    column("Missing attempts", (group) => ranges(group.missing_attempts) || "–", { width: "150px" }),
  ];
}
