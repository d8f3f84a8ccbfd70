"""The runtime as a process: command line, signals, exit status.

python -m agent.runtime --config runtime.yaml
python -m agent.runtime < runtime.json        # the configuration on standard input
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agent import STARTED_BY, collector
from agent.backoff import Unreachable
from agent.descriptors import TooFewDescriptors, raise_limit
from agent.doors.door import KEY_VARIABLE, DoorFault, check_host
from agent.doors.keys import given_key
from agent.engines.base import Engine
from agent.runtime.settings import EXAMPLE, ConfigError, RuntimeConfig, load_config, parse_config
from agent.runtime.watching.spans import Spans, configured_spans

if TYPE_CHECKING:
    from agent.runtime.rollout import RunEpisode

log = logging.getLogger("agent.runtime")

Turns = Callable[[RuntimeConfig], AbstractAsyncContextManager["RunEpisode"]]
"""What makes episodes under a configuration, for as long as the runtime runs."""


@asynccontextmanager
async def own_turns(config: RuntimeConfig) -> AsyncIterator[RunEpisode]:
    """The runtime makes the turns itself. Raises `ConfigError` where the configuration names another agent."""
    from agent.runtime.rollout import rollout

    if config.harness is not None:
        raise ConfigError("`harness`: an agent that makes the turns itself is run by `python -m agent.harness`")
    yield rollout


async def _parent_gone(pid: int) -> None:
    """Return when the process that started this one is gone."""
    while os.getppid() == pid:  # noqa: ASYNC110 - nothing tells of a parent's death; one has to ask
        await asyncio.sleep(1.0)


async def run(
    config: RuntimeConfig, *, exit_with_parent: bool, spans: Spans | None = None, turns: Turns = own_turns
) -> int:
    """Run episodes until a signal, the parent's end (if asked) or an error; returns the exit status."""
    try:
        async with turns(config) as run_episode:
            return await _run(config, run_episode, spans, exit_with_parent=exit_with_parent)
    except ConfigError as error:
        print(f"agent.runtime: {error}", file=sys.stderr)
        return 2


async def _run(config: RuntimeConfig, run_episode: RunEpisode, spans: Spans | None, *, exit_with_parent: bool) -> int:
    # The tokenizer's own threads would take time from the one that runs all episodes. It looks when it is loaded.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Imported here: `--help` and a configuration error need none of it.
    from agent.chat.template import ChatTemplateError
    from agent.engines.client import HttpEngine
    from agent.runtime.runtime import NothingWorks, Runtime
    from agent.runtime.watching.board import Board
    from agent.runtime.watching.port import RuntimePort
    from agent.runtime.watching.watch import Watching
    from agent.store.client import StoreClient
    from envs import make_core

    try:
        raise_limit(2 * config.concurrency, f"concurrency={config.concurrency}")
    except TooFewDescriptors as error:
        print(f"agent.runtime: {error}", file=sys.stderr)
        return 2
    try:
        key = given_key(config.key_file)
        if config.metrics_port is not None:
            check_host(config.metrics_host, key, "the runtime's port (metrics_host)")
    except DoorFault as error:
        print(f"agent.runtime: {error}", file=sys.stderr)
        return 2
    # What environments start, and the code of the policy in it, has no use for it.
    os.environ.pop(KEY_VARIABLE, None)
    try:
        renderer = await asyncio.to_thread(config.chat.load, Path(config.model))
    except ChatTemplateError as error:
        print(f"agent.runtime: `model`: {error}", file=sys.stderr)
        return 2
    store = StoreClient(config.store, kind=None if config.tickets == "all" else config.tickets, key=key)
    kept_s = config.engine_keepalive_s
    engines: dict[str, Engine] = {url: HttpEngine(url, key=key, keepalive_s=kept_s) for url in config.engines}
    board = Board() if config.metrics_port is not None else None
    runtime = Runtime(
        config,
        store=store,
        engines=engines,
        renderer=renderer,
        make_env=lambda env: make_core(env.id, **env.arguments),
        watching=Watching(board, spans),
        run_episode=run_episode,
    )
    shown = contextlib.AsyncExitStack()
    if board is not None and config.metrics_port is not None:
        port = RuntimePort(runtime.worker, runtime.progress, board, runtime.engines, key)
        host, number = config.metrics_host, config.metrics_port
        try:
            url = await shown.enter_async_context(port.listening(host, number, config.port_file))
        except OSError as error:
            why = f"cannot listen on {host}:{number}: {error.strerror or error}"
            print(f"agent.runtime: `metrics_port`: {why}; choose another one, or 0 for any free one", file=sys.stderr)
            return 2
        log.info("figures and episodes at %s", url)
    collector.calm()
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
    except (Unreachable, NothingWorks, ConfigError, DoorFault) as error:
        print(f"agent.runtime: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DoorFault) else 3
    finally:
        if parent is not None:
            parent.cancel()
            await asyncio.wait({parent})
        await asyncio.gather(
            shown.aclose(), store.close(), *(engine.close() for engine in engines.values()), return_exceptions=True
        )
    return 0


def main(
    argv: Sequence[str] | None = None,
    *,
    turns: Turns = own_turns,
    prog: str = "python -m agent.runtime",
    description: str = "Run episodes: tickets from the store, tokens from the engines, episodes back to the store.",
    example: str = EXAMPLE,
) -> int:
    """Command line; returns the exit status (0 stopped, 2 bad configuration, 3 store or engines unreachable).

    `turns`, and what `--help` says of them: for agents that make the turns in the runtime's place.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="Example configuration:\n\n" + example,
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
    with configured_spans() as spans:
        return asyncio.run(run(config, exit_with_parent=arguments.exit_with_parent, spans=spans, turns=turns))


if __name__ == "__main__":
    raise SystemExit(main())
