/** Markdown as elements: made node by node, its links inert, every text visible. What is not understood stays as it is. */

import { h } from "./dom.js";
import { pretty, textBlock, visible } from "./visible.js";

/** @import {Child} from "../ui_types.d.ts" */

/** Longer texts stay plain. */
const MOST_CHARACTERS = 100_000;

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|(?<![\w*])[*_]([^*_\n]+)[*_](?![\w*])|!?\[([^\]\n]*)\]\(([^)\s]+)[^)\n]*\)/g;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+-]*)/;
const BLOCK = /^(#{1,6})\s+(.*)|^\s*([-*+]|\d+[.)])\s+(.*)|^>\s?(.*)|^(\|.*\|)\s*$/;

/** @param {string} text of a line @returns {Child[]} */
function inline(text) {
  /** @type {Child[]} */
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, code, strong, em, label, address] = found;
    parts.push(visible(text.slice(end, found.index)));
    if (code !== undefined) parts.push(h("code", null, visible(code)));
    else if (strong !== undefined) parts.push(h("strong", null, inline(strong)));
    else if (em !== undefined) parts.push(h("em", null, inline(em)));
    else parts.push(visible(label ?? ""), h("code", { class: "note" }, " ‹", visible(address ?? ""), "›"));
    end = found.index + whole.length;
  }
  return [...parts, visible(text.slice(end))];
}

/** @param {string} text @returns {HTMLElement} */
export function markdown(text) {
  if (text.length > MOST_CHARACTERS) return textBlock(text);
  const whole = h("div", { class: "markdown", dir: "auto" });
  const lines = text.split(/\r?\n/);
  /** @type {string[]} */
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) whole.append(h("p", null, paragraph.map((line, at) => [at > 0 && h("br"), inline(line)])));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at] ?? "";
    const fence = FENCE.exec(line);
    const block = BLOCK.exec(line);
    if (fence) {
      flush();
      const [, mark = "", language = ""] = fence;
      let close = lines.findIndex((one, index) => index > at && one.trim().startsWith(mark));
      if (close < 0) close = lines.length;
      const code = lines.slice(at + 1, close).join("\n");
      whole.append(textBlock(language === "json" ? pretty(code) : code, "code"));
      at = close;
    } else if (block) {
      flush();
      const [, heading, title = "", bullet, item = "", quote, row] = block;
      if (heading) whole.append(h("p", { class: "heading" }, inline(title)));
      else if (bullet) whole.append(h("p", { class: "item" }, /\d/.test(bullet) ? `${bullet} ` : "• ", inline(item)));
      else if (row !== undefined) {
        const rows = [row];
        while (/^\|.*\|\s*$/.test(lines[at + 1] ?? "")) rows.push(lines[++at] ?? "");
        whole.append(h("pre", { class: "text code" }, visible(rows.join("\n"))));
      }
      else whole.append(h("blockquote", null, inline(quote ?? "")));
    } else if (line.trim() === "") flush();
    else paragraph.push(line);
  }
  flush();
  return whole;
}
