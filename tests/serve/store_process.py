"""An episode store of its own, as a process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path


@contextlib.asynccontextmanager
async def store_process(path: Path, *keys: str, port: str = "0") -> AsyncIterator[str]:
    """`python -m agent.store` on `path`; gives its URL."""
    port_file = path.with_suffix(".port")
    port_file.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent.store", "--path", str(path), "--port-file", str(port_file)),
        *("--port", port, *keys),
    )
    try:
        async with asyncio.timeout(60):
            while not port_file.exists() or not port_file.read_text().strip():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{int(port_file.read_text())}"
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(30):
            await process.wait()
