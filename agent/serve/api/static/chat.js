// The conversation: sending, streaming, and what is said about each answer. All text enters the page as text.

import { call, events, messageOf } from "./api.js";

const $ = (id) => document.getElementById(id);

/** Random even where crypto.randomUUID is not: on a phone that reads the page over plain HTTP. */
const newSession = () => "page-" + [...crypto.getRandomValues(new Uint8Array(12))].map((b) => b.toString(16).padStart(2, "0")).join("");

export function startChat({ modelName, onUnauthorized }) {
  let history = [];
  let session = newSession();
  let lastJudged = null; // feedback that has not closed its conversation yet
  let running = null; // AbortController of the answer that is coming in

  const fail = (error) => {
    if (error.status === 401) onUnauthorized();
    $("error").textContent = error.message;
  };

  function bubble(role, text = "") {
    $("hint")?.remove();
    const item = document.createElement("article");
    item.className = `message ${role}`;
    item.setAttribute("aria-label", role === "user" ? "You" : "Model");
    const body = document.createElement("p");
    body.textContent = text;
    item.append(body);
    $("log").append(item);
    $("log").scrollTop = $("log").scrollHeight;
    return { item, body };
  }

  async function send(text) {
    const alone = $("alone").checked;
    if (alone) restart();
    $("error").textContent = "";
    bubble("user", text);
    const { item, body } = bubble("model");
    const asked = [...history, { role: "user", content: text }];
    running = new AbortController();
    $("send").textContent = "Stop";
    item.setAttribute("aria-busy", "true");
    try {
      const answer = await stream(asked, alone, body);
      history = [...asked, { role: "assistant", content: answer.text }];
      $("said").textContent = answer.text;
      addFeedback(item, answer, alone);
    } catch (error) {
      if (error.name === "AbortError") body.textContent += " (stopped)";
      else fail(error);
      if (!body.textContent) item.remove();
      item.classList.add("cut");
    } finally {
      item.removeAttribute("aria-busy");
      running = null;
      $("send").textContent = "Send";
      $("log").scrollTop = $("log").scrollHeight;
    }
  }

  async function stream(messages, alone, body) {
    const request = { model: modelName(), messages, stream: true };
    if (!alone) request.session = session;
    const response = await call("/v1/chat/completions", { body: request, signal: running.signal });
    const answer = { id: "", text: "", version: null, trainable: true, done: false };
    for await (const { data } of events(response)) {
      if (data === "[DONE]") {
        answer.done = true;
        break;
      }
      const fault = messageOf(data);
      if (fault) throw new Error(fault);
      const chunk = JSON.parse(data);
      answer.id = chunk.id;
      answer.version = chunk.policy_version;
      answer.trainable = chunk.trainable ?? answer.trainable;
      answer.text += chunk.choices[0]?.delta.content ?? "";
      body.textContent = answer.text;
      $("log").scrollTop = $("log").scrollHeight;
    }
    if (!answer.done) throw new Error("the answer broke off: the server went away");
    return answer;
  }

  function addFeedback(item, answer, alone) {
    const bar = document.createElement("div");
    bar.className = "feedback";
    bar.setAttribute("role", "group");
    bar.setAttribute("aria-label", "How good was this answer?");
    const good = button("Good");
    const bad = button("Bad");
    const score = document.createElement("input");
    Object.assign(score, { type: "range", min: "0", max: "1", step: "0.1", value: "0.5" });
    score.setAttribute("aria-label", "Score from 0 to 1");
    const give = button("Give 0.5");
    score.addEventListener("input", () => (give.textContent = `Give ${Number(score.value).toFixed(1)}`));
    const note = document.createElement("span");
    note.className = "note";
    note.setAttribute("role", "status");
    note.textContent = `version ${answer.version}`;
    bar.append(good, bad, score, give, note);
    item.append(bar);

    const judge = async (reward, chosen) => {
      for (const control of [good, bad, score, give]) control.disabled = true;
      try {
        const body = { response_id: answer.id, reward };
        const given = await (await call("/v1/feedback", { body })).json();
        lastJudged = given.final ? null : body;
        chosen.classList.add("chosen");
        note.textContent = `version ${answer.version} · reward ${reward} · ${fate(given, alone)}`;
        $("message").focus({ preventScroll: true });
      } catch (error) {
        for (const control of [good, bad, score, give]) control.disabled = false;
        fail(error);
      }
    };
    good.addEventListener("click", () => judge(1, good));
    bad.addEventListener("click", () => judge(0, bad));
    give.addEventListener("click", () => judge(Number(score.value), give));
  }

  function restart() {
    // In a conversation of several turns the last verdict closes the episode; said again with `final` it does so now.
    if (lastJudged) call("/v1/feedback", { body: { ...lastJudged, final: true } }).catch(fail);
    lastJudged = null;
    history = [];
    session = newSession();
  }

  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return running.abort();
    const text = $("message").value.trim();
    if (!text || !modelName()) return;
    $("message").value = "";
    send(text);
  });
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) $("composer").requestSubmit();
  });
  $("fresh").addEventListener("click", () => {
    running?.abort();
    restart();
    $("log").replaceChildren();
    $("error").textContent = "";
    $("message").focus();
  });
}

function button(text) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  return made;
}

function fate(given, alone) {
  if (!given.trainable) return "not learned from";
  if (!given.final) return alone ? "kept" : "counts when the conversation ends";
  return given.in_store ? "in the queue" : "on its way to the queue";
}
