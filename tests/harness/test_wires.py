"""A session over HTTP, with the clients that agents use: what they are given, and that the tokens are the record."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest
from harness_tools import anthropic_client, ask, hears, kinds, openai_client, post, run, said, says, tokens, user
from runtime_tools import EchoEnv, ScriptedEngine, ticket

from agent.chat.renderer import ChatRenderer
from agent.engines.base import ContextOverflow
from agent.episode import StopReason
from agent.harness.task import HarnessTask
from envs.tool_calls import write_calls
from envs.tool_formats.reading import ToolCall

PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
CALL = write_calls([ToolCall("python", {"code": "print(6 * 7)"})])


async def test_a_conversation_is_one_chain_of_the_tokens_that_were_given_and_sampled(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, says("more", "  more, please\n", "right"), version=3)

    async def harness(task: HarnessTask) -> None:
        assert task.prompt == "Say it."
        async with openai_client(task) as client:
            messages: list[Any] = list(task.messages)
            for word in ("go on", "and on", None):
                reply = await ask(client, *messages)
                messages += [said(reply.content.strip()), *([user(word)] if word else [])]

    episode = await run(renderer, engine, harness, given=ticket(group_id="g"))
    assert (kinds(episode.segments), episode.branches) == ("paoaoa", ())
    for (prompt, _), index in zip(engine.requests, (1, 3, 5), strict=True):
        assert prompt == tokens(episode.segments[:index])
    assert [a.text for a in episode.actions] == ["more", "  more, please\n", "right"]
    assert {v for a in episode.actions for v in a.versions} == {3}
    assert episode.turn_rewards == (0.0, 0.0, 1.0)
    assert (episode.stop_reason, episode.task_id, episode.group_id) == (StopReason.TERMINATED, "echo-0", "g")


async def test_a_tool_call_travels_both_wires_and_stays_one_chain(tool_renderer: ChatRenderer) -> None:
    async def with_openai(task: HarnessTask) -> str:
        async with openai_client(task) as client:
            reply = await ask(client, user("6*7?"), tools=[PYTHON])
            assert [call.function.name for call in reply.tool_calls] == ["python"]
            assert reply.content is None
            answer = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "42"}
            last = await ask(client, user("6*7?"), reply.model_dump(exclude_none=True), answer, tools=[PYTHON])
            return str(last.content)

    async def with_anthropic(task: HarnessTask) -> str:
        tool: Any = {"name": "python", "input_schema": PYTHON["function"]["parameters"]}
        options: Any = {"model": "any", "max_tokens": 200, "tools": [tool]}
        async with anthropic_client(task) as client:
            first = await client.messages.create(messages=[{"role": "user", "content": "6*7?"}], **options)
            assert first.stop_reason == "tool_use"
            (block,) = first.content
            assert block.type == "tool_use"
            assert block.input == {"code": "print(6 * 7)"}
            messages: Any = [
                user("6*7?"),
                {"role": "assistant", "content": [block.model_dump()]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "42"}]},
            ]
            last = await client.messages.create(messages=messages, **options)
            assert last.stop_reason == "end_turn"
            return str(last.content[0].text)  # type: ignore[union-attr]

    found = [await run(tool_renderer, says(CALL, "right: 42"), harness) for harness in (with_openai, with_anthropic)]
    for episode in found:
        assert (kinds(episode.segments), episode.branches, episode.reward) == ("paoa", (), 1.0)
        assert episode.actions[0].text == CALL
    assert found[0].segments[1:] == found[1].segments[1:]


async def test_a_stream_says_what_the_whole_reply_says(tool_renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            stream = await client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": "6*7?"}],
                tools=[PYTHON],  # type: ignore[list-item]
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
            assert [call.function.name for call in calls if call.function] == ["python"]
            assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["tool_calls"]
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens > 0
        async with anthropic_client(task) as client:
            tool: Any = {"name": "python", "input_schema": PYTHON["function"]["parameters"]}
            options: Any = {"model": "any", "max_tokens": 200, "messages": [{"role": "user", "content": "again"}]}
            async with client.messages.stream(tools=[tool], **options) as events:
                message = await events.get_final_message()
            assert message.content[0].input == {"code": "print(6 * 7)"}  # type: ignore[union-attr]
            assert message.stop_reason == "tool_use"

    episode = await run(tool_renderer, says(CALL), harness)
    assert [kinds(chain.segments) for chain in episode.chains] == ["pa", "pa"]


async def test_what_would_be_another_distribution_is_overridden_or_refused_by_name(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, says("right"))

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task, max_retries=0) as client:
            for wrong in ({"n": 2}, {"logprobs": True}, {"frequency_penalty": 0.5}, {"tool_choice": "required"}):
                with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                    await ask(client, user("hello"), **wrong)
            await ask(client, user("hello"), temperature=0.0, top_p=0.5, seed=3, max_tokens=50)
        async with anthropic_client(task, max_retries=0) as client:
            options: Any = {"model": "any", "max_tokens": 5, "messages": [user("hello")]}
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                await client.messages.create(tool_choice={"type": "any"}, **options)

    episode = await run(renderer, engine, harness)
    ((_, sampling),) = engine.requests
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (1.0, 1.0, None, 50)
    assert (episode.sampling.temperature, episode.sampling.top_p) == (1.0, 1.0)
    assert episode.metrics["sampling_overridden"] is True


async def test_more_tokens_than_the_recipe_gives_are_not_to_be_had(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, says("right" * 200))

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            completion = await client.chat.completions.create(model="any", messages=[user("x")], max_tokens=100_000)  # type: ignore[list-item]
            assert completion.choices[0].finish_reason == "length"
            assert completion.usage is not None
            assert completion.usage.completion_tokens == 512

    await run(renderer, engine, harness)
    assert engine.requests[0][1].max_tokens == 512


async def test_a_stop_string_ends_the_action_and_is_not_shown(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, says("right. END of it", "right"))

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            reply = await ask(client, user("x"), stop=["END"])
            assert reply.content == "right. "
            await ask(client, user("x"), said("right."), user("y"))

    episode = await run(renderer, engine, harness)
    assert engine.requests[0][1].stop == ("END",)
    assert kinds(episode.segments) == "paoa"


async def test_compaction_and_sub_agents_are_branches_in_the_order_in_which_they_began(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, hears({"plan": "ask", "look": "seen", "short": "noted", "end": "right"}))

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            await ask(client, user("plan"))
            await ask(client, user("look"))
            await ask(client, user("plan"), said("ask"), user("short"))
            await ask(client, user("summary, end"))

    episode = await run(renderer, engine, harness)
    assert [kinds(chain.segments) for chain in episode.chains] == ["paoa", "pa", "pa"]
    assert [chain.actions[-1].text for chain in episode.chains] == ["noted", "seen", "right"]
    assert [chain.turn_rewards for chain in episode.chains] == [(0.0, 0.0), (0.0,), (1.0,)]
    assert (episode.reward, episode.metrics["branches"], episode.metrics["turns"]) == (1.0, 2, 4)


async def test_a_branch_from_an_earlier_reply_repeats_its_tokens_and_never_renders_them_again(
    renderer: ChatRenderer,
) -> None:
    engine = ScriptedEngine(renderer, says(" one ", "two", "right"))

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            await ask(client, user("a"))
            await ask(client, user("a"), said("one"), user("b"))
            await ask(client, user("a"), said("one"), user("another way"))

    episode = await run(renderer, engine, harness)
    (branch,) = episode.branches
    assert kinds(branch.segments) == "pa"
    shared = tokens(episode.segments[:2])
    assert branch.segments[0].token_ids[: len(shared)] == tuple(shared)
    assert engine.requests[2][0] == list(branch.segments[0].token_ids)


async def test_requests_side_by_side_never_share_a_chain(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, hears({"start": "more", "left": "l", "right": "right", "up": "u"}))

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            await ask(client, user("start"))
            engine.hold = asyncio.Event()
            asked = [
                asyncio.create_task(ask(client, user("start"), said("more"), user(word)))
                for word in ("left", "up", "right")
            ]
            async with asyncio.timeout(30):
                while len(engine.running) < 3:  # noqa: ASYNC110 - the engine has no event for it
                    await asyncio.sleep(0.01)
            engine.hold.set()
            assert [(await one).content for one in asked] == ["l", "u", "right"]

    episode = await run(renderer, engine, harness)
    assert sorted(kinds(chain.segments) for chain in episode.chains) == ["pa", "pa", "paoa"]
    assert episode.action_tokens == sum(len(word) + 1 for word in ("more", "l", "u", "right"))


async def test_too_many_branches_are_refused(renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> None:
        async with openai_client(task, max_retries=0) as client:
            for word in ("a", "b"):
                await ask(client, user(word))
            with pytest.raises(openai.BadRequestError, match="max_branches"):
                await ask(client, user("c"))
            await ask(client, user("a"), said("right"), user("going on is well"))

    episode = await run(renderer, says("right"), harness, max_branches=1)
    assert [kinds(chain.segments) for chain in episode.chains] == ["paoa", "pa"]


async def test_a_client_that_hung_up_and_asks_again_is_given_the_reply_it_missed(renderer: ChatRenderer) -> None:
    """No second action is sampled for one question, which nobody would ever have seen."""
    engine = ScriptedEngine(renderer, says("right", "wrong"))
    engine.hold = asyncio.Event()

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task, max_retries=0) as client:
            asked = asyncio.create_task(ask(client, user("x")))
            await engine.started.wait()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            assert engine.hold is not None
            engine.hold.set()
            assert (await ask(client, user("x"))).content == "right"

    episode = await run(renderer, engine, harness)
    assert (kinds(episode.segments), episode.branches, len(engine.requests)) == ("pa", (), 1)


async def test_a_reply_that_no_client_ever_had_is_no_part_of_the_episode(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, says("right", "unheard"))

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task, max_retries=0) as client:
            await ask(client, user("x"))
            engine.hold, engine.started = asyncio.Event(), asyncio.Event()
            asked = asyncio.create_task(ask(client, user("x"), said("right"), user("y")))
            await engine.started.wait()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    episode = await run(renderer, engine, harness)
    assert (kinds(episode.segments), episode.reward) == ("pa", 1.0)
    assert engine.aborted, "the request is given up at the engine"


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_know(renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> None:
        async with openai_client(task, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
                await ask(client, user("x" * 300))
            assert refused.value.code == "context_length_exceeded"
            await ask(client, user("compacted"))
        async with anthropic_client(task, max_retries=0) as other:
            long: Any = {"model": "any", "max_tokens": 5, "messages": [user("x" * 300)]}
            with pytest.raises(anthropic.BadRequestError, match="too long"):
                await other.messages.create(**long)
            counted = await other.messages.count_tokens(model="any", messages=[user("four")])  # type: ignore[list-item]
            assert counted.input_tokens == len(renderer.start([user("four")]).token_ids)

    episode = await run(renderer, says("right"), harness, limits={"max_context_tokens": 200})
    assert (kinds(episode.segments), episode.stop_reason) == ("pa", StopReason.TERMINATED)


async def test_an_engine_with_a_smaller_context_is_too_long_in_the_same_words(renderer: ChatRenderer) -> None:
    def script(prompt: str, number: int) -> Any:
        return ContextOverflow("too much") if number == 0 else "right"

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await ask(client, user("x"))
            await ask(client, user("y"))

    assert (await run(renderer, script, harness)).reward == 1.0


async def test_a_session_that_has_ended_is_not_found(renderer: ChatRenderer) -> None:
    kept: list[HarnessTask] = []

    async def harness(task: HarnessTask) -> None:
        kept.append(task)
        async with openai_client(task) as client:
            models = [model.id async for model in client.models.list()]
            assert models == ["policy"]
            await ask(client, user("x"))
            with pytest.raises(openai.NotFoundError):
                await ask(client.with_options(base_url=task.openai_base_url.replace(task.api_key, "other")), user("x"))
            status, body = await post(task, "nothing", {})
            assert (status, body["error"]["type"]) == (404, "not_found_error")

    await run(renderer, says("right"), harness, env=EchoEnv())
    assert len(kept[0].api_key) >= 32
