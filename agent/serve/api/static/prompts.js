// Prompts that the model has seen the like of, to be asked with one press.

import { button } from "./messages.js";

const SHOWN = 3;
const $ = (id) => document.getElementById(id);

/** Offer some of `prompts`; `ask` is called with the one that is pressed. */
export function offerPrompts(prompts, ask) {
  $("prompts").hidden = !prompts.length;
  const left = [...prompts];
  const chosen = [];
  while (chosen.length < SHOWN && left.length) chosen.push(...left.splice(Math.floor(Math.random() * left.length), 1));
  const focused = [...$("prompts").children].indexOf(document.activeElement);
  $("prompts").replaceChildren(
    ...chosen.map((prompt) =>
      button(prompt, () => {
        ask(prompt);
        offerPrompts(prompts, ask);
      }),
    ),
  );
  $("prompts").children[focused]?.focus({ preventScroll: true });
}
