"""The runtime as a process: command line, signals, exit status.

python -m agent.runtime --config runtime.yaml
python -m agent.runtime < runtime.json        # the configuration on standard input
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from agent import STARTED_BY
from agent.backoff import Unreachable
from agent.descriptors import TooFewDescriptors, raise_limit
from agent.engines.base import Engine
from agent.runtime.settings import EXAMPLE, ConfigError, RuntimeConfig, load_config, parse_config

log = logging.getLogger("agent.runtime")


async def _parent_gone(pid: int) -> None:
    """Return when the process that started this one is gone."""
    while os.getppid() == pid:  # noqa: ASYNC110 - nothing tells of a parent's death; one has to ask
        await asyncio.sleep(1.0)


async def run(config: RuntimeConfig, *, exit_with_parent: bool) -> int:
    """Run episodes until a signal, the parent's end (if asked) or an error; returns the exit status."""
    # The tokenizer's own threads would take time from the one that runs all episodes. It looks when it is loaded.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Imported here: `--help` and a configuration error need none of it.
    from agent.chat.template import ChatTemplateError
    from agent.engines.client import HttpEngine
    from agent.runtime.runtime import NothingWorks, Runtime
    from agent.store.client import StoreClient
    from envs import make_core

    try:
        raise_limit(2 * config.concurrency, f"concurrency={config.concurrency}")
    except TooFewDescriptors as error:
        print(f"agent.runtime: {error}", file=sys.stderr)
        return 2
    try:
        renderer = await asyncio.to_thread(config.chat.load, Path(config.model))
    except ChatTemplateError as error:
        print(f"agent.runtime: `model`: {error}", file=sys.stderr)
        return 2
    store = StoreClient(config.store, kind=None if config.tickets == "all" else config.tickets)
    engines: dict[str, Engine] = {url: HttpEngine(url, keepalive_s=config.engine_keepalive_s) for url in config.engines}
    runtime = Runtime(
        config,
        store=store,
        engines=engines,
        renderer=renderer,
        make_env=lambda env: make_core(env.id, **env.kwargs),
    )
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(runtime.run(), name="runtime")
    signals = 0

    def stop(why: str) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            log.info("%s: stopping; a second signal forces it", why)
            running.cancel()
            loop.call_later(config.limits.shutdown_s, force, "the shutdown took too long")
        else:
            force(why)

    def force(why: str) -> None:
        # Nothing is left behind even so: sandboxes die with this process, and the store's lease runs out.
        log.error("%s: leaving at once", why)
        logging.shutdown()
        os._exit(130)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    parent = asyncio.create_task(_parent_gone(STARTED_BY), name="parent") if exit_with_parent else None
    if parent is not None:
        parent.add_done_callback(lambda task: None if task.cancelled() else stop("the parent process is gone"))
    try:
        await running
    except asyncio.CancelledError:
        return 0
    except (Unreachable, NothingWorks, ConfigError) as error:
        print(f"agent.runtime: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 3
    finally:
        if parent is not None:
            parent.cancel()
            await asyncio.wait({parent})
        await asyncio.gather(store.close(), *(engine.close() for engine in engines.values()), return_exceptions=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status (0 stopped, 2 bad configuration, 3 store or engines unreachable)."""
    parser = argparse.ArgumentParser(
        prog="python -m agent.runtime",
        description="Run episodes: tickets from the store, tokens from the engines, episodes back to the store.",
        epilog="Example configuration:\n\n" + EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON; without it, read from standard input")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the starting process is gone")
    arguments = parser.parse_args(argv)
    try:
        if arguments.config:
            config = load_config(Path(arguments.config))
        elif sys.stdin.isatty():
            parser.error("give --config FILE, or the configuration on standard input")
        else:
            config = parse_config(sys.stdin.read(), source="standard input")
    except ConfigError as error:
        print(f"agent.runtime: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    return asyncio.run(run(config, exit_with_parent=arguments.exit_with_parent))


if __name__ == "__main__":
    raise SystemExit(main())
