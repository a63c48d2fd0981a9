/** A request as the page makes it, or as an engine was sent it, for a shell and for Python. */

import { needsAuthorization, url } from "./api.js";
import { queryOf } from "./route.js";
import { replaceOdd } from "./visible.js";

/** @import {Parameters} from "./route.js" */

/**
 * A request: with a body it is a POST of JSON, unless it names another method. `engine` is the base URL of an engine
 * that is asked in place of this server, whose token it must not see.
 * @typedef {{path: string, parameters?: Parameters, body?: unknown, method?: "PUT", engine?: string}} Command
 */

/** @param {Command} command @returns {string} for a POSIX shell; a body is a here-document */
export function curl({ path, parameters, body, method, engine }) {
  const parts = [method ? `curl -sS -X ${method}` : "curl -sS"];
  if (!engine && needsAuthorization()) parts.push('-H "Authorization: Bearer $TURNLOG_ADMIN_TOKEN"');
  parts.push(quoted(engine ? engine + path : url(path, parameters)));
  if (body === undefined) return parts.join(" ");
  parts.push("-H 'content-type: application/json' --data-binary @-");
  return `${parts.join(" ")} <<'TURNLOG'\n${escaped(JSON.stringify(body), 4)}\nTURNLOG\n`;
}

/** @param {Command} command @returns {string} for Python with httpx, which the client needs anyway */
export function python({ path, parameters, body, method, engine }) {
  const query = Object.fromEntries(new URLSearchParams(queryOf(parameters)));
  const given = [literal(engine ? engine + path : url(path), 1)];
  const isAuthorized = !engine && needsAuthorization();
  if (Object.keys(query).length) given.push(`params=${literal(query, 1)}`);
  if (isAuthorized) {
    given.push(`headers={"Authorization": "Bearer " + os.environ["TURNLOG_ADMIN_TOKEN"]}`);
  }
  if (body !== undefined) given.push(`json=${literal(body, 1)}`);
  given.push("timeout=600");
  return [
    isAuthorized && "import os\n",
    "import httpx\n",
    `response = httpx.${method?.toLowerCase() ?? (body === undefined ? "get" : "post")}(\n    ${given.join(",\n    ")},\n)`,
    "response.raise_for_status()",
    "print(response.text)\n",
  ]
    .filter(Boolean)
    .join("\n");
}

/** @param {unknown} value JSON @param {number} depth @returns {string} the same in Python */
function literal(value, depth) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return escaped(JSON.stringify(value), 8);
  if (typeof value !== "object") return String(value);
  const items = Array.isArray(value)
    ? value.map((one) => literal(one, depth + 1))
    : Object.entries(value).map(([name, one]) => `${literal(name, 0)}: ${literal(one, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  if (!items.length) return open + close;
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length <= 80 && !line.includes("\n")) return line;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${indent}${items.join(`,\n${indent}`)},\n${"    ".repeat(depth)}${close}`;
}

/**
 * @param {string} json
 * @param {4|8} digits 4: JSON's escapes, with two for a large code point; 8: Python's
 * @returns {string} with every character escaped that would not be seen
 */
function escaped(json, digits) {
  return replaceOdd(json, (character) => {
    if (digits === 8) return `\\U${(character.codePointAt(0) ?? 0).toString(16).padStart(8, "0")}`;
    const units = Array.from({ length: character.length }, (_, at) => character.charCodeAt(at));
    return units.map((unit) => `\\u${unit.toString(16).padStart(4, "0")}`).join("");
  });
}

/** @param {string} text @returns {string} for a POSIX shell, whatever is in it */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
