/**
 * Elements, made without HTML: what agents and engines wrote becomes text nodes and attribute values and nothing else.
 */

export * from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const LINKS = new Set(["http:", "https:"]);

/**
 * @typedef {Node|string|number|null|undefined|false|readonly any[]} Child
 * @typedef {Record<string, unknown>} Attributes
 */

/**
 * An element.
 *
 * Attributes: a function under `onclick` and the like is a listener; `dataset` and `style` are objects (style is set
 * property by property, as the page's policy allows); true is an empty attribute, false, null and undefined are none.
 * `href` and `src` take http(s) URLs of any kind of spelling and nothing that runs.
 *
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Attributes|null} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[T]}
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
 * @param {T} tag
 * @param {Attributes|null} [attributes]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[T]}
 */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  setAttributes(element, attributes ?? {});
  append(element, children);
  return element;
}

/**
 * Give an element these children and no others.
 * @template {Element} E
 * @param {E} element
 * @param {...Child} children
 * @returns {E}
 */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/**
 * Set a text only where it differs, so that a selection and the layout stay.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @param {Element} element @param {Child[]} children */
function append(element, children) {
  for (const child of children) {
    if (child == null || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
}

/** @param {Element} element @param {Attributes} attributes */
function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (typeof value === "function" && name.startsWith("on")) {
      element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    } else if (name === "dataset") {
      Object.assign(/** @type {HTMLElement} */ (element).dataset, value);
    } else if (name === "style") {
      for (const [property, one] of Object.entries(value)) {
        /** @type {HTMLElement} */ (element).style.setProperty(property, String(one));
      }
    } else {
      setAttribute(element, name, value);
    }
  }
}

/** @param {Element} element @param {string} name @param {unknown} value */
function setAttribute(element, name, value) {
  if (name.startsWith("on") || name === "srcdoc") throw new TypeError(`${name} is not set by this page`);
  const text = value === true ? "" : String(value);
  if ((name === "href" || name === "src") && !isLink(text)) throw new TypeError(`${name} is no link`);
  element.setAttribute(name, text);
}

/** @param {string} text @returns {boolean} */
function isLink(text) {
  return URL.canParse(text, document.baseURI) && LINKS.has(new URL(text, document.baseURI).protocol);
}

/** How a session's state looks: a shape beside the word, so that it does not hang on the colour. */
const SHAPES = { open: "○", idle: "○", claimed: "▶", gated: "‖", closed: "■", erased: "×" };

/**
 * A state as word, shape and colour; also for engines' health.
 * @param {string} state
 * @param {string} [tone] "good", "warn", "bad" or "muted"; by default the state's own
 * @returns {HTMLElement}
 */
export function badge(state, tone) {
  const element = h("span", { class: "badge" });
  setBadge(element, state, tone);
  return element;
}

/** @param {HTMLElement} element @param {string} state @param {string} [tone] */
export function setBadge(element, state, tone) {
  const wanted = tone ?? (state in SHAPES ? state : "plain");
  if (element.dataset.tone === wanted && element.dataset.state === state) return;
  element.dataset.tone = wanted;
  element.dataset.state = state;
  const shape = SHAPES[/** @type {keyof typeof SHAPES} */ (state)] ?? toneShape(tone);
  replace(element, h("span", { class: "shape", "aria-hidden": "true" }, shape), state);
}

/** @param {string|undefined} tone @returns {string} */
function toneShape(tone) {
  return { good: "●", warn: "▲", bad: "✕" }[tone ?? ""] ?? "·";
}

/**
 * Say something to those who do not see the page.
 * @param {string} text
 */
export function announce(text) {
  const region = document.getElementById("announcer");
  if (region) region.textContent = text;
}

/**
 * A message in a view: why there is nothing, or what failed.
 * @param {"empty"|"error"|"note"} kind
 * @param {string} title
 * @param {...Child} more
 * @returns {HTMLElement}
 */
export function message(kind, title, ...more) {
  return h("div", { class: `message ${kind}`, role: kind === "error" ? "alert" : null }, h("strong", null, title), ...more);
}

/**
 * A failed request as a message; anything but an ApiError is thrown on: that is a fault of the page.
 * @param {unknown} error
 * @param {() => void} [again] what the button does
 * @returns {HTMLElement}
 */
export function failure(error, again) {
  if (!(error instanceof Error) || !("code" in error)) throw error;
  return message(
    "error",
    String(error.code),
    h("p", null, error.message),
    again && h("button", { type: "button", onclick: again }, "Try again"),
  );
}
