/** All groups: which have no variance, which lack attempts. */

import { get } from "./api.js";
import { copyButtons } from "./copy.js";
import { bar, button, chip, h, message, replace, setText } from "./dom.js";
import { columnsField, columnsOf, DEFAULT_ORDER } from "./filters.js";
import { count, decimal } from "./format.js";
import { groupHref, queryOf, setQuery } from "./route.js";
import { badgeCell, linkCell, textCell } from "./rows.js";
import { LongTable } from "./table.js";
import { View } from "./view.js";
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
    /** @type {Map<string, Record<string, string>>} values of the columns of metadata, by group */
    this.metadata = new Map();
    /** @type {string[]} keys of metadata */
    this.keys = [];
    this.table = this.#newTable();
    this.columns = columnsField();
    this.columns.addEventListener("change", () => this.#open(this.only ?? "", this.columns.querySelector("input")?.value ?? ""));
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "Which groups" });
    this.total = h("span", { role: "status" });
    const copy = copyButtons(() => ({ path: "/ui/api/groups", parameters: this.#parameters(null) }));
    const again = button("Refresh", () => this.refresh(), { class: "quiet" });
    replace(
      root,
      h("h1", { class: "visually-hidden" }, "Groups"),
      bar(this.chips, [this.columns, this.total, again, copy]),
      this.problem,
      this.table.element,
    );
    this.every(REFRESH_MS, () => this.#poll());
    this.onQuery(query);
    this.refresh();
  }

  /** @returns {LongTable<GroupRow>} another choice of columns makes another one */
  #newTable() {
    this.tableLife?.abort();
    this.tableLife = new AbortController();
    return new LongTable(AbortSignal.any([this.closed, this.tableLife.signal]), {
      label: "Groups",
      columns: [...columns(), ...this.keys.map((key) => this.#metadataColumn(key))],
      keyOf: (/** @type {GroupRow} */ group) => group.group_id,
      onNearEnd: () => this.#more(),
    });
  }

  /** @param {string} key @returns {Column<GroupRow>} */
  #metadataColumn(key) {
    return {
      title: visibleText(key),
      hint: "Of the metadata of one of its sessions",
      width: "130px",
      fill: textCell((group) => visibleText(this.metadata.get(group.group_id)?.[key] ?? "–")),
    };
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.#open(query.get("only") ?? "", query.get("columns") ?? "");
  }

  /** @param {string} asked a filter @param {string} columns keys of metadata */
  #open(asked, columns) {
    const only = FILTERS.some(({ name }) => name === asked) ? asked : "";
    const query = (/** @type {string} */ name) => ({ only: name, columns });
    setQuery(query(only));
    this.only = only;
    replace(
      this.chips,
      FILTERS.map(({ name, title }) => chip(`#/groups${queryOf(query(name))}`, title, name === only)),
    );
    const field = this.columns.querySelector("input");
    if (field && field !== document.activeElement) field.value = columns;
    const keys = columnsOf({ ...DEFAULT_ORDER, columns });
    if (keys.join() === this.keys.join()) {
      this.#show();
      return;
    }
    this.keys = keys;
    const old = this.table;
    this.table = this.#newTable();
    old.element.replaceWith(this.table.element);
    this.refresh();
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

  #poll() {
    if (this.hasNews && !this.requests.isRunning && !this.table.isHeld && this.table.isAtTop) this.refresh();
  }

  #more() {
    if (this.nextCursor && !this.requests.isRunning) this.#read(this.nextCursor);
  }

  /** @param {string|null} cursor */
  #read(cursor) {
    const request = async (/** @type {AbortSignal} */ signal) => {
      this.#show();
      return /** @type {GroupPage} */ (await get("/ui/api/groups", this.#parameters(cursor), signal));
    };
    return this.read(request, (page) => {
      const known = cursor === null ? [] : this.groups;
      this.groups = [...new Map([...known, ...page.groups].map((group) => [group.group_id, group])).values()];
      if (cursor === null) this.metadata.clear();
      for (const [id, values] of Object.entries(page.metadata)) this.metadata.set(id, values);
      this.nextCursor = page.next_cursor;
      this.isLoaded = true;
      this.#show();
    });
  }

  /** @param {string|null} cursor */
  #parameters(cursor) {
    return { limit: PAGE, cursor, columns: this.keys.join(",") || null };
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
    return message("empty", "No such group.", h("p", null, h("a", { href: "#/groups" }, "Show all groups")));
  }
  return message(
    "empty",
    "There are no groups yet.",
    h("p", null, "A group is the sessions with one ", h("code", null, "group_id"), ", which a session is created with."),
  );
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

/** @param {number[]} attempts @returns {string} "2, 5–7" */
export function ranges(attempts) {
  /** @type {[number, number][]} */
  const found = [];
  for (const one of [...attempts].sort((a, b) => a - b)) {
    const last = found.at(-1);
    if (last && one === last[1] + 1) last[1] = one;
    else found.push([one, one]);
  }
  return found.map(([from, to]) => (from === to ? String(from) : `${from}–${to}`)).join(", ");
}

/** @returns {Column<GroupRow>[]} */
function columns() {
  const number = (/** @type {string} */ title, /** @type {(group: GroupRow) => string} */ text, width = "88px") => ({
    title,
    width,
    number: true,
    fill: textCell(text),
  });
  return [
    {
      title: "Group",
      isHeader: true,
      fill: linkCell((group) => visibleText(group.group_id), (group) => groupHref(group.group_id)),
    },
    { title: "State", width: "150px", fill: badgeCell(verdict, tone) },
    number("Sessions", (group) => count(group.sessions)),
    number("Closed", (group) => count(group.closed)),
    number("Rewarded", (group) => count(group.rewarded)),
    number("Mean", (group) => decimal(group.mean), "96px"),
    number("Std. dev.", (group) => decimal(group.std), "96px"),
    number("Min", (group) => decimal(group.min), "96px"),
    number("Max", (group) => decimal(group.max), "96px"),
    {
      title: "Missing attempts",
      width: "150px",
      fill: textCell((group) => ranges(group.missing_attempts) || "–"),
    },
  ];
}
