"""The blocks of a page that have a title, as the files that a reader would make of them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "your_own_environment.md"
_BLOCK = re.compile(r'^```\w+ title="(?P<name>[\w.]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks() -> dict[str, str]:
    """By name of file."""
    return {match["name"]: match["text"] for match in _BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}


def write_blocks(folder: Path) -> None:
    """Write them all into `folder`."""
    for name, text in blocks().items():
        (folder / name).write_text(text, encoding="utf-8")
