// Answers as they are meant to look. The server parses; here nodes are made of its tree, one by one, and no HTML is read.

import { call } from "./api.js";

const LONGEST = 20000;
const MARKED = /[*_`#>|~[\]\\-]|^\s*\d+[.)]\s|\n\s*\n/m; // without any of these the text looks the same
const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong s a br hr table thead tbody tr th td".split(" "),
);

/** Show `text` in `body`: at once as it is, and formatted when the server has parsed it (if it cannot, it stays). */
export async function show(body, text) {
  body.textContent = text;
  if (text.length > LONGEST || !MARKED.test(text)) return;
  try {
    const { tree } = await (await call("/page/markdown", { body: { text } })).json();
    if (body.textContent !== text) return; // something else is shown by now
    body.replaceChildren(...tree.map(nodeOf));
    body.classList.add("formatted");
  } catch {
    // The words are there.
  }
}

function nodeOf(part) {
  if (typeof part === "string") return document.createTextNode(part);
  const made = document.createElement(TAGS.has(part.tag) ? part.tag : "span");
  if (part.tag === "a" && /^(https?:|mailto:)/i.test(part.href)) {
    Object.assign(made, { href: part.href, target: "_blank", rel: "noopener noreferrer" });
  }
  if (part.tag === "ol" && Number.isInteger(part.start)) made.start = part.start;
  if (part.tag === "pre") made.tabIndex = 0; // wide ones scroll, and a keyboard must be able to
  made.append(...part.in.map(nodeOf));
  return made;
}
