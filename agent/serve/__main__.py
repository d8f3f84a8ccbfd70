"""Serve a model that learns from feedback, over OpenAI's API: `python -m agent.serve RECIPE [key=value ...]`.

python -m agent.serve recipes/style_shift_tiny.yaml --learn serve.port=8000
python -m agent.serve export runs/style_shift_tiny --out said.jsonl     # all that was said and judged; see its --help
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from agent.chat.template import ChatTemplateError
from agent.child_processes import announce_port
from agent.descriptors import TooFewDescriptors
from agent.doors.door import DoorFault
from agent.engines.base import EngineFault
from agent.serve import export
from agent.serve.api.request_ids import RequestIdFilter
from agent.serve.config import ServeError, ServeRecipe, load_recipe
from agent.serve.doors.own_key import OwnKey
from agent.serve.doors.private_files import keep_private
from agent.serve.doors.quiet_log import Throttle
from agent.serve.server import Server
from agent.store.protocol import StoreFault


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 0, 1 if a part of it fails, 2 where it cannot start."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["export"]:
        return export.main(argv[1:])
    description, _, example = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m agent.serve",
        description=description,
        epilog="example:\n" + example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe; section `serve` is this program's own")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe, such as serve.port=0")
    parser.add_argument("--learn", action="store_true", help="start the learner too; without it episodes are recorded")
    parser.add_argument("--port-file", type=Path, help="the port is written there once the server answers")
    arguments = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s serve %(levelname)s%(request)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIdFilter())
    keep_private()
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        throttle = Throttle(recipe.serve.doors.log_lines_per_minute)
        for handler in logging.getLogger().handlers:
            handler.addFilter(throttle)
        return asyncio.run(_serve(recipe, arguments))
    except (ServeError, DoorFault, EngineFault, StoreFault, ChatTemplateError, TooFewDescriptors) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


async def _serve(recipe: ServeRecipe, arguments: argparse.Namespace) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Server.running(recipe, arguments.recipe, arguments.overrides, learn=arguments.learn) as server:
        print(f"ready: {server.url}  (engine for the learner: {server.engine_proxy_url})", flush=True)
        if server.own_key is not None:
            _tell_key(server.own_key, server.url)
        announce_port(arguments.port_file, int(server.url.rpartition(":")[2]))
        waiting = [asyncio.create_task(event.wait()) for event in (stop, server.failed)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return 0 if stop.is_set() else 1


def _tell_key(own: OwnKey, url: str) -> None:
    """How to get in. The key itself is shown at a terminal, and once to whatever else keeps the output."""
    if own.is_new or sys.stdout.isatty():
        print(f"page:  {own.link(url)}")
    else:
        print(f"page:  {url}/#key=KEY, with the key that is in {own.file}")
    print(f'curl:  curl {url}/v1/models -H "Authorization: Bearer $(cat {own.file})"')
    print(f"openai: OpenAI(base_url='{url}/v1', api_key=open('{own.file}').read().strip())", flush=True)


if __name__ == "__main__":
    sys.exit(main())
