// The row under an answer in which it is judged.

import { call } from "./api.js";
import { button } from "./messages.js";

/**
 * The row for `answer` ({id, version, alone, verdict}); `judged(given, body)` is called when the server has it on its disk.
 * A verdict that was given before is shown as it is.
 */
export function feedbackRow(answer, { judged, failed }) {
  const bar = document.createElement("div");
  bar.className = "feedback";
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", "How good was this answer?");
  const good = button("Good", () => judge(1, good));
  const bad = button("Bad", () => judge(0, bad));
  const score = document.createElement("input");
  Object.assign(score, { type: "range", min: "0", max: "1", step: "0.1", value: "0.5" });
  score.setAttribute("aria-label", "Score from 0 to 1");
  const give = button("Give 0.5", () => judge(Number(score.value), give));
  score.addEventListener("input", () => (give.textContent = `Give ${Number(score.value).toFixed(1)}`));
  const controls = [good, bad, score, give];
  const note = document.createElement("span");
  note.className = "note";
  note.setAttribute("role", "status");
  bar.append(...controls, note);

  const shown = () => {
    const verdict = answer.verdict;
    note.textContent = `version ${answer.version}` + (verdict ? ` · reward ${verdict.reward} · ${verdict.fate}` : "");
    if (!verdict) return;
    for (const control of controls) control.disabled = true;
    const chosen = verdict.how === "give" ? give : verdict.reward === 1 ? good : bad;
    if (chosen === give) give.textContent = `Give ${verdict.reward.toFixed(1)}`;
    chosen.classList.add("chosen");
  };

  async function judge(reward, chosen) {
    for (const control of controls) control.disabled = true;
    try {
      const body = { response_id: answer.id, reward };
      const given = await (await call("/v1/feedback", { body })).json();
      answer.verdict = { reward, fate: fate(given, answer.alone), how: chosen === give ? "give" : "thumb" };
      shown();
      judged(given, body);
    } catch (error) {
      for (const control of controls) control.disabled = false;
      failed(error);
    }
  }

  shown();
  return bar;
}

function fate(given, alone) {
  if (!given.trainable) return "not learned from";
  if (!given.final) return alone ? "kept" : "counts when the conversation ends";
  return given.in_store ? "in the queue" : "on its way to the queue";
}
