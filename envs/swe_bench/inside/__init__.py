"""Files that are sent into containers. Nothing here is imported by the host but `source`, which reads the others."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def source(name: str) -> str:
    """The text of the file of that name."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
