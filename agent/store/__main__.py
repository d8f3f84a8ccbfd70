"""`python -m agent.store --path runs/x/episodes.sqlite tasks=400 batch=16`: run the episode store."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sqlite3
import sys
import textwrap
from pathlib import Path
from typing import Any

import pydantic
import yaml
from aiohttp import web

from agent import STARTED_BY
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger
from agent.store.protocol import StoreFault
from agent.store.server import StoreServer
from agent.validation import wrong_keys


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT (or the parent's end, if asked); 0, or 2 with a message on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m agent.store",
        description="The episode store: one SQLite file behind HTTP. It prints its address once it answers.",
        epilog=f"{textwrap.fill('keys (see agent/store/config.py): ' + ', '.join(StoreConfig.model_fields), 78)}\n\n"
        "example: python -m agent.store --path runs/x/episodes.sqlite --port 8700 tasks=400 batch=16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--path", required=True, type=Path, help="the SQLite file; made if it is not there")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--port-file", type=Path, help="the port is written there once the store answers")
    parser.add_argument("--config", type=Path, help="YAML file with the keys of StoreConfig")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the starting process ends")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of StoreConfig, as YAML values")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s store %(levelname)s %(message)s")
    try:
        ledger = Ledger(arguments.path, _configuration(arguments.config, arguments.overrides))
    except pydantic.ValidationError as error:
        print(f"episode store: {wrong_keys(error)}; see --help for the keys", file=sys.stderr)
        return 2
    except (StoreFault, OSError, yaml.YAMLError) as error:
        print(f"episode store: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(_serve(ledger, arguments))
    except (OSError, sqlite3.Error) as error:
        print(f"episode store: {error}", file=sys.stderr)
        return 2
    return 0


def _configuration(file: Path | None, overrides: list[str]) -> StoreConfig | None:
    """The configuration asked for, or None: then the one saved in the store's file counts."""
    values: dict[str, Any] = {}
    if file is not None:
        loaded = yaml.safe_load(file.read_text()) or {}
        if not isinstance(loaded, dict):
            raise StoreFault(f"{file}: expected keys and values")
        values.update(loaded)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise StoreFault(f"{override}: expected key=value")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise StoreFault(f"{key}: {value!r} is no YAML value") from error
    return StoreConfig(**values) if values else None


async def _serve(ledger: Ledger, arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = StoreServer(ledger)
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=10.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, arguments.host, arguments.port)
        await site.start()
        port = runner.addresses[0][1]
        if arguments.port_file is not None:
            _write_atomically(arguments.port_file, f"{port}\n")
        logging.info("episode store %s at http://%s:%d", arguments.path, arguments.host, port)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.5 if arguments.exit_with_parent else None)
            if arguments.exit_with_parent and os.getppid() != STARTED_BY:
                break
        server.stop()
    finally:
        await runner.cleanup()
        if arguments.port_file is not None:
            arguments.port_file.unlink(missing_ok=True)


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
