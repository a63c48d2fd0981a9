/** All checkpoints, and one. The command line makes, restores and deletes them; the page only shows what there is. */

import { url } from "./api.js";
import { copyButton } from "./copy.js";
import { badge, bar, fact, h, message, replace } from "./dom.js";
import { amount, clock, count, since } from "./format.js";
import { ListView, PAGE } from "./listview.js";
import { checkpointHref, chosenRun, listHref, sessionHref } from "./route.js";
import { badgeCell, column, groupColumn, linkCell, numberColumn, sessionColumn, sinceCell } from "./rows.js";
import { visible, visibleText } from "./visible.js";

/** @import {Checkpoint, CheckpointList, CheckpointPage, Column, Place, SessionThen} from "../ui_types.d.ts" */

/** @extends {ListView<Checkpoint, CheckpointList>} */
export class CheckpointsView extends ListView {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, place) {
    super(root, "", place, {
      label: "Checkpoints",
      noun: "checkpoint",
      path: "/checkpoints",
      parameters: { run: chosenRun() },
      columns: columns(),
      keyOf: ({ run, name }) => JSON.stringify([run, name]),
      rowsOf: (page) => page.checkpoints.toReversed(), // the newest first
      nothing,
    });
    this.fill("Checkpoints", this.total, this.tools(() => this.request), this.table.element);
    this.refresh();
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
  const cut = "now: at once; drain: after the turns in flight had ended; restore: the state that a restore replaced";
  const tone = (/** @type {Checkpoint} */ one) => (one.state === "made" ? "good" : "warn");
  const width = "96px";
  return [
    { title: "Checkpoint", isHeader: true, fill: linkCell((one) => one.name, (one) => checkpointHref(one.name, one.run)) },
    column("Run", (one) => one.run, { width: "130px", hint: "*: the whole store" }),
    { title: "Made", width, number: true, fill: sinceCell((one) => one.created_at) },
    numberColumn("Sessions", (one) => count(one.sessions), { width }),
    numberColumn("Groups", (one) => count(one.groups), { width, hint: "Of the training feed" }),
    numberColumn("Erased", (one) => count(one.erased), { width, hint: "Its sessions whose content has been erased since" }),
    column("Cut", (one) => one.cut, { width, hint: cut }),
    { title: "State", width: "130px", fill: badgeCell((one) => one.state, tone) },
    column("Before the restore of", (one) => one.restores ?? "–", { width: "180px" }),
  ];
}

/** @extends {ListView<SessionThen, CheckpointPage>} */
export class CheckpointView extends ListView {
  /** @param {HTMLElement} root @param {Place} place */
  constructor(root, place) {
    const { id, query } = place;
    super(root, "checkpoint", place, {
      label: "Sessions of the checkpoint",
      noun: "session",
      path: `/ui/api/checkpoints/${encodeURIComponent(id)}`,
      parameters: { run: query.get("of") ?? chosenRun() ?? "default", limit: PAGE },
      columns: columnsThen(),
      keyOf: (one) => one.session_id,
      rowsOf: (page) => page.sessions,
      nothing: () => "No session was in the store.",
    });
    this.facts = h("div", { class: "facts" });
    /** Made of what the server answers: the address may hold anything. */
    this.command = "";
    this.restore = copyButton(() => this.command, "Copy the restore's command");
    this.restore.disabled = true;
    const all = h("a", { href: listHref("checkpoints") }, "All checkpoints");
    replace(
      root,
      bar(h("h1", null, visible(id)), [all, this.restore, this.tools(() => ({ path: "/checkpoints", parameters: { run: this.request.parameters?.run } }))]),
      this.problem,
      this.facts,
      this.table.element,
    );
    this.refresh();
  }

  /** @param {CheckpointPage} page */
  show(page) {
    super.show(page);
    replace(this.facts, facts(page.checkpoint));
    this.command = restoreCommand(page.checkpoint);
    this.restore.disabled = false;
  }
}

/** @param {Omit<Checkpoint, "erased">} checkpoint whose name has only letters that mean nothing to a shell; its run may be `*` */
function restoreCommand({ run, name }) {
  return `turnlog checkpoint restore ${name} --run '${run}' --url ${url("").replace(/\/$/, "")}`;
}

/** @param {Omit<Checkpoint, "erased">} checkpoint */
function facts({ created_at, cut, state, sessions, groups, restores }) {
  return [
    fact("Made", [since(created_at), " ", h("span", { class: "muted" }, clock(created_at))]),
    fact("Cut", cut),
    fact("State", badge(state, state === "made" ? "good" : "warn")),
    fact("Sessions", count(sessions)),
    fact("Groups", count(groups)),
    restores !== null && fact("Before the restore of", visibleText(restores)),
  ];
}

/** @returns {Column<SessionThen>[]} */
function columnsThen() {
  const later = (/** @type {SessionThen} */ { seq, version }) => (version > seq ? amount(version - seq, "event") : "none");
  return [
    sessionColumn({ hint: "As it was then" }, ({ session_id: id, seq }) => sessionHref(id, { seq })),
    numberColumn("At event", (one) => count(one.seq), { width: "96px" }),
    numberColumn("Later", later, { hint: "What a restore would take back", width: "110px" }),
    { title: "State now", width: "120px", fill: badgeCell((one) => one.status) },
    groupColumn("200px"),
  ];
}
