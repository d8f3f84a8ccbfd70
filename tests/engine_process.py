"""A real local engine in a process of its own, for the fixtures of several folders."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def local_engine_process(model: Path, folder: Path, *options: str) -> Iterator[str]:
    """The URL of an engine that serves `model`; its port and log lie in `folder`. It ends with this process."""
    command = [sys.executable, "-m", "agent.engines.local", "--model", str(model), "--exit-with-parent"]
    command += ["--port-file", str(folder / "port"), *options]
    with (folder / "log").open("wb") as log:
        engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not (folder / "port").exists():
            assert engine.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the engine did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{int((folder / 'port').read_text())}"
    finally:
        engine.terminate()
        engine.wait(20)
