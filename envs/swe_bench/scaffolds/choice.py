"""Which scaffold an agent gets: by name, or the best that can be had here."""

from __future__ import annotations

import logging
from typing import Literal

from envs.swe_bench.scaffolds.bash import BashScaffold
from envs.swe_bench.scaffolds.openhands.library import have_openhands
from envs.swe_bench.scaffolds.openhands.scaffold import OpenHandsScaffold
from envs.swe_bench.scaffolds.scaffold import Scaffold

log = logging.getLogger(__name__)

ScaffoldName = Literal["auto", "openhands", "bash"]


def make_scaffold(name: ScaffoldName) -> Scaffold:
    """The scaffold of that name; "auto" is OpenHands' where it can be imported (Python 3.12), else `bash`."""
    if name == "auto":
        name = "openhands" if have_openhands() else "bash"
        if name == "bash":
            _say_once()
    if name == "openhands":
        return OpenHandsScaffold()
    return BashScaffold()


_said = False


def _say_once() -> None:
    global _said
    if not _said:
        _said = True
        log.warning("OpenHands cannot be imported here (it needs Python 3.12): the agent gets `bash` and `submit` only")
