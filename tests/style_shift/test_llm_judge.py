"""The LLM judge against a real HTTP server that plays a judge in every way one can go wrong."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web
from judge_server import GOOD, Make, Server, completion, hangs, says, status

from envs import EnvironmentFault
from envs.style_shift.judging.judge import JudgeFault


async def test_a_verdict_is_asked_for_by_schema_with_the_reasoning_first(server: Server, make: Make) -> None:
    """Case G2."""
    judge = make()
    verdict = await judge.judge("Write about rain.", "Rain, yay!", "cute")
    assert (verdict.quality, verdict.style, verdict.reasoning) == (1, "cute", GOOD["reasoning"])
    body = server.bodies[0]
    schema = body["response_format"]["json_schema"]
    assert (body["response_format"]["type"], schema["strict"]) == ("json_schema", True)
    assert list(schema["schema"]["properties"]) == ["reasoning", "quality", "style"]
    assert (judge.costs.calls, judge.costs.verdicts, judge.costs.prompt_tokens, judge.costs.completion_tokens) == (
        1, 1, 100, 20,
    )  # fmt: skip


async def test_the_judge_is_not_told_which_style_is_preferred(server: Server, make: Make) -> None:
    judge = make()
    for style in ("cute", "classical"):
        await judge.judge("Write about rain.", "Rain, yay!", style)
    assert server.bodies[0] == server.bodies[1]


BAD_ANSWERS = {
    "truncated": says(json.dumps(GOOD), finish="length"),
    "truncated in the JSON": says(json.dumps(GOOD)[:-8], finish="length"),
    "truncated, and says stop": says(json.dumps(GOOD)[:-8]),
    "filtered": says(json.dumps(GOOD), finish="content_filter"),
    "refused": says(None, refusal="I cannot judge this."),
    "refused beside a verdict": says(json.dumps(GOOD), refusal="I cannot judge this."),
    "refused in words": says("I am sorry, but I cannot judge this text."),
    "empty": says(""),
    "no content": says(None),
    "only a draft": says(None, reasoning_content=json.dumps(GOOD)),
    "an empty answer after a draft": says("", reasoning_content=json.dumps(GOOD)),
    "still thinking": says("<think>" + json.dumps(GOOD)),
    "a draft alone": says(f"<think>{json.dumps(GOOD)}</think>"),
    "prose before": says("The verdict is " + json.dumps(GOOD)),
    "prose after": says(json.dumps(GOOD) + " That is my verdict."),
    "two verdicts": says(json.dumps(GOOD) + json.dumps({**GOOD, "quality": 0})),
    "in words": says("quality: 1, style: cute. SUCCESS"),
    "a key twice": says('{"reasoning": "r", "quality": 0, "quality": 1, "style": "cute"}'),
    "a key missing": says('{"reasoning": "r", "quality": 1}'),
    "a key too many": says(json.dumps({**GOOD, "score": 10})),
    "verdict before reasoning": says('{"quality": 1, "style": "cute", "reasoning": "r"}'),
    "no reasoning": says(json.dumps({**GOOD, "reasoning": " "})),
    "quality as text": says(json.dumps({**GOOD, "quality": "1"})),
    "quality as bool": says(json.dumps({**GOOD, "quality": True})),
    "quality 2": says(json.dumps({**GOOD, "quality": 2})),
    "quality 0.9": says(json.dumps({**GOOD, "quality": 0.9})),
    "quality NaN": says('{"reasoning": "r", "quality": NaN, "style": "cute"}'),
    "another style": says(json.dumps({**GOOD, "style": "gothic"})),
    "style as list": says(json.dumps({**GOOD, "style": ["cute"]})),
    "a list": says(json.dumps([GOOD])),
    "very deep": says("[" * 100_000),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_an_answer_that_is_no_verdict_is_a_fault_after_retries_and_never_0(
    server: Server, make: Make, name: str
) -> None:
    """Cases G1 and G2."""
    server.answers = [BAD_ANSWERS[name]]
    judge = make()
    with pytest.raises(JudgeFault, match="after 3 attempts") as caught:
        await judge.judge("Write about rain.", "Rain, yay!", "cute")
    assert isinstance(caught.value, EnvironmentFault)
    assert len(server.bodies) == 3
    assert (judge.costs.faults, judge.costs.retries, judge.costs.completion_tokens) == (1, 2, 60)
    assert server.bodies[1]["temperature"] > server.bodies[0]["temperature"], "the same again would say the same again"


@pytest.mark.parametrize("usage", ['{"prompt_tokens": Infinity}', '{"prompt_tokens": "many"}', "[1]", "7"])
async def test_a_judge_that_lies_about_its_tokens_crashes_nothing(server: Server, make: Make, usage: str) -> None:
    """Case G1: an odd bill is a fault of the judge at most."""
    message = json.dumps({"finish_reason": "stop", "message": {"content": json.dumps(GOOD)}})

    async def answer(_: dict[str, Any]) -> web.Response:
        return web.Response(text=f'{{"usage": {usage}, "choices": [{message}]}}')

    server.answers = [answer]
    try:
        assert (await make(attempts=1).judge("p", "t", "cute")).quality == 1
    except JudgeFault:
        assert not usage.startswith("{")


@pytest.mark.parametrize(
    "content",
    [
        f"<think>Maybe {json.dumps({**GOOD, 'quality': 0})}? No.</think>\n{json.dumps(GOOD)}",
        f"No, {json.dumps({**GOOD, 'quality': 0})} is wrong.\n</think>\n{json.dumps(GOOD)}",
        f"```json\n{json.dumps(GOOD)}\n```",
        json.dumps({**GOOD, "reasoning": 'It holds "</think>" and {"quality": 0}, and is NOT a FAILURE.'}),
    ],
)
async def test_the_verdict_is_what_stands_after_the_thinking(server: Server, make: Make, content: str) -> None:
    """Case G2: never the first match, never the draft."""
    server.answers = [says(content)]
    assert (await make().judge("p", "t", "cute")).quality == 1


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503])
async def test_a_passing_trouble_is_retried(server: Server, make: Make, code: int) -> None:
    server.answers = [status(code), status(code), says()]
    judge = make()
    assert (await judge.judge("p", "t", "cute")).quality == 1
    assert (judge.costs.calls, judge.costs.retries, judge.costs.faults) == (3, 2, 0)


@pytest.mark.parametrize("code", [302, 400, 401, 403, 404, 413, 422])
async def test_what_will_not_pass_is_not_retried(server: Server, make: Make, code: int) -> None:
    server.answers = [status(code, Location="/elsewhere")]
    with pytest.raises(JudgeFault, match=str(code)):
        await make().judge("p", "t", "cute")
    assert len(server.bodies) == 1


async def test_retry_after_is_waited_for(server: Server, make: Make) -> None:
    server.answers = [status(429, **{"Retry-After": "1"}), says()]
    began = time.monotonic()
    await make().judge("p", "t", "cute")
    assert time.monotonic() - began >= 1.0


async def test_a_retry_after_past_the_deadline_fails_at_once(server: Server, make: Make) -> None:
    server.answers = [status(429, **{"Retry-After": "3600"})]
    with pytest.raises(JudgeFault, match="wait past deadline_s"):
        await asyncio.wait_for(make().judge("p", "t", "cute"), 30)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("header", ["soon", "-5", "nan", "inf", "Fri, 31 Dec 1999 23:59:59 GMT", ""])
async def test_a_retry_after_that_says_nothing_is_backed_off_from(server: Server, make: Make, header: str) -> None:
    server.answers = [status(503, **{"Retry-After": header}), says()]
    assert (await asyncio.wait_for(make().judge("p", "t", "cute"), 30)).quality == 1


async def test_a_slow_judge_is_a_fault_and_its_requests_are_dropped(server: Server, make: Make) -> None:
    """Case G1: slow, by request and as a whole."""
    server.answers = [hangs]
    with pytest.raises(JudgeFault, match="did not answer"):
        await make(request_timeout_s=0.1).judge("p", "t", "cute")
    judge = make(deadline_s=0.3)
    with pytest.raises(JudgeFault, match="deadline_s"):
        await judge.judge("p", "t", "cute")
    assert judge.costs.faults == 1


async def test_a_judge_that_is_down_is_a_fault(make: Make) -> None:
    """Case G1: nothing listens there."""
    judge = make(url="http://127.0.0.1:9/v1")
    with pytest.raises(JudgeFault, match="did not answer"):
        await judge.judge("p", "t", "cute")
    assert judge.costs.calls == 3


async def test_an_endless_answer_does_not_fill_the_memory(server: Server, make: Make) -> None:
    async def endless(body: dict[str, Any]) -> web.Response:
        return web.Response(body=b" " * (3 << 20))

    server.answers = [endless]
    with pytest.raises(JudgeFault, match="longer than"):
        await make().judge("p", "t", "cute")


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"null", b'{"choices": []}', b'{"choices": [{}, {}]}', b'{"choices": 3}']
)
async def test_a_reply_that_is_no_completion_is_a_fault(server: Server, make: Make, body: bytes) -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        return web.Response(body=body)

    server.answers = [answer]
    with pytest.raises(JudgeFault, match="after 3 attempts"):
        await make().judge("p", "t", "cute")


async def test_no_more_requests_at_once_than_allowed(server: Server, make: Make) -> None:
    async def slowly(body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(0.02)
        return completion(json.dumps(GOOD))

    server.answers = [slowly]
    judge = make(concurrency=3)
    await asyncio.gather(*(judge.judge("p", f"text {i}", "cute") for i in range(20)))
    assert (server.most_at_once, len(server.bodies)) == (3, 20)


async def test_a_cancelled_verdict_leaves_no_request_behind(server: Server, make: Make) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def watched(body: dict[str, Any]) -> web.Response:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return completion(json.dumps(GOOD))

    server.answers = [watched]
    judge = make(concurrency=1)
    task = asyncio.create_task(judge.judge("p", "t", "cute"))
    await asyncio.wait_for(started.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 30)
    server.answers = [says()]
    assert (await asyncio.wait_for(judge.judge("p", "t", "cute"), 30)).quality == 1, "its slot is free again"


async def test_the_key_is_read_from_the_environment(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    monkeypatch.setenv("OTHER_KEY", "abc")
    await make().judge("p", "t", "cute")
    await make(api_key_env="OTHER_KEY").judge("p", "t", "cute")
    assert "Authorization" not in server.headers[0]
    assert server.headers[1]["Authorization"] == "Bearer abc"
