"""The process that does the grading: run as a script by `grading.Grader`, never imported by it.

One request a line on stdin, `{"answer": ..., "gold": ...}`; one reply a line on stdout, `{"equal": true|false}`. The
parent holds the clock and kills the process group; nothing here depends on signals or on which thread the parent
calls from. It dies with its parent: at once by the kernel's parent-death signal, or at the end of stdin.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import types
from pathlib import Path

MEMORY_BYTES = 2 * 2**30
PR_SET_PDEATHSIG = 1


def _limit() -> None:
    """Lower the limits of this process before anything heavy is imported."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends, and close the race before that."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(parent: int) -> None:
    """Answer requests until stdin ends."""
    _limit()
    _die_with(parent)
    # Libraries print to stdout (ANTLR does); the protocol gets a descriptor of its own.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # The packages around these two modules import Gymnasium and more: a worker that is replaced must start fast.
    here = Path(__file__).resolve().parent
    for name, path in (("envs", here.parent), ("envs.python_tir", here)):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    from envs.python_tir.equivalence import equivalent

    equivalent("\\frac{1}{2}+x", "x+0.5")  # builds the parser's tables before the clock runs
    replies.write(json.dumps({"ready": os.getpid()}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            equal = equivalent(request["answer"], request["gold"])
        except (Exception, RecursionError, MemoryError):
            # Any failure on an answer is that answer's: sympy raises nearly everything on hostile input.
            equal = False
        replies.write(json.dumps({"equal": bool(equal)}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
