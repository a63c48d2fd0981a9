/** Which moment of a session is shown: after any of its events, or the newest. */

import { announce, button, h, setText } from "./dom.js";
import { clock } from "./format.js";

export class Travel {
  /** @param {(seq: number|null) => void} onMove null: the newest state, from now on */
  constructor(onMove) {
    this.onMove = onMove;
    this.last = 1;
    this.slider = h("input", { type: "range", min: "1", "aria-label": "event, of this session's log" });
    this.field = h("input", { type: "number", min: "1", class: "short", "aria-label": "event number" });
    this.of = h("span", { class: "note" });
    this.moment = h("span", { class: "note" });
    this.live = button("live", () => this.onMove(null), { "aria-pressed": "true" });
    for (const input of [this.slider, this.field]) input.addEventListener("change", () => this.#go(Number(input.value)));
    const parts = [h("label", null, "after event ", this.field), this.of, this.slider, this.live, this.moment];
    this.element = h("div", { class: "travel", role: "group", "aria-label": "Time travel" }, parts);
  }

  /** @param {number} seq the event whose state is shown @param {number} last @param {boolean} isLive @param {number|null} at its time */
  update(seq, last, isLive, at) {
    this.last = last;
    this.slider.max = this.field.max = String(last);
    // What somebody drags or types stays while the log grows.
    for (const input of [this.slider, this.field]) if (document.activeElement !== input || !isLive) input.value = String(seq);
    this.slider.setAttribute("aria-valuetext", `event ${seq} of ${last}`);
    setText(this.of, `of ${last}`);
    setText(this.moment, isLive ? "" : clock(at));
    this.live.setAttribute("aria-pressed", String(isLive));
  }

  /** @param {number} seq */
  #go(seq) {
    const wanted = Math.max(1, Math.min(Math.trunc(seq) || 1, this.last));
    announce(`event ${wanted} of ${this.last}`);
    this.onMove(wanted);
  }
}
