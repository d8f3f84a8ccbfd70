"""OpenHands' libraries, imported once a process, late and quietly.

The import takes 13-30 s of CPU, so nothing here happens before a scaffold needs it; the modules beside this one that
import `openhands` at their top (`tools`, `terminal`, `editor`) are reached through `load()` only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from types import ModuleType

# On import the SDK would otherwise take over the root logger, print a banner, and fetch a price list from the network.
_QUIET = {"LOG_AUTO_CONFIG": "false", "OPENHANDS_SUPPRESS_BANNER": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
_LOCK = threading.Lock()


class OpenHandsMissing(ImportError):
    """OpenHands' libraries are not installed here; the text says how to get them."""


def have_openhands() -> bool:
    """Whether OpenHands' libraries are installed here; does not import them."""
    # Not `openhands` alone: any folder of that name on the path is a package without files.
    try:
        return importlib.util.find_spec("openhands.tools") is not None
    except ModuleNotFoundError:
        return False


def load() -> ModuleType:
    """Import `envs.swe_bench.scaffolds.openhands.tools`; blocks for the first caller, and for those who come meanwhile.

    Raises `OpenHandsMissing`.
    """
    with _LOCK, _quiet():
        try:
            return importlib.import_module("envs.swe_bench.scaffolds.openhands.tools")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "openhands":
                raise
            raise OpenHandsMissing(
                "the scaffold `openhands` needs OpenHands' libraries and Python 3.12 or newer: `make openhands`, or "
                "pip install 'sao-agents[openhands]' there. The scaffold `bash` needs neither."
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    added = {key: value for key, value in _QUIET.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
