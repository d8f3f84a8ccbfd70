"""The process that does the grading: run as a script by `grader.Grader`, never imported by it.

One request a line on stdin, one reply a line on stdout:

    {"answer": ..., "gold": ..., "form": ...}                 {"score": 0.0 | 1.0}
    {"prepare": scorer, "item": ..., "path": [...]}           {"prepared": true} | {"failed": why}
    {"scorer": scorer, "item": ..., "answer": ...}            {"score": 0.0 ... 1.0, "raised": why, if it raised}

The parent holds the clock and kills the process group; nothing here depends on signals or on which thread the parent
calls from. It dies with its parent: at once by the kernel's parent-death signal, or at the end of stdin.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import types
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2 * 2**30


def _limit() -> None:
    """Lower the limits of this process before anything heavy is imported."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends, also if that was before this."""
    from sandboxes.inside.parent_death import signal_at_parents_end

    signal_at_parents_end()
    if os.getppid() != parent:
        os._exit(1)


def _prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Import a scorer from where the parent would import it."""
    from envs.python_tir.grading.scorers import prepare

    sys.path[:] = [*sys.path, *(entry for entry in request["path"] if entry not in sys.path)]
    try:
        prepare(request["prepare"], request["item"])
    except (Exception, MemoryError) as failure:  # another's code may raise anything
        return {"failed": f"{type(failure).__name__}: {failure}"}
    return {"prepared": True}


def _score(request: dict[str, Any]) -> dict[str, Any]:
    from envs.python_tir.grading.scorers import prepare

    try:
        return {"score": prepare(request["scorer"], request["item"])(request["answer"])}
    except (Exception, RecursionError, MemoryError) as failure:
        return {"score": 0.0, "raised": f"{type(failure).__name__}: {failure}"}


def main(parent: int) -> None:
    """Answer requests until stdin ends."""
    _limit()
    # Libraries print to stdout (ANTLR does); the protocol gets a descriptor of its own.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # The package `envs` imports Gymnasium and more: empty ones in its place let a worker that is replaced start fast.
    room = Path(__file__).resolve().parent
    packages = {
        **{"envs": room.parents[1], "envs.python_tir": room.parent, "envs.python_tir.grading": room},
        "sandboxes": room.parents[2] / "sandboxes",
    }
    for name, folder in packages.items():
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    _die_with(parent)
    from envs.python_tir.grading.equivalence import equivalent

    equivalent("\\frac{1}{2}+x", "x+0.5")  # builds the parser's tables before the clock runs
    replies.write(json.dumps({"ready": os.getpid()}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        if "prepare" in request:
            reply = _prepare(request)
        elif "scorer" in request:
            reply = _score(request)
        else:
            try:
                reply = {"score": float(equivalent(request["answer"], request["gold"], request["form"]))}
            except (Exception, RecursionError, MemoryError):
                # Any failure on an answer is that answer's: sympy raises nearly everything on hostile input.
                reply = {"score": 0.0}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
