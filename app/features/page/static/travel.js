/** Which moment of a session is shown: after any of its events, or the newest. */

import { announce, button, h, setText } from "./dom.js";
import { clock } from "./format.js";

/** While somebody drags the slider, the state is asked for so often. */
const SETTLE_MS = 120;

export class Travel {
  /** @param {AbortSignal} closed @param {(seq: number|null) => void} onMove null: the newest state, from now on */
  constructor(closed, onMove) {
    this.onMove = onMove;
    this.last = 1;
    this.settling = 0;
    this.slider = h("input", { type: "range", min: "1", "aria-label": "event, of this session's log" });
    this.field = h("input", { type: "number", min: "1", class: "short", "aria-label": "event number" });
    this.of = h("span", { class: "note" });
    this.moment = h("span", { class: "note" });
    this.live = button("live", () => this.onMove(null), { "aria-pressed": "true" });
    this.slider.addEventListener("input", () => {
      this.field.value = this.slider.value;
      clearTimeout(this.settling);
      this.settling = setTimeout(() => this.#go(Number(this.slider.value)), SETTLE_MS);
    });
    this.field.addEventListener("change", () => this.#go(Number(this.field.value)));
    closed.addEventListener("abort", () => clearTimeout(this.settling));
    const parts = [h("label", null, "after event ", this.field), this.of, this.slider, this.live, this.moment];
    this.element = h("div", { class: "travel", role: "group", "aria-label": "Time travel" }, parts);
  }

  /** @param {number} seq the event whose state is shown @param {number} last @param {boolean} isLive @param {number|null} at its time */
  update(seq, last, isLive, at) {
    this.last = last;
    this.slider.max = this.field.max = String(last);
    if (!this.settling) this.slider.value = String(seq);
    if (document.activeElement !== this.field || !isLive) this.field.value = String(seq);
    this.slider.setAttribute("aria-valuetext", `event ${seq} of ${last}`);
    setText(this.of, `of ${last}`);
    setText(this.moment, isLive ? "" : clock(at));
    this.live.setAttribute("aria-pressed", String(isLive));
  }

  /** @param {number} seq */
  #go(seq) {
    clearTimeout(this.settling);
    this.settling = 0;
    const wanted = Math.max(1, Math.min(Math.trunc(seq) || 1, this.last));
    announce(`event ${wanted} of ${this.last}`);
    this.onMove(wanted);
  }
}
