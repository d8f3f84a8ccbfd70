"""One episode of any environment at an engine that runs, with a trace of it."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from agent.chat.renderer import ChatRenderer
from agent.chat.template import ChatTemplateError
from agent.doors.keys import given_key
from agent.engines.client import HttpEngine
from agent.episode import Episode
from agent.runtime.rollout import rollout
from agent.solve.arguments import Request, WrongArgument, choose_task, rollout_settings
from agent.solve.trace import Trace, TracedEngine, TracedEnv
from agent.store.protocol import Ticket
from envs import AsyncEnv, make_core


async def watch(request: Request, trace: Trace) -> Episode:
    """Run the episode and show it.

    Raises `WrongArgument`, `DoorFault`, `EngineFault`, `EnvironmentFault` or `EpisodeError`.
    """
    env = await asyncio.to_thread(make_env, request)
    task_ids = env.task_ids
    task_index = choose_task(request, task_ids)
    renderer = await asyncio.to_thread(make_renderer, request.model)
    engine = TracedEngine(HttpEngine(request.engine, control_timeout_s=30.0, key=given_key(request.key_file)))
    traced = TracedEnv(env, engine, trace)
    ticket = Ticket(
        id=f"solve-{secrets.token_hex(4)}", kind="evaluate", task_index=task_index, epoch=0, seed=request.seed or 0
    )
    try:
        settings = rollout_settings(request, await engine.health())
        with trace.running(task_ids[task_index]):
            episode = await rollout(ticket, traced, engine, renderer, settings)
    finally:
        try:
            await env.aclose()
        finally:
            await engine.close()
    trace.end(episode, traced.outcome)
    return episode


def make_env(request: Request) -> AsyncEnv:
    """The environment, its tasks read; raises `WrongArgument`."""
    try:
        env = make_core(request.env_id, **request.env_kwargs)
        tasks = len(env.task_ids)
    except TypeError as error:
        raise WrongArgument(f"--env-kwargs: {request.env_id} cannot be made with them: {error}") from error
    except (ValueError, OSError) as error:  # an environment's own errors of configuration are ValueErrors
        raise WrongArgument(str(error)) from error
    if not tasks:
        raise WrongArgument(f"--env-kwargs: with them {request.env_id} has no task")
    return env


def make_renderer(model: Path) -> ChatRenderer:
    """The tokenizer and chat template of the engine's model; raises `WrongArgument`."""
    try:
        return ChatRenderer.from_pretrained(model)
    except ChatTemplateError as error:
        raise WrongArgument(f"--model: {error}") from error
