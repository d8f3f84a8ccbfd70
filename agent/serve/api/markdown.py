"""What an answer looks like: Markdown as a tree of a few elements and text, from which the page builds its own nodes.

No HTML is made anywhere, so none of an answer's can get into the page: tags in it are text, as everything is that is not
one of `TAGS`. Images are their description, because nothing may be loaded from outside; links stay links of the web.
"""

from __future__ import annotations

import re
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

LONGEST = 20_000
"""Characters; what is longer stays plain text."""

TAGS = frozenset(
    ("p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "s", "a")
    + ("br", "hr", "table", "thead", "tbody", "tr", "th", "td")
)
_LINK = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)
_parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])

Node = str | dict[str, Any]
"""Text, or an element: `tag`, its children `in`, and `href` (links) or `start` (numbered lists)."""


def tree_of(text: str) -> list[Node]:
    """The tree of `text`, top level first. It takes up to half a second for text that is made to be slow."""
    return _children(SyntaxTreeNode(_parser.parse(text)))


def _children(node: SyntaxTreeNode) -> list[Node]:
    found: list[Node] = []
    for child in node.children:
        found += _nodes(child)
    return found


def _nodes(node: SyntaxTreeNode) -> list[Node]:
    if node.type == "inline":
        return _children(node)
    if node.type in ("text", "text_special", "html_inline", "html_block"):
        return [node.content]
    if node.type in ("softbreak", "hardbreak"):
        return [_element("br")]
    if node.type == "code_inline":
        return [_element("code", node.content)]
    if node.type in ("fence", "code_block"):
        return [_element("pre", _element("code", node.content))]
    if node.type == "image":
        return [f"[{node.content}]"]
    if node.type == "paragraph" and node.hidden:  # in a tight list
        return _children(node)
    if node.tag not in TAGS:
        return _children(node)
    more: dict[str, Any] = {}
    if node.tag == "a":
        href = str(node.attrs.get("href", ""))
        if not _LINK.match(href):
            return _children(node)
        more["href"] = href
    if node.tag == "ol" and "start" in node.attrs:
        more["start"] = int(node.attrs["start"])
    return [_element(node.tag, *_children(node), **more)]


def _element(tag: str, *children: Node, **more: Any) -> Node:
    return {"tag": tag, "in": list(children), **more}
