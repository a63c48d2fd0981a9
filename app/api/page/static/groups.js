/** All groups: which have no variance, which miss attempts. */

import { curl, get } from "./api.js";
import { copyButton } from "./copy.js";
import { count, decimal, failure, h, message, replace, setText } from "./dom.js";
import { groupHref, setQuery } from "./route.js";
import { badgeCell, linkCell, textCell } from "./rows.js";
import { LongTable } from "./table.js";
import { visibleText } from "./visible.js";

const PAGE = 200;
const REFRESH_MS = 5000;

/** What one looks for; judged here, over the groups that are loaded. */
const CHOICES = [
  ["", "All", () => true],
  ["flat", "Zero variance", (/** @type {any} */ group) => group.zero_variance],
  ["missing", "Missing attempts", (/** @type {any} */ group) => group.missing_attempts.length > 0],
  ["unrewarded", "Not all rewarded", (/** @type {any} */ group) => group.rewarded < group.sessions],
];

/**
 * @param {HTMLElement} root
 * @param {{query: URLSearchParams}} params
 */
export function view(root, params) {
  return new GroupsView(root, params.query);
}

class GroupsView {
  /** @param {HTMLElement} root @param {URLSearchParams} query */
  constructor(root, query) {
    /** @type {any[]} */
    this.groups = [];
    /** @type {string|null} */
    this.nextCursor = null;
    /** @type {AbortController|null} */
    this.request = null;
    this.isLoaded = false;
    this.isChanged = false;
    this.table = new LongTable({
      label: "Groups",
      columns: columns(),
      keyOf: (group) => group.group_id,
      onNearEnd: () => this.#more(),
    });
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "Which groups" });
    this.total = h("span", { role: "status" });
    this.problem = h("div");
    const copy = copyButton(() => curl("/ui/api/groups", { limit: PAGE }));
    const again = h("button", { type: "button", class: "quiet", onclick: () => this.#refresh() }, "Refresh");
    replace(
      root,
      h("h1", { class: "visually-hidden" }, "Groups"),
      h("div", { class: "bar" }, this.chips, h("span", { class: "spacer" }), this.total, again, copy),
      this.problem,
      this.table.element,
    );
    this.timer = setInterval(() => this.#tick(), REFRESH_MS);
    this.onQuery(query);
    this.#refresh();
  }

  /** @param {URLSearchParams} query */
  onQuery(query) {
    this.choice = CHOICES.find(([name]) => name === query.get("only")) ?? CHOICES[0];
    setQuery({ only: this.choice[0] });
    const links = CHOICES.map((one) =>
      h(
        "a",
        { href: `#/groups${one[0] ? `?only=${one[0]}` : ""}`, "aria-current": one === this.choice ? "true" : null },
        String(one[1]),
      ),
    );
    replace(this.chips, links);
    this.#show();
  }

  /** @param {any[]} rows */
  onSessions(rows) {
    if (rows.some((row) => row.group_id !== null)) this.isChanged = true;
  }

  onReset() {
    this.#refresh();
  }

  close() {
    clearInterval(this.timer);
    this.request?.abort();
    this.table.close();
  }

  #tick() {
    if (document.hidden || !this.isChanged || this.request || this.table.isHeld || !this.table.isAtTop) return;
    this.#refresh();
  }

  #refresh() {
    this.isChanged = false;
    this.#read(null);
  }

  #more() {
    if (this.nextCursor && !this.request) this.#read(this.nextCursor);
  }

  /** @param {string|null} cursor */
  async #read(cursor) {
    this.request?.abort();
    const request = new AbortController();
    this.request = request;
    this.#show();
    try {
      const page = await get("/ui/api/groups", { limit: PAGE, cursor }, request.signal);
      const known = cursor === null ? [] : this.groups;
      const fresh = new Map([...known, ...page.groups].map((group) => [group.group_id, group]));
      this.groups = [...fresh.values()];
      this.nextCursor = page.next_cursor;
      this.isLoaded = true;
      replace(this.problem);
    } catch (error) {
      if (request.signal.aborted) return;
      this.nextCursor = null;
      replace(this.problem, failure(error, () => this.#refresh()));
    }
    this.request = null;
    this.#show();
  }

  #show() {
    const fits = /** @type {(group: any) => boolean} */ (this.choice?.[2]);
    const shown = this.groups.filter(fits);
    this.table.show(shown, shown.length, this.request !== null);
    const loaded = `${count(this.groups.length)}${this.nextCursor ? "+" : ""}`;
    setText(this.total, this.isLoaded ? `${count(shown.length)} of ${loaded} groups` : "");
    if (!this.isLoaded) this.table.setFoot("Loading …");
    else if (this.nextCursor) {
      const button = h("button", { type: "button", onclick: () => this.#more() }, "Load more");
      this.table.setFoot(`${count(this.groups.length)} loaded`, button);
    } else if (!shown.length) this.table.setFoot(nothing(this.groups.length > 0));
    else this.table.setFoot("All shown");
  }
}

/** @param {boolean} isFiltered */
function nothing(isFiltered) {
  if (isFiltered) return message("empty", "No such group.", h("p", null, h("a", { href: "#/groups" }, "Show all groups")));
  return message(
    "empty",
    "There are no groups yet.",
    h("p", null, "A group is the sessions with one ", h("code", null, "group_id"), ", which a session is created with."),
  );
}

/** @param {any} group @returns {string} */
function verdict(group) {
  if (group.zero_variance) return "zero variance";
  if (group.missing_attempts.length) return "missing attempts";
  return group.state;
}

/** @param {any} group @returns {string|undefined} */
function tone(group) {
  return group.zero_variance || group.missing_attempts.length ? "warn" : group.state === "complete" ? "good" : undefined;
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

/** @returns {import("./rows.js").Column[]} */
function columns() {
  const number = (/** @type {string} */ title, /** @type {(group: any) => string} */ text, width = "88px") => ({
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
    number("Deviation", (group) => decimal(group.std), "96px"),
    number("Least", (group) => decimal(group.min), "96px"),
    number("Most", (group) => decimal(group.max), "96px"),
    {
      title: "Missing attempts",
      width: "150px",
      fill: textCell((group) => ranges(group.missing_attempts) || "–"),
    },
  ];
}
