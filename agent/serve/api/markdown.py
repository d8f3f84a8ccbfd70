"""What an answer looks like: Markdown as a tree of a few elements and text, from which the page builds its own nodes.

No HTML is made anywhere, so none of an answer's can get into the page: tags in it are text, as everything is that is
not one of `TAGS`. Images are their description, because nothing may be loaded from outside; links lead to the web only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

LONGEST = 20_000
"""Characters; what is longer stays plain text."""

_TEXT = ("p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "s")
TAGS = frozenset((*_TEXT, "a", "br", "hr", "table", "thead", "tbody", "tr", "th", "td"))
_DEEPEST = 30
"""Elements in each other; what is nested deeper stands in the last of them."""
_LINK = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)
_parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])

Node = str | dict[str, Any]
"""Text, or an element: `tag`, its children `in`, and `href` (links) or `start` (numbered lists)."""


def tree_of(text: str) -> list[Node]:
    """The tree of `text`, top level first. It takes up to half a second for text that is made to be slow."""
    root: list[Node] = []
    open_nodes = [root]  # one for every token that is open, though it may have made no element
    for token in _flat(_parser.parse(text)):
        if token.nesting < 0:
            open_nodes.pop()
            continue
        made = _node(token) if len(open_nodes) < _DEEPEST or not token.nesting else None
        inside = open_nodes[-1]
        if made is not None:
            inside.append(made)
        if token.nesting > 0:
            open_nodes.append(made["in"] if isinstance(made, dict) else inside)
    return root


def _flat(tokens: Iterable[Token]) -> Iterable[Token]:
    for token in tokens:
        if token.type == "inline":
            yield from token.children or ()
        else:
            yield token


def _node(token: Token) -> Node | None:
    """What a token puts into the page; None for one that only holds others."""
    match token.type:
        case "softbreak" | "hardbreak":
            return _element("br")
        case "code_inline":
            return _element("code", token.content)
        case "fence" | "code_block":
            return _element("pre", _element("code", token.content))
        case "image":
            return f"[{token.content}]"
        case "hr":
            return _element("hr")
    if not token.nesting:
        return token.content or None
    if token.tag not in TAGS or token.hidden:  # hidden: a paragraph in a tight list
        return None
    if token.tag == "a":
        href = str(token.attrs.get("href", ""))
        return _element("a", href=href) if _LINK.match(href) else None
    if token.tag == "ol" and "start" in token.attrs:
        return _element("ol", start=int(token.attrs["start"]))
    return _element(token.tag)


def _element(tag: str, *children: Node, **more: Any) -> dict[str, Any]:
    return {"tag": tag, "in": list(children), **more}
