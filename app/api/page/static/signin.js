/** Sign-in: the token goes to the server once and comes back as a cookie that no script can read. */

import { ApiError, post } from "./api.js";
import { h, replace } from "./dom.js";

/**
 * @param {HTMLElement} root
 * @param {() => void} done
 * @returns {{close: () => void}}
 */
export function view(root, done) {
  const token = h("input", {
    id: "token",
    type: "password",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
  });
  const refusal = h("p", { class: "refusal", role: "alert" });
  const button = h("button", { class: "primary" }, "Sign in");
  const form = h(
    "form",
    { class: "sign-in" },
    h("h1", null, "Sign in"),
    h("label", { for: "token" }, "Admin token"),
    token,
    h("p", { class: "muted" }, "One of the server's ", h("code", null, "TURNLOG_ADMIN_TOKEN"), "."),
    refusal,
    button,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      await post("/ui/sign-in", { token: token.value });
      done();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      refusal.textContent = error.status === 401 ? "The server does not know this token." : error.message;
      token.select();
    } finally {
      button.disabled = false;
    }
  });
  replace(root, form);
  token.focus();
  return { close: () => {} };
}
