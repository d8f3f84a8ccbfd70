"""The chat templates that model families publish, as data files of the `trl` distribution."""

from __future__ import annotations

import importlib.util
from pathlib import Path

BASE_TEMPLATES = 41


def template_folder() -> Path:
    """Where the templates lie; trl itself is not imported, which would take seconds."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "trl is missing: run `make install` (its templates are a test dependency)"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


def published(name: str) -> str:
    """The text of one template."""
    return (template_folder() / f"{name}.jinja").read_text(encoding="utf-8")
