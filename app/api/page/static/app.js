/** The page's frame: which view is shown, the stream of changes that all views share, theme, keys, signing out. */

import { ApiError, get, live, post, setNeedsToken, whenUnauthorized } from "./api.js";
import { announce, clock, h, message, replace, serverNow, setServerNow, since, startTicking } from "./dom.js";
import { view as exportsView } from "./exports.js";
import { fleetStrip } from "./fleet.js";
import { view as groupView } from "./group.js";
import { view as groupsView } from "./groups.js";
import { listenToKeys, showKeys } from "./keys.js";
import { parse } from "./route.js";
import { view as sessionView } from "./session.js";
import { view as sessionsView } from "./sessions.js";
import { view as signInView } from "./signin.js";
import { view as tokensView } from "./tokens.js";

/**
 * @typedef {object} View what a view gives back; `onSessions` gets rows that changed, `onReset` says that some may have
 *   been missed, `onQuery` that the address has another query, for views that need not be made anew for that
 * @property {() => void} close
 * @property {(rows: any[]) => void} [onSessions]
 * @property {(overview: any) => void} [onOverview]
 * @property {() => void} [onReset]
 * @property {(query: URLSearchParams) => void} [onQuery]
 * @property {() => void} [onFilterKey] what `/` does
 *
 * @typedef {(root: HTMLElement, params: import("./route.js").Route & {overview: () => any}) => View} Enter
 */

/** @type {Record<string, {enter: Enter, title: string}>} */
const VIEWS = {
  sessions: { enter: sessionsView, title: "Sessions" },
  session: { enter: sessionView, title: "Session" },
  tokens: { enter: tokensView, title: "Tokens" },
  groups: { enter: groupsView, title: "Groups" },
  group: { enter: groupView, title: "Group" },
  exports: { enter: exportsView, title: "Exports" },
};
const NAVIGATION = [
  ["sessions", "#/", "Sessions"],
  ["groups", "#/groups", "Groups"],
  ["exports", "#/exports", "Exports"],
];
/** The first view waits so long for the stream, so that no change falls between its request and the stream's begin. */
const FIRST_HELLO_MS = 1500;

class App {
  constructor() {
    this.main = part("main");
    this.strip = fleetStrip(part("fleet"));
    /** @type {View|null} */
    this.view = null;
    this.place = "";
    /** @type {any} */
    this.overview = null;
    /** @type {(() => void)|null} */
    this.stopLive = null;
    this.lastHeard = serverNow();
  }

  async start() {
    startTicking();
    this.#arrangeFrame();
    window.addEventListener("hashchange", () => this.#enter());
    whenUnauthorized(() => this.#signIn());
    await this.#begin();
  }

  /** Ask who one is, then follow the changes, then show what the address names. */
  async #begin() {
    let me;
    try {
      me = await get("/ui/api/me");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status !== 401) this.#cannotBegin(error);
      return;
    }
    setServerNow(me.now);
    setNeedsToken(me.auth === "token");
    part("release").textContent = me.release;
    part("sign-out").hidden = me.auth !== "token";
    part("fleet").hidden = false;
    await this.#follow();
    this.#enter();
  }

  /** @param {ApiError} error */
  #cannotBegin(error) {
    const again = h("button", { type: "button", onclick: () => this.#begin() }, "Try again");
    replace(this.main, message("error", error.code, h("p", null, error.message), again));
  }

  /** @returns {Promise<void>} once the stream has begun, failed, or taken too long */
  #follow() {
    return new Promise((resolve) => {
      setTimeout(resolve, FIRST_HELLO_MS);
      this.stopLive = live({
        onSessions: (rows) => {
          this.#heard();
          this.view?.onSessions?.(rows);
        },
        onOverview: (overview) => {
          this.#heard();
          this.overview = overview;
          setServerNow(overview.at);
          this.strip.show(overview);
          showReadOnly(overview.read_only);
          this.view?.onOverview?.(overview);
        },
        onReset: () => this.view?.onReset?.(),
        onState: (state) => {
          this.#showConnection(state);
          if (state !== "connecting") resolve();
        },
      });
    });
  }

  #heard() {
    this.lastHeard = serverNow();
  }

  /** @param {"connecting"|"live"|"lost"} state */
  #showConnection(state) {
    const words = { connecting: "connecting", live: "live", lost: "not connected" };
    const element = part("connection");
    if (element.dataset.state !== state) {
      element.dataset.state = state;
      replace(element, h("span", { class: "dot", "aria-hidden": "true" }), words[state]);
    }
    const banner = part("banner");
    if (state !== "lost") banner.hidden = true;
    else if (banner.hidden) {
      banner.hidden = false;
      replace(
        banner,
        h("strong", null, "No connection to the server; trying again. "),
        "What you see is as of ",
        h("span", null, clock(this.lastHeard)),
        ", ",
        since(this.lastHeard),
        ".",
      );
    }
  }

  /** Show the view that the address names. */
  #enter() {
    if (!this.stopLive) return;
    const route = parse(location.hash);
    const place = route ? `${route.name} ${route.id}` : location.hash;
    if (route && place === this.place && this.view?.onQuery) {
      this.view.onQuery(route.query);
      return;
    }
    this.#leave();
    this.place = place;
    const name = route?.name ?? "";
    for (const link of document.querySelectorAll("#nav a")) {
      const isHere = link.getAttribute("data-name") === `${name}${name === "group" ? "s" : ""}`;
      if (isHere) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (!route) {
      document.title = "Turnlog";
      replace(this.main, message("empty", "There is no such view.", h("p", null, h("a", { href: "#/" }, "All sessions"))));
      return;
    }
    const { enter, title } = VIEWS[name];
    document.title = `${route.id ?? title} · Turnlog`;
    announce(route.id ? `${title} ${route.id}` : title);
    this.view = enter(this.main, { ...route, overview: () => this.overview });
  }

  #leave() {
    this.view?.close();
    this.view = null;
    this.main.replaceChildren();
  }

  /** A request was answered 401: nothing is shown any more until somebody signs in. */
  #signIn() {
    if (this.place === "sign-in") return;
    this.stopLive?.();
    this.stopLive = null;
    this.#leave();
    this.place = "sign-in";
    part("fleet").hidden = true;
    part("banner").hidden = true;
    part("sign-out").hidden = true;
    replace(part("connection"));
    document.title = "Sign in · Turnlog";
    this.view = signInView(this.main, () => {
      this.#leave();
      this.place = "";
      this.#begin();
    });
  }

  #arrangeFrame() {
    replace(
      part("nav"),
      NAVIGATION.map(([name, href, title]) => h("a", { href, dataset: { name } }, title)),
    );
    replace(
      part("tools"),
      h("span", { id: "release", class: "muted release" }),
      h("button", { type: "button", onclick: showKeys, title: "Keys (?)", "aria-label": "Keys" }, "?"),
      themeSwitch(),
      h("button", { type: "button", id: "sign-out", hidden: true, onclick: () => this.#signOut() }, "Sign out"),
    );
    part("skip").addEventListener("click", () => this.main.focus());
    listenToKeys({ filter: () => this.view?.onFilterKey?.() });
  }

  async #signOut() {
    try {
      await post("/ui/sign-out", {});
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      announce(error.message);
      return;
    }
    this.#signIn();
  }
}

/**
 * @param {string|null} why the server has started, but cannot write; null where it can
 */
function showReadOnly(why) {
  const banner = part("read-only");
  if (banner.hidden === !why) return;
  banner.hidden = !why;
  if (!why) return;
  replace(
    banner,
    h("strong", null, "Read-only: "),
    `${why}. What is stored can be read and exported; turns are refused until the store takes writes again.`,
  );
}

/** @param {string} id @returns {HTMLElement} a part of index.html */
function part(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no ${id}`);
  return found;
}

/** @returns {HTMLElement} the system's theme, light or dark */
function themeSwitch() {
  const root = document.documentElement;
  const select = h(
    "select",
    { "aria-label": "Theme", title: "Theme" },
    h("option", { value: "" }, "auto"),
    h("option", { value: "light" }, "light"),
    h("option", { value: "dark" }, "dark"),
  );
  select.value = root.dataset.theme ?? "";
  select.addEventListener("change", () => {
    if (select.value) root.dataset.theme = select.value;
    else delete root.dataset.theme;
    localStorage.setItem("turnlog-theme", select.value);
  });
  return select;
}

await new App().start();
