"""The `local` engine: a small server for a transformers model, speaking the token protocol of `vllm serve`.

    python -m agent.engines.local --model PATH --port 0 --max-sequences 64 --max-context 4096
    SAO_KEY=... python -m agent.engines.local --model PATH --host 0.0.0.0 --port 8001

Whoever reaches the port can change the weights. With a shared key (SAO_KEY, or --key-file) requests must show it;
without one it listens on the loopback interface only.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from aiohttp import web
from transformers.utils import logging as transformers_logging

from agent.child_processes import announce_port
from agent.descriptors import raise_limit
from agent.doors.door import DoorFault, check_host
from agent.doors.keys import given_key
from agent.engines.local.loop import ModelLoop
from agent.engines.local.model import ModelError, SlotModel
from agent.engines.local.server import LocalServer


def main(arguments: list[str] | None = None) -> int:
    """Run the server; returns the exit code (2: the model can't be served)."""
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.exit_with_parent:
        _exit_with_parent()
    try:
        key = given_key(options.key_file)
        check_host(options.host, key, "the local engine")
    except DoorFault as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    raise_limit(0, "the engine")
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()  # or every publication writes one into the log
    sys.setswitchinterval(0.0005)  # the server thread gets its turn while the model thread is in Python
    try:
        asyncio.run(_serve(options, key))
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m agent.engines.local", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True, help="folder of a transformers causal LM")
    parser.add_argument("--served-model-name", default=None, help="name in requests (default: the folder)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--port-file", type=Path, default=None, help="write the port here once ready")
    parser.add_argument("--key-file", type=Path, help="file with the shared key; default: what is in SAO_KEY")
    parser.add_argument("--max-sequences", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--max-context", type=int, default=4096, help="longest prompt and completion together, tokens")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument("--version", type=int, default=0, help="policy version of the weights in --model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input is closed")
    return parser.parse_args(arguments)


async def _serve(options: argparse.Namespace, key: str) -> None:
    """Load, listen, print the ready line, serve until SIGTERM or SIGINT."""
    model = SlotModel(
        options.model,
        slots=2 * options.max_sequences,
        max_context=options.max_context,
        device=options.device,
    )
    loop = ModelLoop(model, version=options.version, max_sequences=options.max_sequences)
    name = options.served_model_name or str(options.model)
    server = LocalServer(loop, name=name, folder=options.model, key=key)
    # A client that goes away cancels its handler, which aborts its generation. Turns may be far apart.
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0, keepalive_timeout=90.0
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port, backlog=1024)
        await site.start()
        port = runner.addresses[0][1]
        announce_port(options.port_file, port)
        print(f"ready: http://{options.host}:{port}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()


def _exit_with_parent() -> None:
    """End when standard input does: its other end is the parent's, and closes even if the parent is killed."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held while the interpreter shuts down
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
