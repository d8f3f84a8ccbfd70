"""Whatever an agent asks, in whichever order: every prompt that was sampled from is in the record, token by token."""

from __future__ import annotations

import asyncio
from typing import Any

from harness_tools import user
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_tools import EchoEnv, ScriptedEngine, ticket
from runtime_tools import settings as rollout_settings

from agent.chat.renderer import ChatRenderer
from agent.harness.session import Session
from agent.harness.task import task_at
from agent.runtime.engine_requests import ActionSampler
from agent.runtime.environment_calls import EnvironmentCalls
from agent.runtime.episode_clock import EpisodeClock
from agent.wire.request import ChatRequest

REPLIES = ["yes", "  no\n", "<think>hm</think>ok", "\u00e9\u4e2d", "<|im_end|>", "a b"]


def session_of(renderer: ChatRenderer) -> tuple[Session, ScriptedEngine]:
    engine = ScriptedEngine(renderer, lambda prompt, number: REPLIES[number % len(REPLIES)])
    chosen = rollout_settings(max_context_tokens=1 << 20)
    sampler = ActionSampler(
        engine,
        ticket(),
        chosen.sampling,
        tuple(renderer.stop_token_ids),
        request_limit_s=60.0,
        clock=EpisodeClock(60.0),
        recover=None,
    )
    task = task_at("http://x/sessions/s", task_id="t", seed=0, messages=[], tools=[], model="m")
    calls = EnvironmentCalls(EchoEnv(), "echo", chosen.limits)
    return Session(task, calls, sampler, renderer, chosen, max_branches=100), engine


def request(messages: list[dict[str, Any]]) -> ChatRequest:
    return ChatRequest(
        messages=messages,
        model="m",
        tools=[],
        stream=False,
        include_usage=False,
        max_tokens=None,
        temperature=None,
        top_p=None,
        top_k=None,
        seed=None,
        stops=(),
        user="",
        session="",
    )


def told_back(message: dict[str, Any], how: str) -> dict[str, Any]:
    """A reply as a client sends it: as it was, without blanks around it, or without its thinking."""
    content = message["content"]
    if how == "stripped":
        content = content.strip()
    elif how == "without thinking":
        content = content.rpartition("</think>")[2]
    return {"role": "assistant", "content": content}


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "go back", "rewrite", "begin", "side by side"]),
        st.sampled_from(["as it was", "stripped", "without thinking"]),
        st.sampled_from(["a", "b", "<|im_start|>"]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=25)
@given(steps=_STEPS)
def test_every_prompt_is_what_stands_before_its_action(
    renderer: ChatRenderer, steps: list[tuple[str, str, str]]
) -> None:
    asyncio.run(_holds(renderer, steps))


async def _holds(renderer: ChatRenderer, steps: list[tuple[str, str, str]]) -> None:
    session, engine = session_of(renderer)
    talks: list[list[dict[str, Any]]] = []

    async def ask(messages: list[dict[str, Any]], how: str) -> None:
        turn, reply = await session.ask(request(messages))
        session.delivered(turn)
        talks.append([*messages, told_back(reply.message, how)])

    for what, how, word in steps:
        talk = talks[-1] if talks else []
        if what == "go on":
            await ask([*talk, user(word)], how)
        elif what == "go back":
            await ask([*(talks[0] if talks else []), user(word)], how)
        elif what == "rewrite":
            await ask([user("summary"), *talk[-1:], user(word)], how)
        elif what == "begin":
            await ask([user(word)], how)
        else:
            await asyncio.gather(ask([*talk, user(word)], how), ask([*talk, user(word + "!")], how))
    await session.close()
    branches = [chain.as_branch() for chain in session.chains]
    recorded = []
    for branch in branches:
        assert branch is not None
        before: list[int] = []
        for segment in branch.segments:
            if segment.kind == "action":
                recorded.append((tuple(before), tuple(segment.token_ids)))
            before += segment.token_ids
    sampled = sorted(tuple(prompt) for prompt, _ in engine.requests)
    assert sorted(prompt for prompt, _ in recorded) == sampled
    assert len(recorded) == len(engine.requests), "every action once"
