"""How a benchmark reports: a table on the terminal, the same figures as JSON, and the machine they were taken on."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 128


def machine() -> dict[str, Any]:
    """What to know about a figure's origin: the command, CPUs, Python, and the load average at this moment."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    """Print one table; the first column is text, the others are figures. `notes` follow under it."""
    console = Console()
    if not console.is_terminal:  # a pipe or a file: do not squeeze the table into 80 columns
        console = Console(width=_WIDTH)
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, style="dim")
    console.print()


def save_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write `figures` with the machine's description to `path`; nothing if it is None."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine()} | figures, indent=1) + "\n", encoding="utf-8")
