"""Traces: conversations to learn from, where they come from, and how they become tokens and a mask."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent.chat.renderer import ChatRenderer
from agent.runtime.settings import EnvConfig
from envs.chains.env import Chains
from envs.chains.traces import write_traces as play_chains
from envs.core import AsyncEnv, Message
from envs.python_tir.env import PythonTIR
from envs.python_tir.traces import write_traces as play_python
from envs.style_shift.traces import has_script, sound_texts, style_traces
from envs.swe_bench.demo.recorded import has_recorded, swe_traces
from learner.config import RecipeError

Example = tuple[Tensor, Tensor]
"""Token ids int64[T] and the action mask bool[T] of one trace."""


@dataclass(frozen=True)
class Script:
    """What gives traces of an environment without running it.

    `serves(env_id, kwargs)`: for which environments. `traces(count, bad=share, seed=n)`: conversations, a share of them
    with a mistake. `sound_texts(prompts)`: for each of so many prompts every sound conversation; None: not known.
    """

    serves: Callable[[str, Mapping[str, Any]], bool]
    traces: Callable[..., Iterator[list[Message]]]
    sound_texts: Callable[[int], list[list[Message]]] | None = None


SCRIPTS = (
    Script(has_script, style_traces, sound_texts),  # sao/StyleShift-v0 with tiny prompts: a grammar
    Script(has_recorded, swe_traces),  # sao/SWEBench-v0, its demo set: recorded in real containers
)
"""Every other environment is played, see `player_of`."""


def script_for(env: EnvConfig) -> Script | None:
    """The script that serves this environment, or None."""
    return next((script for script in SCRIPTS if script.serves(env.id, env.kwargs)), None)


def player_of(env: AsyncEnv, kwargs: Mapping[str, Any]) -> Callable[..., AsyncIterator[list[Message]]] | None:
    """What plays `env` for traces, `play(task_ids, seed=n, error_rate=share)`, or None: nobody has written one.

    Math is played with a real interpreter, chains in the environment itself.
    """
    if isinstance(env, PythonTIR):
        return partial(play_python, env, sandbox=str(kwargs.get("sandbox", "auto")))
    if isinstance(env, Chains):
        return partial(play_chains, env)
    return None


def encode_trace(messages: Sequence[Message], renderer: ChatRenderer) -> Example:
    """Tokens of one trace exactly as the runtime would have laid them out, with a mask over the actions."""
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    ids = list(renderer.start(list(messages[:first]), None).token_ids)
    mask = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        action = renderer.encode_action(message["content"])
        ids += action
        mask += [True] * len(action)
        following = [m for m in messages[i + 1 : i + 2] if m["role"] != "assistant"]
        if following:
            observation = renderer.extend(list(messages[: i + 1]), action, following, None).token_ids
            ids += observation
            mask += [False] * len(observation)
    return torch.tensor(ids), torch.tensor(mask)


def read_traces(path: Path, key: str = "sft.traces") -> list[list[Message]]:
    """The message lists of a JSONL; `RecipeError`, naming `key`, where it holds anything else."""
    try:
        traces = [
            json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        spoken = [{m["role"] for m in messages if isinstance(m["content"], str)} for messages in traces]
    except OSError as error:
        raise RecipeError(
            f"{key}: cannot read {path}: {error.strerror or error}. Put the traces there, or name another file "
            "(docs/recipes.md says what a trace is)"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError(
            f"{key}: {path} must be JSON lines, each with `messages` (role and content): {error!r}"
        ) from error
    silent = next((i for i, roles in enumerate(spoken) if "assistant" not in roles), None)
    if not traces or silent is not None:
        which = "no trace at all" if silent is None else f"a trace without an assistant message (number {silent + 1})"
        raise RecipeError(f"{key}: {path} holds {which}, so there is nothing to learn from")
    return traces
