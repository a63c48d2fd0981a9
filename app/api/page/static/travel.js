/** Which moment of a session is shown: after any of its events, or the last one, whichever that is. */

import { announce, clock, h, setText } from "./dom.js";

/** Where somebody drags, the state is asked for so often. */
const SETTLE_MS = 120;

export class Travel {
  /** @param {(seq: number|null) => void} onMove null: the newest state, from now on */
  constructor(onMove) {
    this.onMove = onMove;
    this.slider = h("input", {
      type: "range",
      min: "1",
      max: "1",
      step: "1",
      "aria-label": "event, of this session's log",
    });
    this.field = h("input", { type: "number", min: "1", class: "short", "aria-label": "event number" });
    this.of = h("span", { class: "note" });
    this.moment = h("span", { class: "note" });
    this.live = h("button", { type: "button", "aria-pressed": "true", onclick: () => this.onMove(null) }, "live");
    const step = (by, label, sign) =>
      h("button", { type: "button", "aria-label": label, title: label, onclick: () => this.#go(this.seq + by) }, sign);
    this.back = step(-1, "previous event", "‹");
    this.on = step(1, "next event", "›");
    this.slider.addEventListener("input", () => {
      this.field.value = this.slider.value;
      clearTimeout(this.settling);
      this.settling = setTimeout(() => this.#go(Number(this.slider.value)), SETTLE_MS);
    });
    this.field.addEventListener("change", () => this.#go(Number(this.field.value)));
    this.element = h(
      "div",
      { class: "travel", role: "group", "aria-label": "Time travel" },
      h("label", null, "after event ", this.field),
      this.of,
      this.back,
      this.slider,
      this.on,
      this.live,
      this.moment,
    );
    this.seq = 1;
    this.last = 1;
  }

  /**
   * @param {number} seq the event whose state is shown
   * @param {number} last
   * @param {boolean} isLive
   * @param {number|null} at when that event was
   */
  update(seq, last, isLive, at) {
    this.seq = seq;
    this.last = last;
    this.slider.max = this.field.max = String(last);
    if (this.settling === undefined) this.slider.value = String(seq);
    if (document.activeElement !== this.field || !isLive) this.field.value = String(seq);
    this.slider.setAttribute("aria-valuetext", `event ${seq} of ${last}`);
    setText(this.of, `of ${last}`);
    setText(this.moment, isLive ? "" : clock(at));
    this.live.setAttribute("aria-pressed", String(isLive));
    this.back.disabled = seq <= 1;
    this.on.disabled = seq >= last;
  }

  close() {
    clearTimeout(this.settling);
  }

  #go(seq) {
    clearTimeout(this.settling);
    this.settling = undefined;
    const wanted = Math.max(1, Math.min(Math.trunc(seq) || 1, this.last));
    announce(`event ${wanted} of ${this.last}`);
    this.onMove(wanted);
  }
}
