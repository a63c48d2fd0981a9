/** One checkpoint: how to go back to it, and its sessions as they were then. */

import { get, url } from "./api.js";
import { FollowsFleet } from "./checkpoints.js";
import { copyButton, copyCurl } from "./copy.js";
import { badge, bar, button, fact, h, replace } from "./dom.js";
import { amount, clock, count, since } from "./format.js";
import { groupHref, sessionHref } from "./route.js";
import { badgeCell, linkCell, textCell } from "./rows.js";
import { LongTable } from "./table.js";
import { visible, visibleText } from "./visible.js";

/** @import {Checkpoint, CheckpointPage, Child, SessionThen} from "../ui_types.d.ts" */
/** @import {Column} from "./rows.js" */
/** @import {Place} from "./view.js" */

const PAGE = 200;

export class CheckpointView extends FollowsFleet {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, place) {
    super(root, place);
    const { id } = place;
    this.name = id;
    this.path = `/ui/api/checkpoints/${encodeURIComponent(id)}`;
    /** @type {SessionThen[]} */
    this.sessions = [];
    /** @type {string|null} */
    this.cursor = null;
    this.facts = h("div", { class: "facts" });
    this.table = new LongTable(this.closed, {
      label: "Sessions of the checkpoint",
      columns: columns(),
      keyOf: (/** @type {SessionThen} */ one) => one.session_id,
      onNearEnd: () => this.#more(),
    });
    const again = button("Refresh", () => this.refresh(), { class: "quiet" });
    replace(
      root,
      bar(h("h1", null, visible(id)), [
        h("a", { href: "#/checkpoints" }, "All checkpoints"),
        copyButton(() => restoring(id), "Copy the restore's command"),
        again,
        copyCurl(() => ({ path: this.path, parameters: { limit: PAGE } })),
      ]),
      this.problem,
      this.facts,
      this.table.element,
    );
    this.table.setFoot("Loading …");
    this.refresh();
  }

  /** @param {string} code @returns {[string, ...Child[]]|null} */
  absent(code) {
    if (code !== "not_found") return null;
    return [
      `There is no checkpoint “${visibleText(this.name)}”.`,
      h("p", null, "It may have been deleted."),
      h("p", null, h("a", { href: "#/checkpoints" }, "All checkpoints")),
    ];
  }

  refresh() {
    return this.#read(null);
  }

  /** @param {unknown} error */
  onFailure(error) {
    this.cursor = null;
    this.table.setFoot();
    super.onFailure(error);
  }

  #more() {
    if (this.cursor && !this.requests.isRunning) this.#read(this.cursor);
  }

  /** @param {string|null} cursor */
  #read(cursor) {
    return this.read(
      async (signal) => /** @type {CheckpointPage} */ (await get(this.path, { limit: PAGE, cursor }, signal)),
      (page) => {
        this.sessions = cursor === null ? page.sessions : [...this.sessions, ...page.sessions];
        this.cursor = page.cursor;
        replace(this.facts, facts(page.checkpoint));
        this.table.show(this.sessions, page.checkpoint.sessions, false);
        if (this.cursor) this.table.setFoot(`${count(this.sessions.length)} loaded`, button("Load more", () => this.#more()));
        else this.table.setFoot(this.sessions.length ? "All shown" : "No session was in the store.");
      },
    );
  }
}

/** @param {string} name of letters that mean nothing to a shell @returns {string} a command line */
function restoring(name) {
  return `turnlog checkpoint restore ${name} --url ${url("").replace(/\/$/, "")}`;
}

/** @param {Omit<Checkpoint, "erased">} checkpoint @returns {HTMLElement[]} */
function facts({ created_at, cut, state, sessions, groups, restores }) {
  const found = [
    fact("Made", [since(created_at), " ", h("span", { class: "muted" }, clock(created_at))]),
    fact("Cut", cut),
    fact("State", badge(state, state === "made" ? "good" : "warn")),
    fact("Sessions", count(sessions)),
    fact("Groups", count(groups)),
  ];
  if (restores !== null) found.push(fact("Before the restore of", visibleText(restores)));
  return found;
}

/** @param {SessionThen} one @returns {string} what came after the checkpoint */
function later({ seq, version }) {
  const events = version - seq;
  return events > 0 ? amount(events, "event") : "none";
}

/** @returns {Column<SessionThen>[]} */
function columns() {
  return [
    {
      title: "Session",
      hint: "As it was then",
      isHeader: true,
      fill: linkCell((one) => one.session_id, (one) => sessionHref(one.session_id, { seq: one.seq })),
    },
    { title: "At event", width: "96px", number: true, fill: textCell((one) => count(one.seq)) },
    { title: "Later", hint: "What a restore would take back", width: "110px", number: true, fill: textCell(later) },
    { title: "State now", width: "120px", fill: badgeCell((one) => one.status) },
    {
      title: "Group",
      width: "200px",
      fill: linkCell(
        (one) => (one.group_id === null ? null : visibleText(one.group_id)),
        (one) => groupHref(one.group_id ?? ""),
      ),
    },
  ];
}
