// Puts the page together: the key, the stream of figures with its reconnection, tiles and charts.

import { ApiError, call, events, key } from "./api.js";
import { Charts } from "./charts.js";
import { startChat } from "./chat.js";
import { offerPrompts } from "./prompts.js";
import { accept } from "./signals.js";
import { offerSimulated, showSimulated } from "./simulated.js";
import { VersionTable } from "./versions.js";

const MOST_POINTS = 1200;
const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 15000;
const SILENCE_MS = 20000; // the server says something every second
const LONG_CONTEXT = 1024;

const $ = (id) => document.getElementById(id);
const charts = new Charts();
const versions = new VersionTable();
let model = "";
let points = [];
const styles = new Set(); // every style that was ever reported
let wakeUp = () => {};

const show = (id, value, digits) => {
  $(id).textContent = value === null || value === undefined ? "–" : digits === undefined ? value : value.toFixed(digits);
};
const percent = (share, digits = 0) => (share === null || share === undefined ? null : `${(100 * share).toFixed(digits)} %`);

function showFigures(data) {
  if ("reward_mean" in data) {
    show("reward", data.reward_mean, 2);
    show("episodes", data.episodes_per_minute);
    $("reward-note").textContent = `last ${Math.min(data.feedback, 128)} of ${data.feedback} verdicts`;
    for (const style of Object.keys(data.style_share)) styles.add(style);
    // The preferred style, which may have a share of 0; where phases are not named after styles, the most frequent one.
    const style = styles.has(data.phase) ? data.phase : Object.keys(data.style_share)[0];
    show("style", style === undefined ? null : percent(data.style_share[style] ?? 0));
    if (style !== undefined) $("style-note").textContent = style === data.phase ? `${style}, preferred now` : style;
    const liked = data.style_reward[style];
    if (liked !== undefined) $("style-note").textContent += ` · reward ${liked.toFixed(2)}`;
  }
  if (["hello", "status", "version"].includes(data.kind)) show("version", data.version);
  if (data.pinned !== undefined) $("version-note").textContent = data.pinned ? "pinned" : "served now";
  if (data.progress) showProgress(data.progress);
  if (data.simulated !== undefined) showSimulated(data.simulated);
  if (data.store) show("queue", data.store.ready);
  if (typeof data.learner === "string") show("learner", data.learner);
  const metrics = data.learner_metrics ?? (data.kind === "learner" ? data : null);
  if (metrics) {
    show("lag", metrics["lag/mean"], 2);
    show("gated", percent(metrics["gate/share"], 1));
    $("learner-note").textContent = metrics.step === undefined ? "" : `step ${metrics.step}`;
  }
}

/** How far it is to the next version: the server's own words, and a bar of the same. */
function showProgress({ verdicts, of, said }) {
  if ($("progress").textContent !== said) $("progress").textContent = said;
  $("progress-bar").max = of;
  $("progress-bar").value = Math.min(verdicts ?? 0, of);
}

function addPoint(point) {
  points.push(point);
  if (points.length > MOST_POINTS) points = points.filter((_, i) => i % 2 === 0);
  charts.draw(points);
}

const HANDLERS = {
  hello(data) {
    model = data.model;
    $("model").textContent = data.model;
    points = data.samples;
    for (const point of points) for (const style of Object.keys(point.styles)) styles.add(style);
    charts.draw(points);
    accept(data.page.signals);
    offerPrompts(data.page.prompts, chat.submit);
    offerSimulated(data.page);
    versions.admin = data.page.admin;
    versions.changed();
  },
  version: () => versions.changed(),
  feedback: () => versions.changed(),
  status(data) {
    addPoint(data.sample);
  },
};

async function follow() {
  const stop = new AbortController();
  let timer = 0;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => stop.abort(), SILENCE_MS);
  };
  alive();
  try {
    const response = await call("/v1/events", { signal: stop.signal });
    for await (const { kind, data } of events(response)) {
      alive();
      const parsed = JSON.parse(data);
      HANDLERS[kind]?.(parsed);
      showFigures({ ...parsed, kind });
      if (kind === "hello") state("live", "good");
    }
  } finally {
    clearTimeout(timer);
    stop.abort();
  }
}

function state(text, tone) {
  if ($("state").textContent === text) return;
  $("state").textContent = text;
  $("state").className = `pill ${tone}`;
}

async function stayConnected() {
  let wait = FIRST_RETRY_MS;
  for (;;) {
    const began = Date.now();
    try {
      await follow();
      state("reconnecting", "bad");
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        askForKey(key.get() ? "The server does not know this key." : "");
        await new Promise((resolve) => (wakeUp = resolve));
        continue;
      }
      state("reconnecting", "bad");
    }
    if (Date.now() - began > 2 * SILENCE_MS) wait = FIRST_RETRY_MS;
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(2 * wait, LONGEST_RETRY_MS);
  }
}

function askForKey(why) {
  state("key needed", "bad");
  $("key-form").hidden = false;
  $("key-error").textContent = why;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  $("message").focus();
  chooseMode();
  wakeUp();
});

/** A model with a short context, as the tiny ones, is asked one message at a time unless somebody wants otherwise. */
async function chooseMode() {
  try {
    const { data } = await (await call("/v1/models")).json();
    chat.suggestAlone(data[0].max_model_len < LONG_CONTEXT);
  } catch {
    // The stream of figures says what is wrong.
  }
}

const chat = startChat({ modelName: () => model, onUnauthorized: () => askForKey("The server does not know this key.") });
charts.load().catch((error) => {
  $("charts-error").textContent = error.message;
  $("charts").hidden = true;
});
chooseMode();
stayConnected();
