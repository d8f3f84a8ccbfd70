"""`python -m agent.store --path runs/x/episodes.sqlite tasks=400 batch=16`: run the episode store.

`python -m agent.store prune runs/x`: make room in its file (see `agent.store.pruning`).
`python -m agent.store replay runs/x --into runs/y`: learn from its episodes again (see `agent.store.replaying`).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sqlite3
import sys
import textwrap
import time
from pathlib import Path

import pydantic
import yaml

from agent import collector
from agent.configuration_errors import wrong_keys
from agent.descriptors import raise_limit
from agent.doors.door import DoorFault, check_host
from agent.doors.keys import given_key
from agent.store import pruning, replaying
from agent.store.config import StoreConfig, read_config
from agent.store.ending import LIMIT_S
from agent.store.ledger import Ledger
from agent.store.protocol import StoreFault, StoreInUse
from agent.store.server import serve

LEAVING_S = LIMIT_S + 10.0
"""How long a run's store waits for the one of the same run whose parent was killed: that notices it, and ends."""


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT (or the parent's end, if asked); 0, or 2 with a message on bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["prune"]:
        return pruning.main(argv[1:])
    if argv[:1] == ["replay"]:
        return replaying.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m agent.store",
        description="The episode store: one SQLite file behind HTTP. It prints its address once it answers.",
        epilog=f"{textwrap.fill('keys (see agent/store/config.py): ' + ', '.join(StoreConfig.model_fields), 78)}\n\n"
        "example: python -m agent.store --path runs/x/episodes.sqlite --port 8700 tasks=400 batch=16\n"
        "         SAO_KEY=... python -m agent.store --path runs/x/episodes.sqlite --host 0.0.0.0 --port 8700\n\n"
        "To make room in the file, also while this runs: python -m agent.store prune --help\n"
        "To offer a run's episodes to another one's learner: python -m agent.store replay --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--path", required=True, type=Path, help="the SQLite file; made if it is not there")
    parser.add_argument("--host", default="127.0.0.1", help="beyond this machine a shared key is needed")
    parser.add_argument("--key-file", type=Path, help="file with the shared key; default: what is in SAO_KEY")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--port-file", type=Path, help="the port is written there once the store answers")
    parser.add_argument("--config", type=Path, help="YAML file with the keys of StoreConfig")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the starting process ends")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of StoreConfig, as YAML values")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s store %(levelname)s %(message)s")
    raise_limit(0, "the store")
    try:
        key = given_key(arguments.key_file)
        check_host(arguments.host, key, "the episode store")
        config = read_config(arguments.config, arguments.overrides)
        ledger = _open(arguments.path, config, patience_s=LEAVING_S if arguments.exit_with_parent else 0.0)
    except pydantic.ValidationError as error:
        print(f"episode store: {wrong_keys(error)}; see --help for the keys", file=sys.stderr)
        return 2
    except (StoreFault, DoorFault, OSError, yaml.YAMLError) as error:
        print(f"episode store: {error}", file=sys.stderr)
        return 2
    collector.calm()
    try:
        asyncio.run(
            serve(
                ledger,
                arguments.host,
                arguments.port,
                port_file=arguments.port_file,
                exit_with_parent=arguments.exit_with_parent,
                key=key,
            )
        )
    except (OSError, sqlite3.Error) as error:
        print(f"episode store: {error}", file=sys.stderr)
        return 2
    return 0


def _open(path: Path, config: StoreConfig | None, patience_s: float) -> Ledger:
    """The ledger in `path`, for whose present owner to leave it waits `patience_s`."""
    until, said = time.monotonic() + patience_s, False
    while True:
        try:
            return Ledger(path, config)
        except StoreInUse as error:
            if time.monotonic() >= until:
                raise
            if not said:
                logging.info("waiting %g s for it to leave: %s", patience_s, error)
            said = True
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
