"""The built-in names as they are before the first cell: what a cell adds stays, what it replaced is put back.

To put them all back touches each built-in object, and a forked process then copies every page on which one lies. So
the dictionary is first asked whether it has been changed, where this Python can tell.
"""

from __future__ import annotations

import builtins
import ctypes
import sys
from collections.abc import Sequence
from typing import Any


class BuiltinNames:
    """A copy of the built-in names, taken when this is made: by the zygote, once for all interpreters."""

    def __init__(self) -> None:
        self._original = dict(vars(builtins))
        self._update = vars(builtins).update
        self._version = version_of(vars(builtins))
        self._seen = self._version[0] if self._version else None
        self._stop_tracing, self._stop_profiling = sys.settrace, sys.setprofile

    def restore(self) -> None:
        """Put them back. Looks up nothing that a cell could have replaced."""
        version = self._version
        if not version or version[0] != self._seen:
            self._update(self._original)
            self._seen = version[0] if version else None
        self._stop_tracing(None)
        self._stop_profiling(None)


def version_of(names: dict[str, Any]) -> Sequence[int]:
    """Return a view of a number that each change of `names` makes another one; empty where there is none.

    Python 3.11 has it behind the size of every dictionary (PEP 509). From 3.12 on the names are put back in any case:
    most built-in objects are immortal there, and nothing is written when they are touched.
    """
    place = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 12) or place != 24:
        return ()
    return memoryview(ctypes.c_uint64.from_address(id(names) + place)).cast("B").cast("Q")
