/** A session's tree: a row a branch, right of the turn that it left; a dot a turn, and whose loss each turn is in. */

import { button, h, renew, scrollRegion } from "./dom.js";
import { amount, count, ranges } from "./format.js";
import { sideBySideHref } from "./route.js";
import { SessionPart } from "./view.js";
import { named } from "./visible.js";

/** @import {Session, Tree, TreeBranch, TreeTurn} from "../ui_types.d.ts" */

/**
 * A row: `x` is its first dot's place, `up` so many rows above is the turn that it left; the turns of a group are one dot.
 * @typedef {{branch: TreeBranch|null, x: number, up: number, groups: TreeTurn[][]}} Row
 */

/** Why a branch began, behind "because". @type {Record<string, string>} */
const CAUSES = {
  retry: "the same input was sent again",
  fork: "a request continued an earlier turn",
  root: "its messages continue no stored turn",
  agent: "another agent asked",
  compaction: "its first request quotes a reply of another branch",
  drift: "the engine's prompt ids did not continue the stored ones",
};

/** A chain of so many turns of which there is nothing to say is folded. */
const CHAIN = 5;
/** What a dot's look says. @type {Record<string, string>} */
const LOOKS = { trained: "in the loss", untrained: "in no loss", gone: "rolled back, superseded", open: "in flight" };

export class TreeTab extends SessionPart {
  /** Titles by branch, of so many branches. @type {Map<number, string>} */
  titles = new Map();
  titled = 0;
  /** The first turns of opened chains. @type {Set<number>} */
  opened = new Set();
  /** @type {number|null} */
  branch = null;
  /** @type {number|null} the turn that was scrolled to */
  goal = null;
  head = h("div", { class: "treehead" });
  rows = h("div", { class: "tree", role: "group" });
  told = h("p", { class: "note" });
  element = h("div", { class: "tree-tab" }, this.head, scrollRegion("Tree", this.rows), this.told);

  /** @param {Session} session @param {{turn: number|null, branch: number|null}} place */
  update(session, { turn, branch }) {
    Object.assign(this, { session, turn, branch });
    this.#draw();
    const branches = session.tree?.branches.length ?? 0;
    if (this.titled === branches) return;
    this.titled = branches;
    this.requests.run(
      { path: `/sessions/${encodeURIComponent(this.id)}/tree` },
      (/** @type {Tree} */ tree) => {
        this.titles = new Map(tree.branches.flatMap((one) => (one.title === null ? [] : [[one.branch, one.title]])));
        this.#draw();
      },
      () => {}, // Without titles the tree shows what the log has.
    );
  }

  #draw() {
    const tree = this.session?.tree;
    if (!tree) return;
    const { branches, turns } = tree;
    const name = `Tree: ${count(branches.length)} branches, ${count(turns.length)} turns`;
    this.rows.ariaLabel = name;
    const looks = Object.entries(LOOKS).map(([look, text]) => h("li", null, h("span", { class: `dot ${look}`, "aria-hidden": "true" }), text));
    renew(this.head, [name, branches], () => [
      h("span", { class: "note" }, `${name}, ${count(branches.filter((one) => one.exported).length)} rows`),
      h("ul", { class: "legend" }, looks),
    ]);
    const picked = turns.find((one) => one.turn === this.turn)?.branch ?? this.branch ?? tree.main_branch;
    renew(this.rows, [tree, this.turn, picked, [...this.opened], this.titles.size], () =>
      layout(tree, this.turn, this.opened).map((row) => this.#row(row, picked, tree.main_branch)),
    );
    if (this.goal !== this.turn) this.rows.querySelector(".dot[aria-pressed=true]")?.scrollIntoView({ block: "nearest", inline: "center" });
    this.goal = this.turn;
    const branch = branches.find((one) => one.branch === picked);
    renew(this.told, [tree, branch], () => branch && this.#tell(tree, branch));
  }

  /** @param {Row} row @param {number|null} picked @param {number|null} main branch */
  #row({ branch, x, up, groups }, picked, main) {
    const { branch: number = null, cause, agent_id, tokens = 0, reason } = branch ?? {};
    const title = [agent_id, this.titles.get(number ?? -1)].filter(Boolean).join(": ");
    return h(
      "div",
      { class: number === main ? "branch main" : "branch", style: { "--x": x, "--up": up } },
      branch && button([h("strong", null, `${number} ${cause ?? ""}`), " ", named(title)], () => this.pick(null, number), { "aria-pressed": String(number === picked) }),
      h("div", { class: "dots" }, groups.map((group) => this.#dot(group))),
      branch && h("span", { class: "note" }, reason ?? `${count(tokens)} tokens`),
    );
  }

  /** @param {TreeTurn[]} group */
  #dot([first, ...more]) {
    if (!first) return null;
    const { turn, state, loss_branches: losses, reason, carries, finish_reason: finish } = first;
    const loss = losses.length ? `in the loss of branch ${losses.join(", ")}` : `in no loss: ${reason ?? ""}`;
    const last = more.at(-1);
    if (last) {
      const open = () => (this.opened.add(turn), this.#draw());
      const label = `turns ${turn} to ${last.turn}, ${loss}: show`;
      return button(`⋯ ${more.length + 1}`, open, { class: `dot chain ${lookOf(first)}`, title: label, "aria-label": label });
    }
    const label = [`turn ${turn}`, loss, carries !== null && `quotes turn ${carries}`, finish && `ends by ${finish}`].filter(Boolean).join(", ");
    const is = { "aria-pressed": String(turn === this.turn), disabled: state === "open" };
    return button(String(turn), () => this.pick(turn, null), { class: `dot ${lookOf(first)}`, title: label, "aria-label": label, ...is });
  }

  /** @param {Tree} tree @param {TreeBranch} branch */
  #tell({ main_branch, branches, turns }, { branch, cause, parent_branch, fork_turn, agent_id, tokens, reason }) {
    const others = [main_branch, parent_branch, ...branches.map((one) => one.branch)];
    const other = others.find((one) => one !== null && one !== branch);
    const pair = [other, branch].map((one) => `${this.id}@${one}`);
    const own = turns.filter((one) => one.branch === branch);
    const trained = turns.filter((one) => one.loss_branches.includes(branch)).map((one) => one.turn);
    const carried = own[0]?.carries;
    return [
      h("strong", null, `branch ${branch}`),
      cause && `, ${cause}`,
      fork_turn !== null && ` after turn ${fork_turn} of branch ${parent_branch}`,
      CAUSES[cause ?? ""] && `, because ${CAUSES[cause ?? ""]}`,
      carried != null && ` (turn ${carried})`,
      agent_id !== null && [", agent ", h("code", null, named(agent_id))],
      `: ${amount(own.length, "turn")}, ${count(tokens)} tokens; `,
      reason === null ? `its row trains ${trained.length ? `turns ${ranges(trained)}` : "no turn"}` : `no row: ${reason}`,
      other != null && [" · ", h("a", { href: sideBySideHref(pair) }, `compare with branch ${other}`)],
    ];
  }
}

/** @param {TreeTurn} turn @returns {string} */
function lookOf({ state, superseded, exported, loss_branches: losses }) {
  if (state === "open") return "open";
  if (losses.length) return "trained";
  return state === "undone" || superseded || !exported ? "gone" : "untrained";
}

/**
 * Where everything stands. Of the rows that leave one branch those that leave late come first, so no line crosses a row.
 * @param {Tree} tree @param {number|null} picked @param {Set<number>} opened @returns {Row[]}
 */
function layout({ turns, branches }, picked, opened) {
  const places = new Map(turns.map((turn) => [turn.turn, branches.some((one) => one.branch === turn.branch) ? turn.branch : null]));
  // A turn in flight is with its parent, and what no branch has any more is alone, under null.
  const own = Map.groupBy(turns, ({ turn, parent, state }) => places.get(state === "open" ? parent : turn) ?? null);
  const ends = [...own.values()].flatMap((chain) => [chain[0]?.turn, chain.at(-1)?.turn]);
  const special = new Set([picked, ...ends, ...branches.map((one) => one.fork_turn), ...turns.map((one) => one.carries)]);
  const below = Map.groupBy(branches, (one) => one.parent_branch);
  /** @type {Map<number|null, {x: number, row: number}>} */
  const dots = new Map();
  /** @type {Row[]} */
  const rows = [];
  /** @param {TreeBranch|null} branch @param {TreeTurn[]} chain */
  const add = (branch, chain) => {
    const from = dots.get(branch?.fork_turn ?? null);
    const groups = groupsOf(chain, special, opened);
    let x = from ? from.x + 1 : 0;
    const row = rows.push({ branch, x, up: from ? rows.length - from.row : 0, groups }) - 1;
    for (const group of groups) {
      for (const { turn } of group) dots.set(turn, { x, row });
      x += group.length > 1 ? 2 : 1; // A folded chain is as wide as two dots.
    }
  };
  const waiting = (below.get(null) ?? []).toReversed();
  for (let next = waiting.pop(); next; next = waiting.pop()) {
    add(next, own.get(next.branch) ?? []);
    const x = (/** @type {TreeBranch} */ one) => dots.get(one.fork_turn)?.x ?? 0;
    waiting.push(...(below.get(next.branch) ?? []).toSorted((a, b) => x(a) - x(b) || b.branch - a.branch));
  }
  for (const turn of own.get(null) ?? []) add(null, [turn]);
  return rows;
}

/**
 * @param {TreeTurn[]} chain a branch's turns @param {Set<number|null|undefined>} special turns that stand alone
 * @param {Set<number>} opened @returns {TreeTurn[][]} turns that stand alone, and chains of turns that look alike
 */
function groupsOf(chain, special, opened) {
  /** @type {TreeTurn[][]} */
  const runs = [];
  for (const turn of chain) {
    const before = runs.at(-1)?.at(-1);
    const isLike = before && lookOf(before) === lookOf(turn) && ![before, turn].some((one) => special.has(one.turn));
    if (isLike) runs.at(-1)?.push(turn);
    else runs.push([turn]);
  }
  const isFolded = (/** @type {TreeTurn[]} */ run) => run.length >= CHAIN && !opened.has(run[0]?.turn ?? 0);
  return runs.flatMap((run) => (isFolded(run) ? [run] : run.map((turn) => [turn])));
}
