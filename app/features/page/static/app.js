/** The page's frame: which view is shown, the stream of changes for all views, theme, keys, signing out. */

import { access, ApiError, get, LiveConnection, send } from "./api.js";
import { CheckpointsView, CheckpointView } from "./checkpoints.js";
import { announce, failure, h, message, part, replace, setText } from "./dom.js";
import { ExportsView } from "./exports.js";
import { fleetStrip } from "./fleet.js";
import { clock, serverNow, setServerNow, setSince, startTicking } from "./format.js";
import { GroupView } from "./group.js";
import { GroupsView } from "./groups.js";
import { JudgeView } from "./judge.js";
import { listenToKeys, showKeys } from "./keys.js";
import { changeQuery, chosenRun, listHref, parse } from "./route.js";
import { RolloutsView } from "./rollouts.js";
import { runChoice } from "./runchoice.js";
import { RunsView } from "./runs.js";
import { RunView } from "./runview.js";
import { SearchView } from "./search.js";
import { SessionView } from "./session.js";
import { SessionsView } from "./sessions.js";
import { SignInView } from "./signin.js";
import { visibleText } from "./visible.js";

/** @import {Me, Overview} from "../ui_types.d.ts" */
/** @import {View} from "./view.js" */

const VIEWS = {
  runs: { View: RunsView, title: "Runs" },
  run: { View: RunView, title: "Run" },
  sessions: { View: SessionsView, title: "Sessions" },
  session: { View: SessionView, title: "Session" },
  groups: { View: GroupsView, title: "Groups" },
  group: { View: GroupView, title: "Group" },
  rollouts: { View: RolloutsView, title: "Rollouts" },
  search: { View: SearchView, title: "Search" },
  exports: { View: ExportsView, title: "Exports" },
  checkpoints: { View: CheckpointsView, title: "Checkpoints" },
  checkpoint: { View: CheckpointView, title: "Checkpoint" },
  judge: { View: JudgeView, title: "Judge" },
};
/** @type {Record<string, string>} */
const LIST_ABOVE = { group: "groups", rollouts: "groups", checkpoint: "checkpoints", judge: "sessions" };
/** The first view waits so long for the stream, so that no change is lost before the stream begins. */
const FIRST_HELLO_MS = 1500;

class App {
  constructor() {
    this.main = part("main");
    this.strip = fleetStrip(part("fleet"), part("fold"));
    this.choice = runChoice(part("run"));
    /** The only run that is shown, to who signed in with its token. */
    this.ownRun = /** @type {string|null} */ (null);
    this.view = /** @type {View|null} */ (null);
    this.place = "";
    this.overview = /** @type {Overview|null} */ (null);
    this.live = /** @type {LiveConnection|null} */ (null);
    this.lastHeard = serverNow();
  }

  async start() {
    startTicking();
    part("help").addEventListener("click", showKeys);
    part("sign-out").addEventListener("click", () => this.#signOut());
    part("skip").addEventListener("click", () => this.main.focus());
    listenToKeys(() => this.view?.onFilterKey());
    window.addEventListener("hashchange", () => this.#enter());
    access.onUnauthorized = () => this.#signIn();
    await this.#begin();
  }

  /** Check whether the user is signed in, then follow the changes, then show what the address names. */
  async #begin() {
    let me;
    try {
      me = /** @type {Me} */ (await get("/ui/api/me"));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status !== 401) replace(this.main, failure(error, () => this.#begin()));
      return;
    }
    setServerNow(me.now);
    access.needsToken = me.auth === "token";
    part("release").textContent = me.release;
    part("sign-out").hidden = me.auth !== "token";
    this.ownRun = me.run;
    const isAtHome = ["", "#", "#/"].includes(location.hash);
    if (me.run !== null && isAtHome) history.replaceState(null, "", listHref("runs", { run: me.run }));
    this.#keepToOwnRun();
    await this.#follow();
    this.#enter();
  }

  /** An address that somebody typed names no run, or another. */
  #keepToOwnRun() {
    if (this.ownRun !== null && chosenRun() !== this.ownRun) changeQuery({ run: this.ownRun });
  }

  /** Follow the chosen run. @returns {Promise<void>} once the stream has begun, failed, or taken too long */
  #follow() {
    this.live?.close();
    return new Promise((resolve) => {
      setTimeout(resolve, FIRST_HELLO_MS);
      this.live = new LiveConnection(chosenRun(), {
        onSessions: (rows) => {
          this.lastHeard = serverNow();
          this.view?.onSessions(rows);
        },
        onOverview: (overview) => this.#showOverview(overview),
        onReset: () => this.view?.onReset(),
        onState: (state) => {
          this.#showConnection(state);
          if (state !== "connecting") resolve();
        },
      });
    });
  }

  /** @param {Overview} overview */
  #showOverview(overview) {
    this.lastHeard = serverNow();
    this.overview = overview;
    setServerNow(overview.at);
    this.strip.show(overview);
    part("read-only").hidden = !overview.read_only;
    setText(part("why"), overview.read_only ?? "");
    this.view?.onOverview(overview);
  }

  /** @param {"connecting"|"live"|"lost"} state */
  #showConnection(state) {
    part("connection").hidden = false;
    part("connection").dataset.state = state;
    setText(part("state"), state === "lost" ? "not connected" : state);
    if (state === "lost" && part("banner").hidden) {
      part("banner").hidden = false;
      setText(part("heard"), clock(this.lastHeard));
      setSince(part("ago"), this.lastHeard);
    } else part("banner").hidden = state !== "lost";
  }

  /** Show the view that the address names. */
  #enter() {
    if (!this.live) return;
    this.#keepToOwnRun();
    const run = chosenRun();
    if (this.live.run !== run) this.#follow();
    this.choice.show(run, this.ownRun !== null);
    const route = parse(location.hash);
    linkLists(route ? (LIST_ABOVE[route.name] ?? route.name) : "");
    const place = route ? `${route.name} ${route.id} of ${route.query.get("of") ?? run ?? "all"}` : location.hash;
    if (route && place === this.place && this.view) {
      this.view.onQuery(route.query);
      return;
    }
    const isFirst = !this.place;
    this.#leave();
    this.place = place;
    if (!route) {
      document.title = "Turnlog";
      const all = h("p", null, h("a", { href: listHref("") }, "All sessions"));
      replace(this.main, message("empty", `There is no view at ${visibleText(this.place)}`, all));
      return;
    }
    const name = route.name === "runs" && run !== null ? "run" : route.name;
    const { View, title } = VIEWS[name];
    this.strip.enter(name);
    document.title = `${route.id || (name === "run" && run) || title} · Turnlog`;
    announce(route.id ? `${title} ${route.id}` : title);
    this.view = new View(this.main, { ...route, overview: () => this.overview });
    // What had the focus is gone: the next Tab goes on in the view, not at the top of the page.
    if (!isFirst && document.activeElement === document.body) this.main.focus({ preventScroll: true });
  }

  #leave() {
    this.view?.close();
    this.view = null;
    this.main.replaceChildren();
  }

  /** A request was answered 401: nothing is shown until somebody signs in. */
  #signIn() {
    if (this.place === "sign-in") return;
    this.live?.close();
    this.live = null;
    this.#leave();
    this.place = "sign-in";
    for (const id of ["fleet", "fold", "banner", "sign-out", "run", "connection"]) part(id).hidden = true;
    document.title = "Sign in · Turnlog";
    this.view = new SignInView(this.main, () => {
      this.#leave();
      this.place = "";
      this.#begin();
    });
  }

  async #signOut() {
    try {
      await send("POST", "/ui/sign-out", {});
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      announce(error.message);
      return;
    }
    this.#signIn();
  }
}

/** The links lead to the lists of the chosen run. @param {string} current view, or the list above it */
function linkLists(current) {
  part("brand").setAttribute("href", listHref(""));
  for (const link of document.querySelectorAll("#nav a")) {
    const name = link.getAttribute("data-name") ?? "";
    link.setAttribute("href", listHref(name));
    link.ariaCurrent = name === current ? "page" : null;
    // On a phone the links are one line that scrolls.
    if (name === current) link.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

await new App().start();
