// One message on the screen: its text, its reasoning folded, and what can be done with it.

import { show } from "./markdown.js";

const $ = (id) => document.getElementById(id);

export function button(text, onClick, label) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  if (label) made.setAttribute("aria-label", label);
  if (onClick) made.addEventListener("click", onClick);
  return made;
}

/** The reasoning at the beginning of `text` (in <think>, perhaps not ended yet) and the rest. */
export function split(text) {
  const found = /^\s*<think>([\s\S]*?)(?:<\/think>\s*([\s\S]*))?$/.exec(text);
  return found ? { reasoning: found[1].trim(), content: found[2] ?? "" } : { reasoning: "", content: text };
}

export class Message {
  #details = null;

  constructor(role) {
    $("hint")?.remove();
    this.item = document.createElement("article");
    this.item.className = `message ${role}`;
    this.item.setAttribute("aria-label", role === "user" ? "You" : "Model");
    this.body = document.createElement("div");
    this.body.className = "text";
    this.item.append(this.body);
    $("log").append(this.item);
    $("log").scrollTop = $("log").scrollHeight;
  }

  /** While it comes in. `reasoning`: apart from the content, as some servers send it. */
  growing(text, reasoning = "") {
    const parts = split(text);
    this.#reason(reasoning || parts.reasoning);
    this.body.textContent = parts.content;
    $("log").scrollTop = $("log").scrollHeight;
  }

  /** When it is whole; what there is to read of it. */
  whole(text, reasoning = "") {
    const parts = split(text);
    this.#reason(reasoning || parts.reasoning);
    show(this.body, parts.content);
    return parts.content;
  }

  plain(text) {
    this.body.textContent = text;
  }

  set busy(busy) {
    if (busy) this.item.setAttribute("aria-busy", "true");
    else this.item.removeAttribute("aria-busy");
  }

  /** A row of tools under the text; a row of the same name that was there is replaced. */
  tools(name, ...controls) {
    this.item.querySelector(`.${name}`)?.remove();
    const row = document.createElement("div");
    row.className = name;
    row.append(...controls);
    this.item.append(row);
    return row;
  }

  remove() {
    this.item.remove();
  }

  #reason(text) {
    if (!text) return;
    if (!this.#details) {
      this.#details = document.createElement("details");
      const summary = document.createElement("summary");
      summary.textContent = "Reasoning";
      const inside = document.createElement("div");
      inside.className = "text";
      this.#details.append(summary, inside);
      this.item.prepend(this.#details);
    }
    this.#details.lastChild.textContent = text;
  }
}

/** Copy `text`; false where the browser allows it to pages over HTTPS only. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
