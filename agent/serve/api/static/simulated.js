// A button that lets simulated users click, where the server has some and the caller may.

import { call } from "./api.js";

const $ = (id) => document.getElementById(id);
let running = false;

/** From `hello`: whether there is such a button. */
export function offerSimulated({ admin, simulated_users: there }) {
  $("simulated").hidden = !(admin && there);
}

/** From each `status`: {running, detail}, or null. */
export function showSimulated(state) {
  if (!state) return;
  running = state.running;
  $("simulate").textContent = running ? "Stop the simulated users" : "Let simulated users click";
  $("simulated-note").textContent = running ? "they ask, and say Good to the style of the recipe" : state.detail;
}

$("simulate").addEventListener("click", async () => {
  $("simulate").disabled = true;
  try {
    showSimulated(await (await call("/page/simulated_users", { body: { running: !running } })).json());
  } catch (error) {
    $("simulated-note").textContent = error.message;
  } finally {
    $("simulate").disabled = false;
  }
});
