/** The form in which a person writes a session's note and tags. */

import { ApiError, send } from "./api.js";
import { announce, button, h, replace } from "./dom.js";
import { field } from "./form.js";

/** As the server has it. */
const MOST_CHARACTERS = 4000;

/** A tag between commas, or in quotation marks. */
const TAGS = /\s*"(?:[^"\\]|\\.)*"\s*(?=,|$)|[^,]+/g;

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
    this.path = `/sessions/${encodeURIComponent(id)}/annotations`;
    this.onSaved = onSaved;
    this.goBack = goBack;
    /** @type {Noted} what was there when the form was opened: only what differs is written */
    this.before = { note: null, tags: [] };
    /** The note as the form had it first: it writes line ends in its own way. */
    this.shown = "";
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
    this.shown = this.note.value;
    this.tags.value = noted.tags.map(quoted).join(", ");
    replace(this.refusal);
    this.element.hidden = false;
    this.note.focus();
  }

  #close() {
    this.element.hidden = true;
    this.goBack();
  }

  async #submit() {
    const tags = (this.tags.value.match(TAGS) ?? []).map(unquoted).filter(Boolean);
    const changes = Object.entries({
      ...(this.note.value !== this.shown && { note: this.note.value.trim() }),
      ...(JSON.stringify(tags) !== JSON.stringify(this.before.tags) && { tags }),
    });
    if (!changes.length) {
      this.#close();
      return;
    }
    this.save.disabled = true;
    try {
      for (const [name, value] of changes) await send("PUT", `${this.path}/${name}`, { value }, this.closed);
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

/** @param {string} tag @returns {string} in quotation marks if it would be read as another one */
function quoted(tag) {
  return /^\s|^"|,|\s$/.test(tag) ? JSON.stringify(tag) : tag;
}

/** @param {string} text @returns {string} */
function unquoted(text) {
  const tag = text.trim();
  if (!tag.startsWith('"')) return tag;
  try {
    return String(JSON.parse(tag));
  } catch {
    return tag;
  }
}
