/** Sign-in: the token goes to the server once and comes back as a cookie that no script can read. */

import { ApiError, send } from "./api.js";
import { part, setText } from "./dom.js";
import { View } from "./view.js";

export class SignInView extends View {
  /** @param {HTMLElement} root @param {() => void} done */
  constructor(root, done) {
    super(root);
    root.append(/** @type {HTMLTemplateElement} */ (part("sign-in")).content.cloneNode(true));
    const token = /** @type {HTMLInputElement} */ (part("token"));
    const [form, refusal, button] = ["form", ".refusal", "button"].map((one) => root.querySelector(one));
    form?.addEventListener("submit", async (event) => {
      event.preventDefault();
      button?.toggleAttribute("disabled", true);
      try {
        await send("POST", "/ui/sign-in", { token: token.value });
        done();
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        if (refusal) setText(refusal, error.status === 401 ? "The server does not know this token." : error.message);
        token.select();
      } finally {
        button?.toggleAttribute("disabled", false);
      }
    });
    token.focus();
  }
}
