"""One episode of one environment, watched turn by turn. Without TASK_ID: the first task, or one that --seed draws.

    python -m agent.solve sao-demo__durations-1 --engine http://127.0.0.1:8000 --model runs/swe_tiny/final
    python -m agent.solve astropy__astropy-12907 --source SWE-bench/SWE-bench_Verified \\
        --engine http://127.0.0.1:8000 --model models/Qwen3-4B --out episode.msgpack
    python -m agent.solve --env sao/PythonTIR-v0 --env-kwargs problems=aime25 max_turns=12 \\
        --seed 7 --engine http://127.0.0.1:8000 --model models/Qwen3-4B
    python -m agent.solve --env sao/StyleShift-v0 --env-kwargs prompts=english step=0 \\
        --engine http://127.0.0.1:8000 --model models/Qwen3-4B

Exit status: 0 the episode ended (solved or not), 2 a wrong argument, 3 an engine or a sandbox is missing, or a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from agent.doors.door import DoorFault
from agent.engines.base import EngineFault
from agent.episode import EpisodeError, encode
from agent.solve.arguments import SWE_BENCH, Request, WrongArgument, environment_kwargs
from agent.solve.trace import Trace
from agent.solve.watch import watch
from envs import ENVIRONMENTS, EnvironmentFault

MAX_TOKENS_PER_TURN = 4096


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        prog="python -m agent.solve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("task", metavar="TASK_ID", nargs="?", help="for SWE-bench the instance's id")
    command.add_argument("--engine", required=True, metavar="URL", help="a rollout engine that runs")
    command.add_argument("--model", type=Path, required=True, help="folder of its tokenizer and chat template")
    command.add_argument("--key-file", type=Path, metavar="FILE", help="the engine's key; default: what is in SAO_KEY")
    command.add_argument(
        "--env", default=SWE_BENCH, metavar="ID", help=f"{', '.join(sorted(ENVIRONMENTS))} (default: {SWE_BENCH})"
    )
    command.add_argument(
        "--env-kwargs",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="the environment's arguments, as YAML values; TASK_ID stands before them",
    )
    swe_bench = command.add_argument_group(f"short for arguments of {SWE_BENCH}")
    swe_bench.add_argument("--source", help="instances=: where the task comes from (default: the demo set)")
    swe_bench.add_argument("--scaffold", choices=("auto", "openhands", "bash"), help="scaffold= (default: auto)")
    swe_bench.add_argument("--max-turns", type=int, metavar="N", help="max_turns= (default: 300)")
    command.add_argument("--max-context-tokens", type=int, metavar="N", help="default: the engine's context")
    command.add_argument("--max-tokens-per-turn", type=int, default=MAX_TOKENS_PER_TURN, metavar="N")
    command.add_argument("--temperature", type=float, default=1.0)
    command.add_argument("--seed", type=int, help="the same gives the same actions; it also draws the task")
    command.add_argument("--out", type=Path, metavar="FILE", help="write the episode there (msgpack)")
    command.add_argument("--shown-chars", type=int, default=2000, metavar="N", help="of one message; 0: all")
    return command


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Command line; see the exit status above."""
    options = parser().parse_args(argv)
    console = console or Console()
    try:
        _check_out(options.out)
        request = Request(
            env_id=options.env,
            env_kwargs=environment_kwargs(options),
            task_id=options.task,
            engine=options.engine,
            model=options.model,
            key_file=options.key_file,
            seed=options.seed,
            temperature=options.temperature,
            max_context_tokens=options.max_context_tokens,
            max_tokens_per_turn=options.max_tokens_per_turn,
        )
        episode = asyncio.run(watch(request, Trace(console, shown_chars=options.shown_chars)))
        if options.out is not None:
            options.out.write_bytes(encode(episode))
            console.print(f"episode {episode.id} written to {options.out}", highlight=False, markup=False)
    except (WrongArgument, DoorFault, OSError) as error:
        return _complain(error, 2)
    except (EngineFault, EnvironmentFault, EpisodeError) as error:
        return _complain(error, 3)
    except KeyboardInterrupt:
        return _complain("stopped", 130)
    return 0


def _complain(error: object, status: int) -> int:
    print(f"agent.solve: {error}", file=sys.stderr)
    return status


def _check_out(path: Path | None) -> None:
    """Before the episode, which may take hours."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise WrongArgument(f"--out: there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise WrongArgument(f"--out: {path} is a folder; name a file in it")


if __name__ == "__main__":
    raise SystemExit(main())
