/** Elements, made without HTML: text of agents and engines becomes text nodes and attribute values, nothing else. */

const SVG = "http://www.w3.org/2000/svg";
const LINKS = new Set(["http:", "https:"]);

/** @import {Child} from "../ui_types.d.ts" */
/** @typedef {Record<string, unknown>} Attributes */

/**
 * An element.
 *
 * Attributes: a function under `onclick` and the like is a listener; `dataset` and `style` are objects (style is set
 * property by property, as the page's policy allows); true is an empty attribute, false, null and undefined are none.
 * `href` and `src` take http(s) URLs, relative ones too, and nothing that runs.
 *
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {Attributes|null} [attributes] @param {...Child} children
 */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes ?? {});
  append(element, children);
  return element;
}

/**
 * The same for SVG.
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag @param {Attributes|null} [attributes] @param {...Child} children
 */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  setAttributes(element, attributes ?? {});
  append(element, children);
  return element;
}

/** Give an element these children and no others. @template {Element} E @param {E} element @param {...Child} children */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** @type {WeakMap<Element, string>} what the children of an element show */
const parts = new WeakMap();

/**
 * Make an element's children anew where they show something else: somebody may have unfolded one, or be about to press it. A form that somebody fills in stays.
 * @param {Element} box @param {unknown} shown @param {() => Child} make
 */
export function renew(box, shown, make) {
  const key = JSON.stringify(shown);
  if (parts.get(box) === key || box.querySelector("form")) return;
  parts.set(box, key);
  refill(box, make());
}

/**
 * Replace an element's children. The focus stays: a control is known by its step or its words, else by its place.
 * @param {Element} box @param {...Child} children
 */
export function refill(box, ...children) {
  const name = (/** @type {Element|null|undefined} */ one) => one?.getAttribute("data-step") ?? one?.textContent;
  const controls = () => [...box.querySelectorAll("a, button, select, input")];
  const place = controls().findIndex((one) => one === document.activeElement);
  const focused = name(document.activeElement);
  replace(box, children);
  if (place < 0) return;
  const again = (focused && controls().find((one) => name(one) === focused)) || controls()[place];
  /** @type {HTMLElement|undefined} */ (again)?.focus({ preventScroll: true });
}

/**
 * Have exactly these elements, in this order. Those that are there already are not moved, so that they keep the focus.
 * @param {Element} box @param {Element[]} elements
 */
export function arrange(box, elements) {
  const focused = document.activeElement;
  const wanted = new Set(elements);
  for (const child of [...box.children]) if (!wanted.has(child)) child.remove();
  let next = box.firstElementChild;
  for (const element of elements) {
    if (element === next) next = next.nextElementSibling;
    else box.insertBefore(element, next);
  }
  if (focused !== document.activeElement && box.contains(focused)) {
    /** @type {HTMLElement} */ (focused).focus({ preventScroll: true });
  }
}

/** Set a text only if it differs, so that a selection and the layout stay. @param {Element} element @param {string} text */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @param {Element} element @param {readonly Child[]} children */
function append(element, children) {
  for (const child of children) {
    if (child == null || child === false) continue;
    if (typeof child === "number") element.append(String(child));
    else if (typeof child === "string" || child instanceof Node) element.append(child);
    else append(element, child);
  }
}

/** @param {HTMLElement|SVGElement} element @param {Attributes} attributes */
function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (typeof value === "function" && name.startsWith("on")) {
      element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    } else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "style") {
      for (const [property, one] of Object.entries(value)) element.style.setProperty(property, String(one));
    } else setAttribute(element, name, value);
  }
}

/** @param {Element} element @param {string} name @param {unknown} value */
function setAttribute(element, name, value) {
  if (name.startsWith("on") || name === "srcdoc") throw new TypeError(`${name} is not set by this page`);
  const text = value === true ? "" : String(value);
  const isAddress = name === "href" || name === "src";
  if (isAddress && !LINKS.has(URL.parse(text, document.baseURI)?.protocol ?? "")) throw new TypeError(`${name} is no link`);
  element.setAttribute(name, text);
}

/** A button outside a form. @param {Child} label @param {() => void} onPress @param {Attributes} [attributes] */
export function button(label, onPress, attributes) {
  return h("button", { type: "button", onclick: onPress, ...attributes }, label);
}

/**
 * Content that a click on its summary shows.
 * @param {Child} summary
 * @param {Child} content
 * @param {string} [kind] a class
 */
export function folded(summary, content, kind) {
  return h("details", { class: kind }, h("summary", null, summary), content);
}

/** A number with its name above it. @param {string} label @param {Child} value @returns {HTMLElement} */
export function figure(label, value) {
  return h("div", { class: "figure" }, h("span", { class: "label" }, label), value);
}

/** A figure with a longer value. @param {string} label @param {Child} value */
export function fact(label, value) {
  return figure(label, h("span", { class: "value small" }, value));
}

/** A line of tools: the first to the left, the others to the right. @param {Child} left @param {Child} right */
export function bar(left, right) {
  return h("div", { class: "bar" }, left, h("span", { class: "spacer" }), right);
}

/** Content that is wider than the page scrolls by itself, also by keys. @param {string} label @param {...Child} content */
export function scrollRegion(label, ...content) {
  return h("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": label }, ...content);
}

/** Show a dialog, and remove it when it is closed. @param {Attributes|null} attributes @param {...Child} content */
export function showDialog(attributes, ...content) {
  const dialog = h("dialog", attributes, ...content, h("form", { method: "dialog" }, h("button", null, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** Shapes in a square of 16 by 16, which no font draws. */
const ICONS = {
  play: "M4 2l10 6-10 6z",
  pause: "M4 2h3v12H4zM9 2h3v12H9z",
  ring: "M8 2a6 6 0 1 0 0 12A6 6 0 1 0 8 2zm0 2a4 4 0 1 1 0 8 4 4 0 1 1 0-8z",
  dot: "M8 3a5 5 0 1 0 0 10A5 5 0 1 0 8 3z",
  square: "M3 3h10v10H3z",
  frame: "M3 3h10v10H3zM5 5v6h6V5z",
  cross: "M3.5 2L8 6.5 12.5 2 14 3.5 9.5 8l4.5 4.5-1.5 1.5L8 9.5 3.5 14 2 12.5 6.5 8 2 3.5z",
  warning: "M8 2l7 12H1z",
  branch: "M4 2h2v5h2a2 2 0 0 0 2-2V2h2v3a4 4 0 0 1-4 4H6v5H4z",
  image: "M2 3h12v10H2zM4 5v6h8V5zm1 5l2-3 2 2 1-1 1 2z",
  pencil: "M11 2l3 3-8 8H3v-3z",
  left: "M10 2l2 2-4 4 4 4-2 2-6-6z",
  right: "M6 2L4 4l4 4-4 4 2 2 6-6z",
  down: "M2 5h12l-6 7z",
  end: "M7 2h2v6h3l-4 4-4-4h3zM3 13h10v2H3z",
};

/** A shape beside a text, or in a control that has a name. @param {keyof typeof ICONS} name */
export function icon(name) {
  return svg("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

/** What is worth a look. @param {string} text */
export function flag(text) {
  return h("span", { class: "flag" }, icon("warning"), " ", text);
}

/**
 * The states of a session: a shape for those who do not see the colour, and what the word means.
 * @type {Record<string, {shape: keyof typeof ICONS, hint: string}>}
 */
export const STATES = {
  running: { shape: "play", hint: "A turn is in flight: an engine generates" },
  paused: { shape: "pause", hint: "A turn waits at a gate until it opens" },
  idle: { shape: "ring", hint: "Open, no turn in flight: its environment is working, or it is abandoned" },
  open: { shape: "ring", hint: "Running, paused or idle: it takes turns" },
  closed: { shape: "square", hint: "It takes no more turns" },
  erased: { shape: "cross", hint: "Its content was deleted for good" },
  undone: { shape: "frame", hint: "Created after the checkpoint that its run, or the store, was taken back to" },
};
/** @type {Record<string, keyof typeof ICONS>} */
const TONE_SHAPES = { good: "dot", warn: "warning", bad: "cross" };

/**
 * A state as word, shape and colour; also for engines' health.
 * @param {string} state
 * @param {string} [tone] "good", "warn", "bad" or "muted"; by default the state's own
 */
export function badge(state, tone) {
  const element = h("span", { class: "badge" });
  setBadge(element, state, tone);
  return element;
}

/** @param {HTMLElement} element @param {string} state @param {string} [tone] */
export function setBadge(element, state, tone) {
  const known = STATES[state];
  const wanted = tone ?? (known ? state : "plain");
  if (element.dataset.tone === wanted && element.dataset.state === state) return;
  element.dataset.tone = wanted;
  element.dataset.state = state;
  element.title = tone ? "" : (known?.hint ?? "");
  replace(element, icon(known?.shape ?? TONE_SHAPES[tone ?? ""] ?? "ring"), state);
}

/** @param {string} id @returns {HTMLElement} a part of index.html */
export function part(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no ${id}`);
  return found;
}

/** Say something to a screen reader. @param {string} text */
export function announce(text) {
  part("announcer").textContent = text;
}

/**
 * A message in a view: why there is nothing, or what failed.
 * @param {"empty"|"error"|"note"} kind
 * @param {string} title
 * @param {...Child} more
 */
export function message(kind, title, ...more) {
  const role = kind === "error" ? "alert" : null;
  return h("div", { class: `message ${kind}`, role }, h("strong", null, title), ...more);
}

/**
 * A failed request as a message. Anything but an ApiError is a fault of the page, and thrown on.
 * @param {unknown} error
 * @param {() => void} [again] what the button does
 */
export function failure(error, again) {
  if (!(error instanceof Error) || !("code" in error)) throw error;
  return message("error", String(error.code), h("p", null, error.message), again && button("Try again", again));
}
