// Calls of the server. The bearer key, where one is needed, is kept for this tab only.

const KEY = "sao-key";

// The link that the server prints has the key behind `#`, which no browser sends; it goes from the address at once.
const given = new URLSearchParams(location.hash.slice(1)).get("key");
if (given) {
  sessionStorage.setItem(KEY, given.trim());
  history.replaceState(null, "", location.pathname + location.search);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

/** One call; `body` is sent as JSON. Throws ApiError with the server's own words. */
export async function call(path, { method, body, signal } = {}) {
  const headers = {};
  if (key.get()) headers["Authorization"] = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: method ?? (body === undefined ? "GET" : "POST"),
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (!response.ok) {
    const text = await response.text();
    throw new ApiError(response.status, messageOf(text) ?? `${path} answered ${response.status}`);
  }
  return response;
}

/** The message in an error of OpenAI's shape, or null. */
export function messageOf(text) {
  try {
    return JSON.parse(text).error?.message ?? null;
  } catch {
    return null;
  }
}

/** The server-sent events of a response, as {kind, data} with data as text. (EventSource can send no key.) */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let kind = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) kind = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield { kind, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
