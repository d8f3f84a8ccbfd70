"""What of an answer's Markdown reaches the page: a tree of harmless elements, whatever the answer says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.serve.api.markdown import TAGS, Node, tree_of


def elements(nodes: list[Node]) -> list[dict[str, Any]]:
    found = []
    for node in nodes:
        if isinstance(node, dict):
            found += [node, *elements(node["in"])]
    return found


def text_of(nodes: list[Node]) -> str:
    return "".join(node if isinstance(node, str) else text_of(node["in"]) for node in nodes)


def test_markdown_is_shown_as_stars_and_hashes() -> None:
    tree = tree_of(
        "# Rain\n\nIt is **wet**:\n\n3. one\n4. `two`\n\n```py\nx < 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    )
    tags = [node["tag"] for node in elements(tree)]
    assert tags[:4] == ["h1", "p", "strong", "ol"]
    assert {"code", "pre", "table", "th", "td"} <= set(tags)
    assert next(node for node in elements(tree) if node["tag"] == "ol")["start"] == 3
    assert "x < 1\n" in text_of(tree)


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "a <b onclick=x>c</b>",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](data:text/html,hi)",
        "![x](http://outside.example/a.png)",
        "[x]: javascript:alert(1)\n\n[x]",
        "<javascript:alert(1)>",
    ],
    ids=["image", "script", "handler", "link", "link-case", "data", "outside", "reference", "autolink"],
)
def test_an_answer_puts_a_script_or_a_request_into_the_page(text: str) -> None:
    for node in elements(tree_of(text)):
        assert node["tag"] in {"p"}, node
    if text.startswith("<"):
        assert text in text_of(tree_of(text)), "the words are still there"


@given(st.text(st.sampled_from("ab<>[]()!*_`#-|\n\\:&\"'=/ 1.~"), max_size=120))
def test_some_text_makes_an_element_that_nobody_has_allowed(text: str) -> None:
    for node in elements(tree_of(text)):
        assert node["tag"] in TAGS
        assert set(node) <= {"tag", "in", "href", "start"}
        if "href" in node:
            assert node["tag"] == "a"
            assert node["href"].lower().startswith(("http://", "https://", "mailto:"))
    json.dumps(tree_of(text))


def test_deep_nesting_ends_the_server_or_the_page() -> None:
    def depth(nodes: list[Node]) -> int:
        return 1 + max((depth(node["in"]) for node in nodes if isinstance(node, dict)), default=0)

    for text in ("> " * 5000 + "x", "- " * 2000 + "x", "*" * 9000 + "x" + "*" * 9000):
        assert depth(tree_of(text)) < 60
