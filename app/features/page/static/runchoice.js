/** The run that is chosen, at the top of every view. */

import { ApiError, get } from "./api.js";
import { h, replace } from "./dom.js";
import { listHref, parse } from "./route.js";

/** @import {RunPage} from "../ui_types.d.ts" */

const PAGE = 1000;
/** Lists that a change of the run leaves in sight; from elsewhere it leads to the run's first view. */
const LISTS = ["groups", "search", "exports", "checkpoints"];

/** @param {HTMLElement} root */
export function runChoice(root) {
  const select = h("select", { "aria-label": "Run" });
  /** @type {string[]} */
  let names = [];
  const fill = () => {
    const chosen = select.dataset.run ?? "";
    const all = [...new Set([...names, chosen])].filter(Boolean).sort();
    replace(select, h("option", { value: "" }, "all runs"), all.map((name) => h("option", { value: name }, name)));
    select.value = chosen;
  };
  const read = async () => {
    try {
      const page = /** @type {RunPage} */ (await get("/runs", { limit: PAGE }));
      names = page.runs.map(({ run }) => run);
      fill();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // the names that are known can still be chosen
    }
  };
  select.addEventListener("focus", read);
  select.addEventListener("change", () => {
    const route = parse(location.hash);
    const list = route && !route.id && LISTS.includes(route.name) ? route.name : "runs";
    location.hash = listHref(list, { run: select.value || null });
  });
  return {
    /** @param {string|null} run null: all @param {boolean} isOnly one that is shown */
    show: (run, isOnly) => {
      root.hidden = false;
      select.dataset.run = run ?? "";
      if (isOnly) replace(root, h("span", { class: "onlyrun" }, "Run ", h("strong", null, run)));
      else if (!root.contains(select)) {
        replace(root, h("label", null, "Run ", select));
        read();
      }
      fill();
    },
  };
}
