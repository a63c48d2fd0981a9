/** What was said up to a turn: roles, reasoning, tool calls and their results, as they are stored. */

import { curl, get } from "./api.js";
import { badge, bytes, count, failure, h, message, replace } from "./dom.js";
import { copyButton } from "./copy.js";
import { named, pretty, safeJson, textBlock } from "./visible.js";

/** Messages in the document at a time; the newest first, a button brings earlier ones. */
const SHOWN = 200;

/** Fields of a message that have a place of their own. */
const PLACED = new Set([
  "role",
  "content",
  "reasoning_content",
  "reasoning",
  "refusal",
  "tool_calls",
  "function_call",
  "tool_call_id",
  "name",
]);

/** @param {any} value @returns {string} a text as it is, anything else as JSON */
function textOf(value) {
  return typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
}

/** @param {string} url of an image or a file @returns {string} what it is, never the thing itself */
function describedUrl(url) {
  if (!url.startsWith("data:")) return url;
  const comma = url.indexOf(",");
  const head = comma < 0 ? url : url.slice(0, comma);
  const body = comma < 0 ? 0 : url.length - comma - 1;
  const size = head.endsWith(";base64") ? Math.floor((body * 3) / 4) : body;
  return `${head.slice("data:".length, 100) || "data"}, ${bytes(size)}`;
}

/** @param {any} part of a message's content @returns {HTMLElement} */
function contentPart(part) {
  if (part === null || typeof part !== "object") return textBlock(textOf(part));
  if (part.type === "text" && typeof part.text === "string") return textBlock(part.text);
  const url = typeof part.image_url === "string" ? part.image_url : part.image_url?.url;
  if (typeof url === "string") {
    return h(
      "p",
      { class: "placeholder" },
      h("span", { "aria-hidden": "true" }, "▧ "),
      "image: ",
      named(describedUrl(url)),
    );
  }
  const kind = named(part.type ?? "part");
  return h(
    "details",
    { class: "placeholder" },
    h("summary", null, kind, ` · ${bytes(JSON.stringify(part).length)}`),
    textBlock(textOf(part), "code"),
  );
}

/** @param {any} content @returns {HTMLElement[]} */
function contentOf(content) {
  if (content === null || content === undefined || content === "") return [];
  if (Array.isArray(content)) return content.map(contentPart);
  return [textBlock(textOf(content))];
}

/** @param {any} call a tool call as the API has it @returns {HTMLElement} */
function toolCall(call) {
  const what = call?.function ?? call ?? {};
  const given = what.arguments;
  return h(
    "div",
    { class: "toolcall" },
    h(
      "p",
      null,
      h("span", { class: "what" }, "calls "),
      h("code", null, named(what.name ?? "?")),
      h("span", { class: "note" }, " ", named(call?.id ?? "")),
    ),
    given !== undefined && textBlock(typeof given === "string" ? pretty(given) : textOf(given), "code"),
  );
}

/** @param {string} title @param {any} text @returns {HTMLElement} */
function folded(title, text) {
  const shown = textOf(text);
  return h(
    "details",
    { class: "reasoning" },
    h("summary", null, `${title} · ${count(shown.length)} characters`),
    textBlock(shown),
  );
}

/** @param {any} entry as the API gives it @returns {HTMLElement} */
function messageElement(entry) {
  if (entry.error !== undefined)
    return h(
      "li",
      { class: "said" },
      message("error", `message ${entry.index}, turn ${entry.turn}`, h("p", null, entry.error)),
    );
  const said = entry.message !== null && typeof entry.message === "object" ? entry.message : { content: entry.message };
  const role = String(said.role ?? "?");
  const others = Object.entries(said).filter(([name, value]) => !PLACED.has(name) && value !== null);
  return h(
    "li",
    {
      class: "said",
      dataset: {
        role: ["system", "developer", "user", "assistant", "tool", "function"].includes(role) ? role : "other",
      },
    },
    h(
      "p",
      { class: "who" },
      h("strong", null, named(role)),
      said.name != null && h("code", null, named(said.name)),
      said.tool_call_id != null && h("span", { class: "note" }, "answers ", named(said.tool_call_id)),
      entry.sampled ? badge("sampled", "good") : null,
      h("span", { class: "note" }, `message ${entry.index}`, entry.turn ? `, turn ${entry.turn}` : ""),
    ),
    [said.reasoning_content, said.reasoning]
      .filter((text) => text != null && text !== "")
      .slice(0, 1)
      .map((text) => folded("Reasoning", text)),
    contentOf(said.content),
    said.refusal != null && h("div", { class: "refuses" }, "refuses: ", textBlock(textOf(said.refusal))),
    Array.isArray(said.tool_calls) && said.tool_calls.map(toolCall),
    said.function_call != null && toolCall({ function: said.function_call }),
    others.length > 0 &&
      h(
        "details",
        { class: "others" },
        h("summary", null, named(others.map(([name]) => name).join(", "))),
        textBlock(textOf(Object.fromEntries(others)), "code"),
      ),
  );
}

/** The conversation of one session, up to a turn. */
export class Conversation {
  /**
   * @param {string} sessionId
   * @param {(turn: number|null) => void} onPick null: the newest live turn
   */
  constructor(sessionId, onPick) {
    this.path = `/ui/api/sessions/${encodeURIComponent(sessionId)}/conversation`;
    this.chatPath = `/sessions/${encodeURIComponent(sessionId)}/v1/chat/completions`;
    this.onPick = onPick;
    /** @type {Map<string, HTMLElement>} what is shown already; a message does not change */
    this.known = new Map();
    this.shown = SHOWN;
    this.asked = 0;
    this.list = h("ol", { class: "conversation" });
    this.notes = h("div", null);
    this.turnField = h("input", { type: "number", min: "1", "aria-label": "turn", class: "short" });
    this.turnField.addEventListener("change", () => this.onPick(Number(this.turnField.value) || null));
    this.leaf = h("button", { type: "button", onclick: () => this.onPick(null) }, "newest");
    this.copy = copyButton(() => this.#request(), "Copy request as curl");
    this.element = h(
      "section",
      { class: "panel", "aria-labelledby": "conversation-title" },
      h(
        "div",
        { class: "panelhead" },
        h("h2", { id: "conversation-title" }, "Conversation"),
        h("label", null, "up to turn ", this.turnField),
        this.leaf,
        h("span", { class: "switches" }, this.copy),
      ),
      this.notes,
      this.list,
    );
  }

  /**
   * @param {any} session as of the event that is shown
   * @param {number|null} turn whose conversation; null: of the newest live turn
   * @param {AbortSignal} signal
   */
  async update(session, turn, signal) {
    const asked = ++this.asked;
    let found;
    try {
      found = session.turns.length ? await get(this.path, { seq: session.seq, turn }, signal) : null;
    } catch (error) {
      if (signal.aborted) return;
      this.#clear(failure(error, () => this.update(session, turn, signal)));
      return;
    }
    if (signal.aborted || asked !== this.asked) return;
    if (!found || !found.messages.length) {
      this.#clear(message("empty", session.erased ? "The content is erased." : "No turn is committed yet."));
      return;
    }
    this.found = found;
    this.fact = session.turns.find((one) => one.turn === found.turn);
    this.turnField.max = String(session.turns.length);
    if (document.activeElement !== this.turnField) this.turnField.value = String(found.turn);
    this.leaf.setAttribute("aria-pressed", String(turn === null));
    this.copy.disabled =
      found.omitted > 0 ||
      !found.params ||
      this.fact?.protocol !== "chat" ||
      found.messages.some((one) => one.error !== undefined);
    this.#render();
  }

  #clear(note) {
    this.found = null;
    this.copy.disabled = true;
    this.known.clear();
    replace(this.notes, note);
    replace(this.list);
  }

  #render() {
    const { messages, omitted, tools, params, errors } = this.found;
    const begin = Math.max(0, messages.length - this.shown);
    const earlier = () => {
      this.shown += SHOWN;
      this.#render();
    };
    replace(
      this.notes,
      this.fact &&
        !this.fact.live &&
        message("note", `Turn ${this.found.turn} was discarded by event ${this.fact.discarded_by}.`),
      omitted > 0 &&
        message("note", `${count(omitted)} earlier messages are not shown here; GET /sessions/{id} has all.`),
      Object.entries(errors).map(([what, why]) => message("error", what, h("p", null, why))),
      params &&
        h(
          "details",
          { class: "offered" },
          h("summary", null, "Sampling parameters"),
          textBlock(JSON.stringify(params, null, 2), "code"),
        ),
      tools &&
        h(
          "details",
          { class: "offered" },
          h("summary", null, tools.length === 1 ? "1 tool" : `${count(tools.length)} tools`),
          textBlock(JSON.stringify(tools, null, 2), "code"),
        ),
      begin > 0 &&
        h(
          "p",
          null,
          h(
            "button",
            { type: "button", onclick: earlier },
            `show ${Math.min(SHOWN, begin)} earlier of ${count(begin)}`,
          ),
        ),
    );
    const known = new Map();
    const elements = messages.slice(begin).map((entry) => {
      const key = `${entry.index} ${entry.turn} ${entry.sampled}`;
      const element = this.known.get(key) ?? messageElement(entry);
      known.set(key, element);
      return element;
    });
    this.known = known;
    this.#place(elements);
  }

  /** Only what is new enters the document, so that what somebody reads or has unfolded stays. */
  #place(elements) {
    const wanted = new Set(elements);
    for (const child of [...this.list.children]) if (!wanted.has(child)) child.remove();
    elements.forEach((element, place) => {
      if (this.list.children[place] !== element) this.list.insertBefore(element, this.list.children[place] ?? null);
    });
  }

  /** @returns {string} the request whose reply the shown turn is */
  #request() {
    const messages = this.found.messages.map((entry) => entry.message);
    if (this.found.messages.at(-1)?.sampled) messages.pop();
    const tools = this.found.tools ? { tools: this.found.tools } : {};
    const body = safeJson({ ...this.found.params, messages, ...tools });
    const command = `${curl(this.chatPath)} -H 'content-type: application/json' --data-binary @-`;
    return `${command} <<'TURNLOG'\n${body}\nTURNLOG\n`;
  }
}
