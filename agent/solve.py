"""One agent on one repository: run an episode of `sao/SWEBench-v0` and watch it turn by turn.

    python -m agent.solve sao-demo__durations-1 --engine http://127.0.0.1:8000 --model runs/swe_tiny/final
    python -m agent.solve astropy__astropy-12907 --source SWE-bench/SWE-bench_Verified \\
        --engine http://127.0.0.1:8000 --model models/Qwen3-4B --out episode.msgpack

Exit status: 0 the episode ended (solved or not), 2 a wrong argument, 3 no Docker engine, no rollout engine, or a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from agent.chat import ChatRenderer, ChatTemplateError
from agent.engines.base import EngineFault, EngineHealth
from agent.engines.client import HttpEngine
from agent.episode import Episode, EpisodeError, encode
from agent.rollout import RolloutSettings, rollout
from agent.runtime_config import SamplingConfig, StageLimits
from agent.solve_trace import Shown, ShownEngine, ShownEnv
from agent.store.protocol import Ticket
from envs import AsyncEnv, EnvironmentFault, make_core
from envs.swe_bench.scaffold import have_openhands

ENV_ID = "sao/SWEBench-v0"
MAX_TOKENS_PER_TURN = 4096


class Unsolvable(ValueError):
    """An argument that cannot be used; the message names it and says what to write instead."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m agent.solve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("row", metavar="ROW", help="the instance's id")
    found.add_argument("--engine", required=True, metavar="URL", help="a rollout engine that runs")
    found.add_argument("--model", type=Path, required=True, help="folder of its tokenizer and chat template")
    found.add_argument("--source", default="demo", help="where the row comes from (default: the demo set)")
    found.add_argument("--scaffold", choices=("auto", "openhands", "bash"), default="auto")
    found.add_argument("--max-turns", type=int, default=300)
    found.add_argument("--max-context-tokens", type=int, metavar="N", help="default: the engine's context")
    found.add_argument("--max-tokens-per-turn", type=int, default=MAX_TOKENS_PER_TURN, metavar="N")
    found.add_argument("--temperature", type=float, default=1.0)
    found.add_argument("--seed", type=int, help="the same seed and weights give the same actions (default: none)")
    found.add_argument("--out", type=Path, metavar="FILE", help="write the episode there (msgpack)")
    found.add_argument("--shown-chars", type=int, default=2000, metavar="N", help="of one message; 0: all")
    return found


def make_env(options: argparse.Namespace) -> AsyncEnv:
    """The environment, its rows read; raises `Unsolvable`."""
    if options.scaffold == "openhands" and not have_openhands():
        raise Unsolvable(
            "--scaffold: OpenHands' libraries are not installed here (Python 3.12): `make openhands`, then run "
            "this with .venv-openhands/bin/python; or take --scaffold bash"
        )
    try:
        env = make_core(ENV_ID, instances=options.source, scaffold=options.scaffold, max_turns=options.max_turns)
        ids = env.task_ids
    except (ValueError, OSError) as error:  # InstanceError is a ValueError
        raise Unsolvable(str(error)) from error
    if options.row not in ids:
        near = difflib.get_close_matches(options.row, ids, n=3, cutoff=0.3) or list(ids[:3])
        raise Unsolvable(
            f"ROW: there is no instance {options.row!r} among the {len(ids)} of {options.source!r}; "
            f"there is, for example, {', '.join(near)}"
        )
    return env


def make_renderer(model: Path) -> ChatRenderer:
    """The tokenizer and chat template of the engine's model; raises `Unsolvable`."""
    try:
        return ChatRenderer.from_pretrained(model)
    except ChatTemplateError as error:
        raise Unsolvable(f"--model: {error}") from error


def make_settings(options: argparse.Namespace, health: EngineHealth) -> RolloutSettings:
    """What the episode may use; raises `Unsolvable` where the engine cannot give it."""
    context = options.max_context_tokens or health.max_context
    if context > health.max_context:
        raise Unsolvable(
            f"--max-context-tokens: {context} is more than the {health.max_context} of the engine at {options.engine}"
        )
    try:
        sampling = SamplingConfig(temperature=options.temperature, seeded=options.seed is not None)
    except ValueError as error:
        raise Unsolvable(f"--temperature: {options.temperature:g} is no temperature, give 0 or more") from error
    if min(options.max_tokens_per_turn, context) < 1:
        raise Unsolvable("--max-tokens-per-turn and --max-context-tokens must be at least 1")
    # The environment has the wall clock of an agent's day; these limits are for what hangs.
    limits = StageLimits(reset_s=3600, step_s=4 * 3600, episode_s=24 * 3600)
    return RolloutSettings(
        env_id=ENV_ID,
        sampling=sampling,
        max_context_tokens=context,
        max_tokens_per_turn=options.max_tokens_per_turn,
        limits=limits,
        worker="agent.solve",
    )


async def solve(options: argparse.Namespace, console: Console) -> Episode:
    """Run the episode and show it. Raises `Unsolvable`, `EngineFault`, `EnvironmentFault` or `EpisodeError`."""
    env = await asyncio.to_thread(make_env, options)
    renderer = await asyncio.to_thread(make_renderer, options.model)
    engine = ShownEngine(HttpEngine(options.engine, control_timeout_s=30.0))
    shown = Shown(console, shown_chars=options.shown_chars)
    watched = ShownEnv(env, engine, shown)
    ticket = Ticket(
        id=f"solve-{secrets.token_hex(4)}",
        kind="evaluate",
        task_index=list(env.task_ids).index(options.row),
        epoch=0,
        seed=options.seed or 0,
    )
    try:
        settings = make_settings(options, await engine.health())
        with console.status(f"{options.row}: running", spinner="dots"):
            episode = await rollout(ticket, watched, engine, renderer, settings)
    finally:
        try:
            await env.aclose()
        finally:
            await engine.close()
    shown.end(episode, watched.patch, watched.refusal)
    if options.out is not None:
        options.out.write_bytes(encode(episode))
        console.print(f"episode {episode.id} written to {options.out}", highlight=False, markup=False)
    return episode


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Command line; see the exit status above."""
    options = parser().parse_args(argv)

    def complain(error: Any) -> None:
        print(f"agent.solve: {error}", file=sys.stderr)

    try:
        if options.out is not None and not options.out.absolute().parent.is_dir():
            raise Unsolvable(f"--out: there is no folder {options.out.absolute().parent}")
        if options.out is not None and options.out.is_dir():
            raise Unsolvable(f"--out: {options.out} is a folder; name a file in it")
        asyncio.run(solve(options, console or Console()))
    except (Unsolvable, OSError) as error:
        complain(error)
        return 2
    except (EngineFault, EnvironmentFault, EpisodeError) as error:
        complain(error)
        return 3
    except KeyboardInterrupt:
        complain("stopped")
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
