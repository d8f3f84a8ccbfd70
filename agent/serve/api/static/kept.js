// What a reload must not lose: the conversation and the text that is being written. In this tab only, until "New conversation".

const NAME = "sao-chat";

/** What was kept, or null. */
export function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(NAME));
  } catch {
    return null;
  }
}

/** Keep `state`; a conversation that is too long for the browser is not kept. */
export function keep(state) {
  try {
    sessionStorage.setItem(NAME, JSON.stringify(state));
  } catch {
    sessionStorage.removeItem(NAME);
  }
}

export function forget() {
  sessionStorage.removeItem(NAME);
}
