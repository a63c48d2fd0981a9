/** Numbers, sizes and times as people read them; elapsed times that go on by themselves. */

const DASH = "–";
const TICK_MS = 1000;

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3, notation: "compact" });
const moment = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

let aheadS = 0;

/** Set the server's clock, so that "3 s ago" is right on a computer whose own is wrong. @param {number} serverNow epoch seconds */
export function setServerNow(serverNow) {
  aheadS = serverNow - Date.now() / 1000;
}

/** @returns {number} the server's time, epoch seconds */
export function serverNow() {
  return Date.now() / 1000 + aheadS;
}

/** @param {number|null|undefined} value @returns {string} 12,345 */
export function count(value) {
  return value == null ? DASH : whole.format(value);
}

/** @param {number} value @param {string} noun @returns {string} `1 turn`, `2 turns` */
export function amount(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** @param {number|null|undefined} value @returns {string} 12.3K */
export function compact(value) {
  return value == null ? DASH : short.format(value);
}

/** With always as many decimals, so that a column is aligned. @param {number|null|undefined} value @param {number} [decimals] */
export function decimal(value, decimals = 3) {
  if (value == null) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 10 ** -decimals)) return value.toExponential(2);
  return value.toFixed(decimals);
}

/** @param {number|null|undefined} value milliseconds @returns {string} */
export function milliseconds(value) {
  if (value == null) return DASH;
  if (value < 10) return `${value.toFixed(2)} ms`;
  if (value < 1000) return `${value.toFixed(value < 100 ? 1 : 0)} ms`;
  return duration(value / 1000);
}

/** @param {number|null|undefined} value bytes @returns {string} in powers of 1024 */
export function bytes(value) {
  if (value == null) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? size.toFixed(0) : size.toFixed(1)} ${units[unit]}`;
}

/** @param {number|null|undefined} seconds @returns {string} 850 ms, 12 s, 3 min 05 s, 2 h 10 min, 4 d 3 h */
export function duration(seconds) {
  if (seconds == null) return DASH;
  const s = Math.max(0, seconds);
  const rest = (/** @type {number} */ value) => String(Math.floor(value)).padStart(2, "0");
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${rest(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${rest((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** @param {number|null|undefined} at epoch seconds @returns {string} date and time of this computer's zone */
export function clock(at) {
  return at == null ? DASH : moment.format(at * 1000);
}

/** @param {number} at epoch seconds @returns {string} ISO 8601, UTC */
export function iso(at) {
  return new Date(at * 1000).toISOString();
}

/**
 * A `<time>` that says how long ago something was, or how long it has been going on ("for"), and is kept up to date.
 * @param {number|null|undefined} at epoch seconds @param {"ago"|"for"} [style]
 */
export function since(at, style = "ago") {
  const element = document.createElement("time");
  setSince(element, at, style);
  return element;
}

/**
 * Point such a `<time>` at another moment, in place.
 * @param {HTMLElement} element @param {number|null|undefined} at @param {"ago"|"for"} [style]
 */
export function setSince(element, at, style = "ago") {
  if (at == null) {
    delete element.dataset.at;
    element.removeAttribute("datetime");
    element.removeAttribute("title");
    element.textContent = DASH;
    return;
  }
  element.dataset.at = String(at);
  element.dataset.style = style;
  element.setAttribute("datetime", iso(at));
  element.title = clock(at);
  tick(element);
}

/** Let every `<time>` of the document tick. */
export function startTicking() {
  setInterval(() => {
    if (document.hidden) return;
    for (const element of document.querySelectorAll("time[data-at]")) tick(/** @type {HTMLElement} */ (element));
  }, TICK_MS);
}

/** @param {HTMLElement} element */
function tick(element) {
  const passed = serverNow() - Number(element.dataset.at);
  const text = element.dataset.style === "for" ? coarse(passed) : passed < 1 ? "now" : `${coarse(passed)} ago`;
  if (element.textContent !== text) element.textContent = text;
}

/** @param {number} seconds @returns {string} one or two units: what ticks should not flicker */
function coarse(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min` : duration(s);
}

/** @param {number[]} numbers @returns {string} "2, 5–7" */
export function ranges(numbers) {
  /** @type {[number, number][]} */
  const found = [];
  for (const one of [...numbers].sort((a, b) => a - b)) {
    const last = found.at(-1);
    if (last && one === last[1] + 1) last[1] = one;
    else found.push([one, one]);
  }
  return found.map(([from, to]) => (from === to ? String(from) : `${from}–${to}`)).join(", ");
}
