"""A plain function as a program: what `runtime.harness.call` starts for one that is not `async`.

python -m agent.harness.call package.module:function      # with $SAO_TASK_FILE, as a harness has it
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from agent.harness.process import imported
from agent.harness.task import TASK_FILE, HarnessTask

_LIMIT_S = 60.0


def main(argv: list[str]) -> int:
    """Call the function with its task, and post what it returns."""
    if len(argv) != 1 or argv[0] in ("-h", "--help") or TASK_FILE not in os.environ:
        print(__doc__, file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    task = msgspec.json.decode(Path(os.environ[TASK_FILE]).read_bytes(), type=HarnessTask)
    found = imported(argv[0])(task)
    for kind, value in posts_of(found).items():
        _post(f"{task.session_url}/{kind}", {kind: value})
    return 0


def posts_of(returned: Any) -> dict[str, Any]:
    """What follows from what a function has returned: a number is its reward, a text its answer."""
    if isinstance(returned, str):
        return {"answer": returned}
    if isinstance(returned, int | float):
        return {"reward": float(returned)}
    return {}


def _post(url: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
        answer.read()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
