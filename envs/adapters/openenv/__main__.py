"""`python -m envs.adapters.openenv serve ID`: an environment of ours behind OpenEnv's protocol."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from envs.adapters.openenv.server import Sessions
from envs.commands import run_command
from envs.key_values import key_values
from envs.making import make_core

END_S = 20.0


def _add_serve(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve an environment until it is interrupted",
        description="Serve an environment over OpenEnv's protocol: its clients, GenericEnvClient for one, can play it. "
        "Whoever reaches the port may play, so it is bound to this machine unless --host says otherwise.",
        epilog="example: python -m envs.adapters.openenv serve sao/PythonTIR-v0 max_turns=8 --port 8811",
    )
    parser.add_argument("id", metavar="ID", help="as in a recipe's env.id: sao/PythonTIR-v0, package.module:Class, ...")
    parser.add_argument(
        "arguments", nargs="*", metavar="KEY=VALUE", help="its arguments, values as YAML, right behind ID"
    )
    parser.add_argument("--kwargs", metavar="FILE", type=Path, help="a YAML file with the environment's arguments")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one (default: %(default)s)")
    parser.add_argument("--port-file", type=Path, metavar="FILE", help="write the port here once it is bound")
    parser.add_argument("--max-sessions", type=int, default=64, help="environments at once (default: %(default)s)")
    parser.set_defaults(run=_serve)


def _serve(given: argparse.Namespace) -> int:
    try:
        kwargs = _kwargs(given)
        make_core(given.id, **kwargs)  # a wrong argument is said now, not to the first client
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        print(error, file=sys.stderr)
        return 2
    sessions = Sessions(lambda: make_core(given.id, **kwargs), given.id, given.max_sessions)
    try:
        asyncio.run(_until_interrupted(sessions.app(), given))
    except OSError as error:
        print(f"cannot serve at {given.host}:{given.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


async def _until_interrupted(app: web.Application, given: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    runner = web.AppRunner(app, shutdown_timeout=END_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, given.host, given.port)
        await site.start()
        port = runner.addresses[0][1]
        print(f"{given.id} at http://{given.host}:{port} (OpenEnv)", flush=True)
        if given.port_file is not None:
            scratch = given.port_file.with_suffix(".new")
            scratch.write_text(str(port))
            scratch.replace(given.port_file)
        await ended.wait()
    finally:
        await runner.cleanup()


def _kwargs(given: argparse.Namespace) -> dict[str, Any]:
    kwargs = yaml.safe_load(given.kwargs.read_text(encoding="utf-8")) if given.kwargs else {}
    if not isinstance(kwargs, dict):
        raise ValueError(f"{given.kwargs} must hold the environment's arguments by name")
    return kwargs | key_values(given.arguments, "KEY=VALUE")


def main(argv: Sequence[str] | None = None) -> int:
    """See `python -m envs.adapters.openenv --help`."""
    return run_command(
        argv,
        [_add_serve],
        package="envs.adapters.openenv",
        description="Environments of this project for clients of OpenEnv.",
        example="serve sao/PythonTIR-v0 --port 8811",
    )


if __name__ == "__main__":
    raise SystemExit(main())
