/** Sign-in: the token goes to the server once and comes back as a cookie that no script can read. */

import { ApiError, send } from "./api.js";
import { h, replace } from "./dom.js";
import { View } from "./view.js";

export class SignInView extends View {
  /** @param {HTMLElement} root @param {() => void} done */
  constructor(root, done) {
    super(root);
    this.done = done;
    this.token = h("input", {
      id: "token",
      type: "password",
      autocomplete: "current-password",
      required: true,
      spellcheck: "false",
    });
    this.refusal = h("p", { class: "refusal", role: "alert" });
    this.button = h("button", { class: "primary" }, "Sign in");
    const form = h(
      "form",
      { class: "sign-in" },
      h("h1", null, "Sign in"),
      h("label", { for: "token" }, "Admin token, or a run's"),
      this.token,
      h("p", { class: "muted" }, "One of the server's ", h("code", null, "TURNLOG_ADMIN_TOKEN"), ", or the token of a run: it shows that run alone."),
      this.refusal,
      this.button,
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    replace(root, form);
    this.token.focus();
  }

  async #submit() {
    this.button.disabled = true;
    try {
      await send("POST", "/ui/sign-in", { token: this.token.value });
      this.done();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.refusal.textContent = error.status === 401 ? "The server does not know this token." : error.message;
      this.token.select();
    } finally {
      this.button.disabled = false;
    }
  }
}
