/** A session's tree as a graph: a row a branch, a dot a turn, and whose loss each turn is in. */

import { button, folded, h, renew, replace, scrollRegion, svg } from "./dom.js";
import { amount, count, ranges } from "./format.js";
import { sideBySideHref } from "./route.js";
import { SessionPart } from "./view.js";
import { named, visibleText } from "./visible.js";

/** @import {Session, Tree, TreeBranch, TreeTurn} from "../ui_types.d.ts" */
/** @typedef {{branch: TreeBranch|null, y: number, x: number, end: number, own: TreeTurn[]}} Row */
/** @typedef {{turns: TreeTurn[], row: number, x: number, y: number}} Dot one turn, or several that are folded */

/** Why a branch began, behind "because". @type {Record<string, string>} */
export const CAUSES = {
  retry: "the same input was sent again",
  fork: "a request continued an earlier turn",
  root: "its messages continue no stored turn",
  agent: "another agent asked",
  compaction: "its first request quotes a reply of another branch",
  drift: "the engine's prompt ids did not continue the stored ones",
};

/** Pixels: from dot to dot, of a dot's radius, half of a folded chain, from row to row. */
const [STEP, RADIUS, HALF, ROW] = [30, 11, 27, 52];
/** A chain of so many turns of which there is nothing to say is folded. */
const CHAIN = 5;
/** What a dot's shape says. @type {Record<string, string>} */
const LOOKS = { trained: "in the loss", untrained: "in no loss", gone: "rolled back, superseded", open: "in flight" };
/** Which way a key goes. @type {Record<string, number>} */
const DOWN = { ArrowDown: 1, ArrowUp: -1 };
/** @type {Record<string, number>} */
const RIGHT = { ArrowRight: 1, ArrowLeft: -1 };
/** Characters of a title. */
const TITLE = 60;

export class TreeTab extends SessionPart {
  /** @param {ConstructorParameters<typeof SessionPart>} given */
  constructor(...given) {
    super(...given);
    /** Titles by branch, of so many branches. @type {Map<number, string>} */
    this.titles = new Map();
    this.titled = 0;
    /** The first turns of opened chains. @type {Set<number>} */
    this.opened = new Set();
    this.zoom = 1;
    this.key = "";
    this.goal = "";
    this.head = h("div", { class: "treehead" });
    this.told = h("span");
    this.title = h("div", { class: "treetitle" });
    this.box = scrollRegion("Tree");
    this.text = h("ul", { class: "plain" });
    this.element = h("div", { class: "tree-tab" }, this.head, this.box, h("p", { class: "note" }, this.told, this.title), folded("As text", this.text));
    this.box.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** @param {Session} session @param {{turn: number|null, branch: number|null}} place */
  update({ tree }, { turn, branch }) {
    this.tree = tree;
    this.place = { turn, branch };
    this.element.hidden = tree === null;
    if (!tree) return;
    this.#draw();
    if (this.titled === tree.branches.length) return;
    this.titled = tree.branches.length;
    this.requests.run(
      { path: `/sessions/${encodeURIComponent(this.id)}/tree` },
      (/** @type {Tree} */ { branches }) => {
        this.titles = new Map(branches.flatMap((one) => (one.title === null ? [] : [[one.branch, one.title]])));
        this.#draw();
      },
      () => {}, // Without titles the graph says what the log does.
    );
  }

  #draw() {
    const { tree, place } = this;
    if (!tree || !place) return;
    const key = JSON.stringify([tree, place, [...this.opened], this.titles.size]);
    if (this.key === key) return;
    this.key = key;
    const { rows, dots } = layout(tree, place.turn, this.opened);
    const width = Math.max(...rows.map((one) => one.end + 150), ...rows.map((one) => one.x + TITLE * 7 + 120));
    const size = [width, rows.length * ROW + 20];
    const hadFocus = this.box.contains(document.activeElement);
    const focused = document.activeElement?.getAttribute("data-key");
    const name = `Tree: ${count(tree.branches.length)} branches, ${count(tree.turns.length)} turns`;
    this.graph = svg(
      "svg",
      { class: "tree", viewBox: `0 0 ${size.join(" ")}`, role: "group", "aria-label": name },
      links(tree, rows, dots),
      rows.map((row, at) => this.#name(row, at)),
      dots.map((dot) => this.#dot(dot)),
    );
    this.width = width;
    replace(this.box, this.graph);
    this.#zoomTo(this.zoom);
    this.#showHead(tree, name);
    const goal = `turn ${place.turn}`;
    const again = this.graph.querySelector(`[data-key="${CSS.escape((hadFocus && focused) || goal)}"]`);
    (again ?? this.graph.querySelector("[data-key]"))?.setAttribute("tabindex", "0");
    if (hadFocus && again) /** @type {SVGElement} */ (again).focus({ preventScroll: true });
    if (goal !== this.goal) again?.scrollIntoView({ block: "nearest", inline: "center" });
    this.goal = goal;
    replace(this.text, rows.map((row) => row.branch && h("li", null, this.#tell(tree, row.branch, row.own), h("div", { class: "treetitle" }, this.#titleOf(row.branch)))));
  }

  /** @param {Tree} tree @param {string} name */
  #showHead(tree, name) {
    const picture = { class: "tree", viewBox: "-9 -9 18 18", width: 16, height: 16, "aria-hidden": "true" };
    const looks = Object.entries(LOOKS).map(([look, text]) => h("li", null, svg("svg", picture, mark(look, 7)), text));
    const fit = () => this.#zoomTo(this.box.clientWidth / (this.width ?? 1));
    const rows = tree.branches.filter((one) => one.exported).length;
    renew(this.head, [name, rows, this.opened.size > 0], () => [
      h("span", { class: "note" }, `${name}, ${count(rows)} rows`),
      h("ul", { class: "legend" }, looks),
      h(
        "span",
        null,
        button("−", () => this.#zoomTo(this.zoom / 1.3), { "aria-label": "smaller" }),
        button("+", () => this.#zoomTo(this.zoom * 1.3), { "aria-label": "larger" }),
        button("fit", fit),
        this.opened.size > 0 && button("fold", () => (this.opened.clear(), this.#draw())),
      ),
    ]);
    const branch = tree.branches.find((one) => one.branch === this.#branch(tree));
    const own = tree.turns.filter((one) => one.branch === branch?.branch);
    // The titles come later: the link is not made anew under somebody's click.
    renew(this.told, [tree, branch], () => branch && this.#tell(tree, branch, own));
    replace(this.title, branch && this.#titleOf(branch));
  }

  /** @param {Tree} tree @returns {number|null} of what is picked */
  #branch(tree) {
    const turn = tree.turns.find((one) => one.turn === this.place?.turn);
    return turn?.branch ?? this.place?.branch ?? tree.main_branch;
  }

  /** @param {TreeBranch} branch */
  #titleOf({ branch }) {
    return this.titles.has(branch) && named(this.titles.get(branch));
  }

  /** @param {Tree} tree @param {TreeBranch} branch @param {TreeTurn[]} own */
  #tell(tree, { branch, cause, parent_branch, fork_turn, agent_id, tokens, reason }, own) {
    const others = [tree.main_branch, parent_branch, ...tree.branches.map((one) => one.branch)];
    const other = others.find((one) => one !== null && one !== branch);
    const pair = [other, branch].map((one) => `${this.id}@${one}`);
    const trained = tree.turns.filter((one) => one.loss_branches.includes(branch)).map((one) => one.turn);
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

  /** @param {number} zoom */
  #zoomTo(zoom) {
    this.zoom = Math.max(0.2, Math.min(zoom, 3));
    this.graph?.setAttribute("width", String(Math.round((this.width ?? 0) * this.zoom)));
  }

  /** @param {Row} row @param {number} at */
  #name({ branch, x, y, end, own }, at) {
    if (!branch) return null;
    const { branch: number, cause, agent_id, tokens, reason } = branch;
    const title = visibleText([agent_id, this.titles.get(number)].filter(Boolean).join(": "));
    const short = title.length > TITLE ? `${title.slice(0, TITLE - 1)}…` : title;
    const isRead = this.tree && number === this.#branch(this.tree);
    const text = svg("text", { x: x - RADIUS, y: y - 18 }, svg("tspan", { class: "branchnumber" }, `${number} ${cause ?? ""}`), short && `  ${short}`);
    const state = reason === null ? `${count(tokens)} tokens` : reason;
    return [
      spot(`branch ${number}`, at, x - 1, `branch ${number}, ${cause ?? ""} ${short}`, Boolean(isRead), () => this.pick(null, number), text),
      svg("text", { class: "rowstate", x: end + 20, y: y + 4 }, own.length > 0 && state),
    ];
  }

  /** @param {Dot} dot */
  #dot({ turns, row, x, y }) {
    const [first] = turns;
    if (!first) return null;
    const { turn, loss_branches: losses, reason, carries, finish_reason: finish } = first;
    const [last, place] = [turns.at(-1)?.turn, { transform: `translate(${x} ${y})` }];
    const loss = losses.length ? `in the loss of branch ${losses.join(", ")}` : `in no loss: ${reason ?? ""}`;
    if (turns.length > 1) {
      const open = () => (this.opened.add(turn), this.#draw());
      const shape = svg("rect", { class: lookOf(first), x: -HALF, y: -9, width: 2 * HALF, height: 18, rx: 9 });
      const text = svg("text", { class: "dottext", y: 4 }, `⋯ ${turns.length}`);
      return spot(`turn ${turn}`, row, x, `turns ${turn} to ${last}, ${loss}: show`, false, open, svg("g", place, shape, text));
    }
    const label = [`turn ${turn}`, loss, carries !== null && `quotes turn ${carries}`, finish && `ends by ${finish}`];
    const picked = turn === this.place?.turn;
    const text = svg("text", { class: turn > 999 ? "dottext small" : "dottext", y: 4 }, turn);
    const open = () => first.state !== "open" && this.pick(turn, null);
    return spot(`turn ${turn}`, row, x, label.filter(Boolean).join(", "), picked, open, svg("g", place, mark(lookOf(first), RADIUS), text));
  }

  /** Arrows go to the nearest dot there. @param {KeyboardEvent} event */
  #onKey(event) {
    const here = event.target instanceof SVGElement ? event.target.closest("[data-key]") : null;
    if (!(here instanceof SVGElement) || event.ctrlKey || event.metaKey || event.altKey) return;
    const place = (/** @type {SVGElement} */ one) => [Number(one.dataset.row), Number(one.dataset.x)];
    const [row = 0, x = 0] = place(here);
    const [down, right] = [DOWN[event.key] ?? 0, RIGHT[event.key] ?? 0];
    if (event.key === "Enter" || event.key === " ") here.dispatchEvent(new MouseEvent("click"));
    else if (!down && !right) return;
    event.preventDefault();
    const others = [...(this.graph?.querySelectorAll("[data-key]") ?? [])].map((one) => /** @type {SVGElement} */ (one));
    const far = (/** @type {SVGElement} */ one) => {
      const [itsRow = 0, itsX = 0] = place(one);
      const ahead = down ? (itsRow - row) * down : itsRow === row ? (itsX - x) * right : 0;
      return ahead > 0 ? (down ? ahead * 1e6 + Math.abs(itsX - x) : ahead) : Infinity;
    };
    const nearest = others.reduce((best, one) => (far(one) < far(best) ? one : best), here);
    if (nearest === here) return;
    here.setAttribute("tabindex", "-1");
    nearest.setAttribute("tabindex", "0");
    nearest.focus();
  }
}

/**
 * What can be picked.
 * @param {string} key @param {number} row @param {number} x @param {string} label @param {boolean} isPicked
 * @param {() => void} onclick @param {SVGElement} shape
 */
function spot(key, row, x, label, isPicked, onclick, shape) {
  const data = { "data-key": key, "data-row": row, "data-x": x };
  const state = { role: "button", tabindex: -1, "aria-label": label, "aria-pressed": String(isPicked) };
  return svg("g", { class: "spot", ...data, ...state, onclick }, svg("title", null, label), shape);
}

/** @param {TreeTurn} turn @returns {string} */
function lookOf({ state, superseded, exported, loss_branches: losses }) {
  if (state === "open") return "open";
  if (losses.length) return "trained";
  return state === "undone" || superseded || !exported ? "gone" : "untrained";
}

/** A turn's dot; the shape differs where the colour does. @param {string} look @param {number} r */
function mark(look, r) {
  const cross = look === "gone" && svg("path", { class: "cross", d: `M${-r} ${r}L${r} ${-r}` });
  return svg("g", null, svg("circle", { class: look, r }), cross);
}

/**
 * Where everything stands. A row begins right of the turn that it leaves; of the rows that leave one branch those that
 * leave late come first, so no line crosses a row.
 * @param {Tree} tree @param {number|null} picked @param {Set<number>} opened
 * @returns {{rows: Row[], dots: Dot[]}}
 */
function layout({ turns, branches }, picked, opened) {
  const own = turnsOf(turns, branches);
  const special = new Set([picked, ...branches.map((one) => one.fork_turn), ...turns.map((one) => one.carries)]);
  const below = Map.groupBy(branches, (one) => one.parent_branch);
  /** @type {Map<number, number>} */
  const places = new Map();
  /** @type {Row[]} */
  const rows = [];
  /** @type {Dot[]} */
  const dots = [];
  /** @param {TreeBranch|null} branch @param {TreeTurn[]} chain */
  const add = (branch, chain) => {
    const y = rows.length * ROW + 36;
    const begin = (places.get(branch?.fork_turn ?? 0) ?? 4) + STEP;
    let x = begin;
    for (const group of groupsOf(chain, special, opened)) {
      if (group.length > 1) x += HALF - RADIUS;
      dots.push({ turns: group, row: rows.length, x, y });
      for (const { turn } of group) places.set(turn, x);
      x += STEP + (group.length > 1 ? HALF - RADIUS : 0);
    }
    rows.push({ branch, y, x: begin, end: x - STEP, own: chain });
  };
  const waiting = (below.get(null) ?? []).toReversed();
  for (let next = waiting.pop(); next; next = waiting.pop()) {
    add(next, own.get(next.branch) ?? []);
    const x = (/** @type {TreeBranch} */ one) => places.get(one.fork_turn ?? 0) ?? 0;
    waiting.push(...(below.get(next.branch) ?? []).toSorted((a, b) => x(a) - x(b) || b.branch - a.branch));
  }
  for (const turn of own.get(null) ?? []) add(null, [turn]);
  return { rows, dots };
}

/**
 * @param {TreeTurn[]} chain a branch's turns
 * @param {Set<number|null>} special turns that stand alone
 * @param {Set<number>} opened
 * @returns {TreeTurn[][]} turns that stand alone, and chains of turns that look alike
 */
function groupsOf(chain, special, opened) {
  /** @type {TreeTurn[][]} */
  const runs = [];
  chain.forEach((turn, at) => {
    const isAlone = special.has(turn.turn) || at === 0 || at === chain.length - 1 || turn.state === "open";
    const before = runs.at(-1)?.at(-1);
    const isLike = before && lookOf(before) === lookOf(turn) && !special.has(before.turn) && runs.length > 1;
    if (isAlone || !isLike) runs.push([turn]);
    else runs.at(-1)?.push(turn);
  });
  const isFolded = (/** @type {TreeTurn[]} */ run) => run.length >= CHAIN && !opened.has(run[0]?.turn ?? 0);
  return runs.flatMap((run) => (isFolded(run) ? [run] : run.map((turn) => [turn])));
}

/** @param {Tree} tree @param {Row[]} rows @param {Dot[]} dots @returns {SVGElement[]} */
function links({ main_branch }, rows, dots) {
  const at = new Map(dots.flatMap((dot) => dot.turns.map(({ turn }) => [turn, dot])));
  const roots = rows.filter(({ branch }) => branch === null || branch.fork_turn === null);
  const spine = svg("path", { d: `M10 ${roots[0]?.y ?? 0}V${roots.at(-1)?.y ?? 0}` });
  const lines = rows.flatMap(({ branch, x, y, end, own }) => {
    const from = at.get(branch?.fork_turn ?? 0);
    const begin = from ? `M${from.x} ${from.y}V${y - 8}Q${from.x} ${y} ${from.x + 8} ${y}` : `M10 ${y}`;
    const carried = at.get(own[0]?.carries ?? 0);
    const middle = ((carried?.y ?? 0) + y) / 2;
    return [
      svg("path", { class: branch?.branch === main_branch ? "main" : "", d: `${begin}H${Math.max(x, end)}` }),
      ...(carried ? [svg("path", { class: "carries", d: `M${carried.x} ${carried.y}C${carried.x} ${middle} ${x} ${middle} ${x} ${y}` })] : []),
    ];
  });
  return roots.length > 1 ? [spine, ...lines] : lines;
}

/**
 * @param {TreeTurn[]} turns
 * @param {TreeBranch[]} branches
 * @returns {Map<number|null, TreeTurn[]>} by branch; a turn in flight is with its parent, or under null
 */
function turnsOf(turns, branches) {
  const places = new Map(turns.map((turn) => [turn.turn, turn.branch]));
  const known = new Set(branches.map((one) => one.branch));
  return Map.groupBy(turns, (turn) => {
    const place = turn.branch ?? places.get(turn.parent) ?? null;
    return place !== null && known.has(place) ? place : null;
  });
}
