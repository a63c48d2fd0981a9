/** The form in which a person writes a session's note and tags. */

import { ApiError, put } from "./api.js";
import { announce, button, h, replace } from "./dom.js";
import { field } from "./form.js";

/** As the server has it. */
const MOST_CHARACTERS = 4000;

/** @typedef {{note: string|null, tags: string[]}} Noted what is on a session */

export class NoteForm {
  /**
   * @param {AbortSignal} closed
   * @param {string} id of the session
   * @param {() => void} onSaved read the session anew
   * @param {() => void} goBack put the cursor where it was before the form was opened
   */
  constructor(closed, id, onSaved, goBack) {
    this.closed = closed;
    this.path = `/sessions/${encodeURIComponent(id)}/note`;
    this.onSaved = onSaved;
    this.goBack = goBack;
    /** @type {Noted} what was there when the form was opened: only what differs is written */
    this.before = { note: null, tags: [] };
    this.note = h("textarea", { name: "note", rows: "3", maxlength: String(MOST_CHARACTERS) });
    this.tags = h("input", { name: "tags", type: "text", spellcheck: "false", placeholder: "loop, look at" });
    this.refusal = h("p", { class: "refusal", role: "alert" });
    this.save = h("button", { class: "primary" }, "Save");
    this.element = h(
      "form",
      { class: "noteform", "aria-label": "Note and tags", hidden: true },
      field("Note", this.note),
      field("Tags, with commas between them", this.tags),
      this.refusal,
      h("p", null, this.save, " ", button("Cancel", () => this.#close())),
    );
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.element.requestSubmit();
      if (event.key === "Escape") this.#close();
    });
  }

  /** @param {Noted} noted */
  open(noted) {
    if (!this.element.hidden) {
      this.note.focus();
      return;
    }
    this.before = { note: noted.note, tags: noted.tags };
    this.note.value = noted.note ?? "";
    this.tags.value = noted.tags.join(", ");
    replace(this.refusal);
    this.element.hidden = false;
    this.note.focus();
  }

  #close() {
    this.element.hidden = true;
    this.goBack();
  }

  /** What differs from what was there; nothing if nothing does. */
  #changes() {
    const note = this.note.value.trim();
    const tags = this.tags.value.split(",").map((one) => one.trim()).filter(Boolean);
    return {
      ...(note !== (this.before.note ?? "") && { note }),
      ...(tags.join() !== this.before.tags.join() && { tags }),
    };
  }

  async #submit() {
    const changes = this.#changes();
    if (!Object.keys(changes).length) {
      this.#close();
      return;
    }
    this.save.disabled = true;
    try {
      await put(this.path, changes, this.closed);
    } catch (error) {
      if (this.closed.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      replace(this.refusal, error.message);
      return;
    } finally {
      this.save.disabled = false;
    }
    announce("Saved");
    this.#close();
    this.onSaved();
  }
}
