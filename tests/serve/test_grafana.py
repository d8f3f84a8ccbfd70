"""The dashboard file: each of its expressions asks for metrics and labels that the server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import generate_latest

import agent.serve
from agent.serve.api.metrics import Metrics

FILE = Path(agent.serve.__file__).parent / "grafana.json"


def exposed() -> tuple[set[str], set[str]]:
    """The names of all samples of a server that has answered something, and of all labels."""
    metrics = Metrics()
    metrics.requests.labels("/", "200").inc()
    metrics.feedback.labels("final").inc()
    metrics.queue.labels("open").set(1)
    page = generate_latest(metrics.registry).decode()
    names = set(re.findall(r"^(sao_\w+)", page, re.MULTILINE))
    return names, set(re.findall(r'[{,](\w+)="', page)) | {"job"}


def expressions(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if isinstance(value, str) and key in ("expr", "query") and value != "prometheus":
                yield value
            yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


def test_a_panel_asks_for_a_metric_or_a_label_that_is_not_there() -> None:
    names, labels = exposed()
    asked = list(expressions(json.loads(FILE.read_text())))
    assert len(asked) > 15
    for expression in asked:
        used = set(re.findall(r"\bsao_\w+", expression))
        assert used, expression
        assert used <= names, expression
        by = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        by |= set(re.findall(r"[{,]\s*(\w+)=", expression))
        assert by <= labels, expression


def test_a_metric_has_no_panel() -> None:
    names, _ = exposed()
    shown = " ".join(expressions(json.loads(FILE.read_text())))
    families = {re.sub(r"_(created|bucket|sum|count|total)$", "", name) for name in names}
    assert [family for family in sorted(families) if family not in shown] == []


def test_panels_lie_on_each_other_or_share_a_number() -> None:
    board = json.loads(FILE.read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & mine, panel["title"]
        cells |= mine
