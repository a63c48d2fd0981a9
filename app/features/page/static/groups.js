/** All groups: which have no variance, which lack attempts. */

import { button, chip, h, message, replace, setText } from "./dom.js";
import { count, decimal, ranges } from "./format.js";
import { chosenRun, groupHref, listHref } from "./route.js";
import { badgeCell, column, linkCell, numberColumn } from "./rows.js";
import { LongTable } from "./table.js";
import { every, View } from "./view.js";
import { visibleText } from "./visible.js";

/** @import {GroupPage, GroupRow, SessionRow} from "../ui_types.d.ts" */
/** @import {Column} from "./rows.js" */
/** @import {Place} from "./view.js" */

const PAGE = 200;
const REFRESH_MS = 5000;

/**
 * The filters, over the loaded groups.
 * @type {{name: string, title: string, fits: (group: GroupRow) => boolean}[]}
 */
const FILTERS = [
  { name: "", title: "All", fits: () => true },
  { name: "flat", title: "Zero variance", fits: (group) => group.zero_variance },
  { name: "missing", title: "Missing attempts", fits: (group) => group.missing_attempts.length > 0 },
  { name: "unrewarded", title: "Not all rewarded", fits: (group) => group.rewarded < group.sessions },
];

export class GroupsView extends View {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, { query }) {
    super(root);
    /** @type {GroupRow[]} */
    this.groups = [];
    /** @type {string|null} */
    this.nextCursor = null;
    this.isLoaded = false;
    this.hasNews = false;
    this.table = new LongTable(this.closed, {
      label: "Groups",
      columns: columns(chosenRun() === null),
      keyOf,
      onNearEnd: () => this.#more(),
    });
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "Which groups" });
    this.total = h("span", { role: "status" });
    const tools = this.tools(() => ({ path: "/groups", parameters: { run: chosenRun(), limit: PAGE } }));
    this.fill("Groups", this.chips, [this.total, tools], this.table.element);
    every(this.closed, REFRESH_MS, () => {
      if (this.hasNews && !this.requests.isRunning && !this.table.isHeld && this.table.isAtTop) this.refresh();
    });
    this.onQuery(query);
    this.refresh();
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    const asked = query.get("only") ?? "";
    this.only = FILTERS.some(({ name }) => name === asked) ? asked : "";
    replace(
      this.chips,
      FILTERS.map(({ name, title }) => chip(listHref("groups", { only: name }), title, name === this.only)),
    );
    this.#show();
  }

  /** @param {SessionRow[]} rows */
  onSessions(rows) {
    if (rows.some((row) => row.group_id !== null)) this.hasNews = true;
  }

  refresh() {
    this.hasNews = false;
    return this.#read(null);
  }

  /** @param {unknown} error */
  onFailure(error) {
    this.nextCursor = null;
    super.onFailure(error);
    this.#show();
  }

  #more() {
    if (this.nextCursor && !this.requests.isRunning) this.#read(this.nextCursor);
  }

  /** @param {string|null} cursor */
  #read(cursor) {
    const request = { path: "/groups", parameters: { run: chosenRun(), limit: PAGE, cursor } };
    const reading = this.read(request, (/** @type {GroupPage} */ page) => {
      const known = cursor === null ? [] : this.groups;
      this.groups = [...new Map([...known, ...page.groups].map((group) => [keyOf(group), group])).values()];
      this.nextCursor = page.next_cursor;
      this.isLoaded = true;
      this.#show();
    });
    this.#show();
    return reading;
  }

  #show() {
    const filter = FILTERS.find(({ name }) => name === this.only);
    const shown = this.groups.filter((group) => filter?.fits(group));
    this.table.show(shown, shown.length, this.requests.isRunning);
    const loaded = `${count(this.groups.length)}${this.nextCursor ? "+" : ""}`;
    setText(this.total, this.isLoaded ? `${count(shown.length)} of ${loaded} groups` : "");
    if (!this.isLoaded) this.table.setFoot("Loading …");
    else if (this.nextCursor) {
      this.table.setFoot(`${count(this.groups.length)} loaded`, button("Load more", () => this.#more()));
    } else if (!shown.length) this.table.setFoot(nothing(this.groups.length > 0));
    else this.table.setFoot("All shown");
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

/** @param {GroupRow} group @returns {string} with its run, where there are several */
function keyOf({ run, group_id: id }) {
  return chosenRun() === null ? JSON.stringify([run, id]) : id;
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
  const [narrow, wide] = [{ width: "88px" }, { width: "96px" }];
  return [
    groupNameColumn(),
    ...(isOfAll ? [column("Run", (/** @type {GroupRow} */ group) => group.run, { width: "140px" })] : []),
    { title: "State", width: "150px", fill: badgeCell(verdict, tone) },
    numberColumn("Sessions", (group) => count(group.sessions), narrow),
    numberColumn("Closed", (group) => count(group.closed), narrow),
    numberColumn("Failed", (group) => count(group.failed), narrow),
    numberColumn("Rewarded", (group) => count(group.rewarded), narrow),
    numberColumn("Mean", (group) => decimal(group.mean), wide),
    numberColumn("Std. dev. (sample)", (group) => decimal(group.std), { ...wide, hint: "With n − 1" }),
    numberColumn("Min", (group) => decimal(group.min), wide),
    numberColumn("Max", (group) => decimal(group.max), wide),
    column("Missing attempts", (group) => ranges(group.missing_attempts) || "–", { width: "150px" }),
  ];
}
