// The conversation: sending, streaming, a second answer, a second wording. All text enters the page as text.

import { call, events, messageOf } from "./api.js";
import { feedbackRow } from "./feedback.js";
import { forget, keep, kept } from "./kept.js";
import { Message, button, copy, split } from "./messages.js";
import { signal } from "./signals.js";

const $ = (id) => document.getElementById(id);

/** Random even where crypto.randomUUID is not: on a phone that reads the page over plain HTTP. */
const newSession = () => "page-" + [...crypto.getRandomValues(new Uint8Array(12))].map((b) => b.toString(16).padStart(2, "0")).join("");

export function startChat({ modelName, onUnauthorized }) {
  let items = []; // what is on the screen: {role, text, ...}, and its `message`
  let history = []; // what the model is told was said
  let session = newSession();
  let unclosed = {}; // by conversation, the last feedback that has not closed it yet; second answers have their own
  let modeChosen = false; // whether somebody has said if messages stand alone
  let running = null; // AbortController of the answer that is coming in

  const fail = (error) => {
    if (error.status === 401) onUnauthorized();
    $("error").textContent = error.message;
  };
  const save = () => {
    const draft = $("message").value;
    if (!items.length && !draft) return forget();
    keep({ items: items.map(({ message, ...item }) => item), history, session, unclosed, draft, alone: modeChosen ? $("alone").checked : null });
  };
  const draft = (text) => {
    $("message").value = text;
    save();
  };

  function add(item) {
    item.message = new Message(item.role);
    items.push(item);
    if (item.role === "user") item.message.plain(item.text);
    return item;
  }

  async function send(text) {
    if ($("alone").checked) restart();
    const user = add({ role: "user", text });
    save();
    const ending = await answer([...history, { role: "user", content: text }]);
    if (ending === "failed") {
      user.failed = true;
      user.message.item.classList.add("cut");
      if (!$("message").value) $("message").value = text; // nobody should have to write it again
    }
    tidy();
    save();
  }

  /** One answer to `asked`, shown as it comes in: "whole", "stopped" or "failed". */
  async function answer(asked) {
    $("error").textContent = "";
    const item = add({ role: "model", text: "", reasoning: "", alone: $("alone").checked, trainable: true });
    running = new AbortController();
    tidy();
    $("send").textContent = "Stop";
    item.message.busy = true;
    try {
      await stream(asked, item);
      history = [...asked, { role: "assistant", content: item.text }];
      $("said").textContent = item.message.whole(item.text, item.reasoning);
      item.message.item.append(rowOf(item));
      return "whole";
    } catch (error) {
      item.cut = true;
      item.stopped = error.name === "AbortError";
      if (!item.stopped) fail(error);
      if (item.text || item.reasoning) ended(item);
      else drop(item);
      return item.stopped ? "stopped" : "failed";
    } finally {
      item.message.busy = false;
      running = null;
      $("send").textContent = "Send";
      $("log").scrollTop = $("log").scrollHeight;
    }
  }

  function drop(item) {
    item.message.remove();
    items = items.filter((other) => other !== item);
  }

  function ended(item) {
    item.message.growing(item.text + (item.stopped ? " (stopped)" : ""), item.reasoning);
    item.message.item.classList.add("cut");
  }

  async function stream(messages, item) {
    const request = { model: modelName(), messages, stream: true };
    if (!item.alone) request.session = session;
    const response = await call("/v1/chat/completions", { body: request, signal: running.signal });
    let done = false;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") {
        done = true;
        break;
      }
      const fault = messageOf(data);
      if (fault) throw new Error(fault);
      const chunk = JSON.parse(data);
      const delta = chunk.choices[0]?.delta ?? {};
      item.id = chunk.id;
      item.version = chunk.policy_version;
      item.trainable = chunk.trainable ?? item.trainable;
      item.reasoning += delta.reasoning_content ?? "";
      item.text += delta.content ?? "";
      item.message.growing(item.text, item.reasoning);
    }
    if (!done) throw new Error("the answer broke off: the server went away");
  }

  function rowOf(item) {
    return feedbackRow(item, {
      failed: fail,
      judged: (given, body) => {
        if (given.final) delete unclosed[given.conversation];
        else unclosed[given.conversation] = body;
        save();
        $("message").focus({ preventScroll: true });
      },
    });
  }

  /** Tools of each message: copy always, another answer and another wording at the end of the conversation only. */
  function tidy() {
    const whole = items.filter((item) => !item.cut && !item.failed);
    const lastModel = whole.at(-1)?.role === "model" && !running ? whole.at(-1) : null;
    const lastUser = items.findLast((item) => item.role === "user");
    for (const item of items) {
      if (item.role === "model" && item.id && !item.cut) {
        const copying = button("Copy", async () => {
          const done = await copy(split(item.text).content);
          copying.textContent = done ? "Copied" : "Select the text to copy it";
          signal("copy", item.id);
        });
        const again = item === lastModel ? [button("Another answer", () => regenerate(item))] : [];
        item.message.tools("tools", copying, ...again);
      }
      if (item.role === "user") {
        if (item === lastUser && !running) item.message.tools("tools", button("Edit", () => edit(item), "Edit this message"));
        else item.message.item.querySelector(".tools")?.remove();
      }
    }
  }

  /** A second answer to the same message, a sibling of the first one, which stays and may still be judged. */
  async function regenerate(item) {
    if (running) return;
    signal("regenerate", item.id);
    item.message.item.classList.add("earlier");
    item.earlier = true;
    await answer(history.slice(0, -1));
    tidy();
    save();
  }

  /** Back to before the message `item`, with its text in the field. */
  function edit(item) {
    if (running) return;
    const at = items.indexOf(item);
    signal("edit", items.slice(at).findLast((other) => other.id)?.id);
    // What was not answered is not in the history.
    if (!item.failed) history = history.slice(0, Math.max(0, history.findLastIndex((said) => said.role === "user")));
    for (const gone of items.splice(at)) gone.message.remove();
    tidy();
    draft(item.text);
    $("message").focus();
  }

  function restart() {
    // In a conversation of several turns the last verdict closes the episode; said again with `final` it does so now.
    for (const body of Object.values(unclosed)) call("/v1/feedback", { body: { ...body, final: true } }).catch(fail);
    unclosed = {};
    history = [];
    session = newSession();
  }

  function restore(state) {
    if (!state) return;
    for (const item of state.items) {
      add(item);
      if (item.failed) item.message.item.classList.add("cut");
      if (item.role !== "model") continue;
      if (item.cut) {
        ended(item);
      } else {
        if (item.earlier) item.message.item.classList.add("earlier");
        item.message.whole(item.text, item.reasoning);
        item.message.item.append(rowOf(item));
      }
    }
    ({ history, session, unclosed } = state);
    $("message").value = state.draft;
    if (state.alone !== null) setAlone(state.alone);
    const last = items.at(-1);
    if (last?.role === "user" && !last.failed) {
      // The page was left while the answer came in.
      last.failed = true;
      last.message.item.classList.add("cut");
      $("message").value ||= last.text;
    }
    tidy();
  }

  function setAlone(alone) {
    modeChosen = true;
    $("alone").checked = alone;
  }

  async function submit(text) {
    if (running || !text || !modelName()) return;
    // What could not be answered goes, now that it is said again.
    while (items.at(-1)?.failed || (items.at(-1)?.cut && !items.at(-1).stopped)) drop(items.at(-1));
    $("message").value = "";
    await send(text);
  }

  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return running.abort();
    submit($("message").value.trim());
  });
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) $("composer").requestSubmit();
  });
  $("message").addEventListener("input", save);
  $("alone").addEventListener("change", () => {
    modeChosen = true;
    save();
  });
  $("fresh").addEventListener("click", () => {
    running?.abort();
    restart();
    items = [];
    $("log").replaceChildren();
    $("error").textContent = "";
    draft("");
    $("message").focus();
  });

  restore(kept());
  return {
    submit,
    /** What is best for this model, unless somebody has said what they want. */
    suggestAlone: (alone) => modeChosen || ($("alone").checked = alone),
  };
}
