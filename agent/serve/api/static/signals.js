// What people do without saying it: copied, asked again, reworded. Told to a server that says it listens.

import { call } from "./api.js";

let heard = new Set();

/** The signals that the server takes, from its `hello`. */
export function accept(names) {
  heard = new Set(names ?? []);
}

/** Tell what was done with an answer. A server that refuses is not asked a second time. */
export function signal(name, responseId) {
  if (!heard.has(name) || !responseId) return;
  call("/v1/feedback", { body: { response_id: responseId, signal: name } }).catch((error) => {
    if (error.status >= 400 && error.status < 500 && ![404, 409, 410, 429].includes(error.status)) heard.delete(name);
  });
}
