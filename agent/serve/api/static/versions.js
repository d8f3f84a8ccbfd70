// The versions with what people said of them, and for whoever may: pin, unpin, roll back.

import { call } from "./api.js";
import { button } from "./messages.js";

const SHOWN = 12;
const EVERY_MS = 3000;
const $ = (id) => document.getElementById(id);

export class VersionTable {
  #admin = false;
  #due = 0; // a timer
  #at = 0;

  /** Whether this caller may change versions, from the server's `hello`. */
  set admin(admin) {
    this.#admin = admin;
  }

  /** Something has happened that the table may show; it is asked for every few seconds at most. */
  changed() {
    if (this.#due) return;
    this.#due = setTimeout(() => {
      this.#due = 0;
      this.#at = Date.now();
      this.#act("/v1/versions");
    }, Math.max(0, this.#at + EVERY_MS - Date.now()));
  }

  async #act(path, body) {
    try {
      this.#draw(await (await call(path, { body })).json());
      if (body) this.changed(); // the scores are in the listing only
      $("versions-error").textContent = "";
    } catch (error) {
      if (error.status !== 401) $("versions-error").textContent = error.message;
    }
  }

  #draw({ versions, pinned }) {
    const pin = button(pinned ? "Unpin" : "Pin", () => this.#act(pinned ? "/v1/versions/unpin" : "/v1/versions/pin", {}));
    pin.title = pinned ? "Serve the newest version again, and every later one" : "Go on serving this version";
    $("versions-tools").replaceChildren(...(this.#admin ? [pin] : []));
    $("versions-rows").replaceChildren(...versions.slice(-SHOWN).reverse().map((version) => this.#row(version)));
  }

  #row(version) {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = version.version;
    const source = version.origin === null ? version.source : `${version.source} to ${version.origin}`;
    const score = version.score == null ? "–" : version.score.toFixed(2);
    row.append(head);
    for (const text of [score, version.verdicts ?? "–", source, version.status]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    if (version.status === "serving") row.className = "serving";
    const last = document.createElement("td");
    if (this.#admin && version.available && version.status !== "serving") {
      const sure = `Serve the weights of version ${version.version} again, and hold what is learned meanwhile?`;
      const roll = () => confirm(sure) && this.#act("/v1/versions/rollback", { version: version.version });
      last.append(button("Roll back", roll, `Roll back to version ${version.version}`));
    }
    row.append(last);
    return row;
  }
}
