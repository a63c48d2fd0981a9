/** A session's tree: its branches, why each began, and whose loss each turn is in. */

import { badge, button, h, panel, replace } from "./dom.js";
import { count, ranges } from "./format.js";
import { sideBySideHref } from "./route.js";
import { named } from "./visible.js";

/** @import {Tree, TreeBranch, TreeTurn} from "../ui_types.d.ts" */

/**
 * What of the tree is shown elsewhere: the branch of the conversation, or a turn.
 * @typedef {{branch: number|null, turn: number|null}} Picked
 */

/** Why a branch began, behind "because". @type {Record<string, string>} */
export const CAUSES = {
  retry: "the same input was sent again",
  fork: "a request continued an earlier turn",
  root: "its messages continue no stored turn",
  agent: "another agent asked",
  compaction: "its first request quotes a reply of another branch",
  drift: "the engine's prompt ids did not continue the stored ones",
};

/** Branches in the document at first, and turns of each: a session may have hundreds and thousands. */
const BRANCHES = 100;
const TURNS = 40;
/** Deeper branches are not set in any further. */
const DEPTH = 8;

/** The branches of one session. Nothing is shown where there is only one. */
export class BranchTree {
  /**
   * @param {string} id of the session
   * @param {(branch: number) => void} onBranch somebody wants to read it
   * @param {(turn: number) => void} onTurn or to read one turn
   */
  constructor(id, onBranch, onTurn) {
    this.id = id;
    this.onBranch = onBranch;
    this.onTurn = onTurn;
    this.shown = BRANCHES;
    this.key = "";
    this.head = h("span", { class: "note" });
    this.list = h("ul", { class: "branches" });
    this.more = h("div");
    this.element = panel("tree-title", "Branches", this.head, this.list, this.more);
    this.element.hidden = true;
  }

  /** @param {Tree|null} tree @param {Picked} picked */
  update(tree, picked) {
    this.element.hidden = tree === null;
    const key = JSON.stringify([tree, picked]);
    if (this.key === key) return;
    this.key = key;
    if (tree) this.#render(tree, picked);
    else replace(this.list);
  }

  /** @param {Tree} tree @param {Picked} picked */
  #render(tree, picked) {
    const focused = this.list.contains(document.activeElement) ? document.activeElement?.getAttribute("data-key") : null;
    const { turns, branches } = tree;
    const rows = branches.filter((one) => one.exported).length;
    replace(this.head, `${count(branches.length)} branches, ${count(rows)} rows`);
    const ordered = inOrder(branches);
    const own = turnsOf(turns, branches);
    const trained = trainedBy(turns);
    replace(
      this.list,
      ordered.slice(0, this.shown).map(([branch, depth]) => {
        const number = branch.branch;
        return this.#item(tree, branch, depth, own.get(number) ?? [], trained.get(number) ?? [], picked);
      }),
      (own.get(null) ?? []).map((turn) => h("li", null, this.#turnButton(turn, picked), " begins a conversation")),
    );
    const showMore = () => {
      this.shown += BRANCHES;
      this.#render(tree, picked);
    };
    const left = ordered.length - this.shown;
    replace(this.more, left > 0 && button(`show ${Math.min(BRANCHES, left)} more of ${count(left)}`, showMore));
    if (!focused) return;
    const again = this.list.querySelector(`[data-key="${CSS.escape(focused)}"]`);
    if (again instanceof HTMLElement) again.focus({ preventScroll: true });
  }

  /**
   * @param {Tree} tree
   * @param {TreeBranch} branch
   * @param {number} depth
   * @param {TreeTurn[]} own its turns
   * @param {number[]} trained the turns that its row has in its loss
   * @param {Picked} picked
   */
  #item(tree, branch, depth, own, trained, picked) {
    const { branch: number, cause, fork_turn, parent_branch, agent_id, tokens, reason } = branch;
    const main = picked.branch ?? tree.main_branch;
    const isRead = picked.turn === null && number === main;
    const pair = [main, number].map((one) => `${this.id}@${one}`);
    return h(
      "li",
      { style: { "--depth": Math.min(depth, DEPTH) }, dataset: { branch: number }, "aria-current": isRead ? "true" : null },
      h(
        "p",
        { class: "who" },
        button(`branch ${number}`, () => this.onBranch(number), {
          "data-key": `branch-${number}`,
          "aria-pressed": String(isRead),
        }),
        cause && badge(cause),
        number === tree.main_branch && badge("main", "good"),
        fork_turn !== null && h("span", { class: "note" }, `after turn ${fork_turn} of branch ${parent_branch}`),
        own[0]?.carries != null && h("span", { class: "note" }, `quotes turn ${own[0].carries}`),
        agent_id !== null && h("code", null, named(agent_id)),
        h("span", { class: "note" }, `${count(tokens)} tokens`),
        number !== main && h("a", { href: sideBySideHref(pair) }, `compare with branch ${main}`),
      ),
      h(
        "p",
        { class: "turns" },
        own.length > TURNS && h("span", { class: "note" }, `${count(own.length - TURNS)} earlier … `),
        own.slice(-TURNS).map((turn) => this.#turnButton(turn, picked)),
      ),
      h("p", { class: "note" }, reason === null ? `its row trains ${trained.length ? `turns ${ranges(trained)}` : "no turn"}` : `no row: ${reason}`),
    );
  }

  /** @param {TreeTurn} turn @param {Picked} picked */
  #turnButton(turn, { turn: read }) {
    const { turn: number, state, carries, loss_branches: losses, reason } = turn;
    const label = [
      `turn ${number}`,
      losses.length ? `in the loss of branch ${losses.join(", ")}` : reason && `in no loss: ${reason}`,
      carries !== null && `quotes turn ${carries}`,
    ]
      .filter(Boolean)
      .join(", ");
    return button(String(number), () => this.onTurn(number), {
      class: `turnchip ${state === "open" ? "open" : losses.length ? "trained" : "untrained"}`,
      "data-key": `tree-turn-${number}`,
      "aria-label": label,
      "aria-pressed": String(number === read),
      title: label,
      disabled: state === "open",
    });
  }
}

/** @param {TreeBranch[]} branches @returns {[TreeBranch, number][]} each behind the one that it leaves, and its depth */
function inOrder(branches) {
  /** @type {Map<number|null, TreeBranch[]>} */
  const below = Map.groupBy(branches, (one) => one.parent_branch);
  /** @type {[TreeBranch, number][]} */
  const found = [];
  /** @type {[TreeBranch, number][]} */
  const waiting = (below.get(null) ?? []).map((one) => /** @type {[TreeBranch, number]} */ ([one, 0])).reverse();
  for (let next = waiting.pop(); next; next = waiting.pop()) {
    found.push(next);
    const [{ branch }, depth] = next;
    for (const one of (below.get(branch) ?? []).toReversed()) waiting.push([one, depth + 1]);
  }
  return found;
}

/**
 * @param {TreeTurn[]} turns
 * @param {TreeBranch[]} branches
 * @returns {Map<number|null, TreeTurn[]>} by branch; those in flight stand with their parent, with null where none has one
 */
function turnsOf(turns, branches) {
  const places = new Map(turns.map((turn) => [turn.turn, turn.branch]));
  const known = new Set(branches.map((one) => one.branch));
  return Map.groupBy(turns, (turn) => {
    const place = turn.branch ?? places.get(turn.parent) ?? null;
    return place !== null && known.has(place) ? place : null;
  });
}

/** @param {TreeTurn[]} turns @returns {Map<number, number[]>} by branch, the turns that its row has in its loss */
function trainedBy(turns) {
  /** @type {Map<number, number[]>} */
  const found = new Map();
  for (const { turn, loss_branches } of turns) {
    for (const branch of loss_branches) {
      const known = found.get(branch);
      if (known) known.push(turn);
      else found.set(branch, [turn]);
    }
  }
  return found;
}
