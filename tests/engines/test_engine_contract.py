"""What every engine must do. One suite for all of them: the fixture `engine` decides which one runs."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import pytest
import torch
from engine_tools import VOCABULARY, EngineUnderTest
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent.engines.base import Completion, ContextOverflow, EngineFault, EngineHealth, EngineRefused
from agent.engines.client import HttpEngine
from agent.episode import SamplingParams

TOLERANCE = 1e-4  # float32, engine against a plain forward
LONG = 1500  # tokens: no engine has sampled them before what is to happen in flight; then they are cut short


@functools.cache
def _model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logits(folder: Path, prompt: Sequence[int], action: Sequence[int]) -> torch.Tensor:
    """Logits float32[len(action), V] of transformers' own forward over the whole sequence, without any cache."""
    logits = _model(folder)(torch.tensor([[*prompt, *action]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : len(prompt) + len(action) - 1].float()


def reference(folder: Path, prompt: Sequence[int], action: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs float32[len(action)]."""
    logprobs = (reference_logits(folder, prompt, action) / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(action)[:, None])[:, 0]


def assert_same(logprobs: Sequence[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


async def until(
    engine: EngineUnderTest, holds: Callable[[EngineHealth], bool], timeout_s: float = 120.0
) -> EngineHealth:
    """Ask for the engine's health until `holds`."""
    deadline = time.monotonic() + timeout_s
    while not holds(health := await engine.client.health()):
        assert time.monotonic() < deadline, health
        await asyncio.sleep(0.005)
    return health


async def until_more(engine: EngineUnderTest, tokens: int) -> None:
    """Until the engine has sampled `tokens` more, or has nothing left to sample."""
    now = (await engine.client.health()).tokens_generated
    await until(engine, lambda health: health.tokens_generated >= now + tokens or health.running == 0)


async def test_every_token_has_its_logprob_and_version(engine: EngineUnderTest) -> None:
    """Case B4: log-probs are always there, one a token; so are versions."""
    done = await engine.client.generate([1, 2, 3], SamplingParams(max_tokens=7))
    assert len(done.token_ids) == len(done.logprobs) == len(done.versions) == 7
    assert done.finish_reason == "length"
    assert set(done.versions) == {engine.version}
    assert all(p <= 0 for p in done.logprobs)


async def test_logprobs_equal_a_plain_forward_over_many_turns_and_lengths(engine: EngineUnderTest) -> None:
    """Case H5 from the engine's side: no cache, batch or chunk may move a log-prob."""

    async def episode(seed: int) -> list[tuple[list[int], Completion]]:
        rng, context, turns = random.Random(seed), prompt_of(rng_length(seed), seed), []
        for _ in range(3):
            done = await engine.client.generate(context, SamplingParams(max_tokens=rng.randint(1, 12)))
            turns.append((context, done))
            context = [*context, *done.token_ids, *prompt_of(rng.randint(1, 20), rng.randrange(1000))]
        return turns

    def rng_length(seed: int) -> int:
        return [1, 2, 17, 60, 300][seed % 5]

    episodes = await asyncio.gather(*(episode(seed) for seed in range(20)))
    for prompt, done in (turn for turns in episodes for turn in turns):
        assert_same(done.logprobs, reference(engine.first, prompt, done.token_ids))


async def test_later_turns_read_only_what_is_new(engine: EngineUnderTest) -> None:
    if not engine.counts_reused_tokens:
        pytest.skip("this engine shares prefixes by blocks")
    prompt = prompt_of(200, seed=5)
    first = await engine.client.generate(prompt, SamplingParams(max_tokens=8))
    before = await reused_tokens(engine)
    await engine.client.generate([*prompt, *first.token_ids, 1, 2], SamplingParams(max_tokens=1))
    assert await reused_tokens(engine) - before == 200 + 8 - 1  # the last sampled token was never read


async def reused_tokens(engine: EngineUnderTest) -> int:
    async with aiohttp.ClientSession() as session, session.get(engine.client.url + "/metrics") as response:
        text = await response.text()
    (line,) = [row for row in text.splitlines() if row.startswith("vllm:prefix_cache_hits_total")]
    return int(float(line.rpartition(" ")[2]))


async def test_a_swap_in_flight_keeps_tokens_and_marks_versions(engine: EngineUnderTest) -> None:
    """Case A20: log-probs and versions by token; the old tokens stay, the new ones see them through new weights."""
    start = (await engine.client.health()).tokens_generated
    prompts = [prompt_of(5 + 20 * i, seed=i) for i in range(4)]
    sampling = SamplingParams(max_tokens=LONG)
    running = [
        asyncio.create_task(engine.client.generate(p, sampling, request_id=f"swap-{i}")) for i, p in enumerate(prompts)
    ]
    await until(engine, lambda health: health.tokens_generated >= start + 100)
    await engine.client.publish(engine.version + 1, engine.second)
    await until_more(engine, 400)
    for i in range(len(prompts)):
        await engine.client.abort(f"swap-{i}")
    for prompt, done in zip(prompts, await asyncio.gather(*running), strict=True):
        assert sorted(done.versions) == list(done.versions)
        assert set(done.versions) == {engine.version, engine.version + 1}
        cut = done.versions.index(engine.version + 1)
        assert_same(done.logprobs[:cut], reference(engine.first, prompt, done.token_ids)[:cut])
        assert_same(done.logprobs[cut:], reference(engine.second, prompt, done.token_ids)[cut:])


async def test_a_prefix_of_old_weights_is_not_served_as_new(engine: EngineUnderTest) -> None:
    """Case D6."""
    prompt = prompt_of(300, seed=9)  # vLLM shares whole blocks, of 128 tokens on a CPU
    first = await engine.client.generate(prompt, SamplingParams(max_tokens=5))
    await engine.client.publish(engine.version + 1, engine.second)
    context = [*prompt, *first.token_ids, 3, 4]
    second = await engine.client.generate(context, SamplingParams(max_tokens=5))
    assert set(second.versions) == {engine.version + 1}
    assert_same(second.logprobs, reference(engine.second, context, second.token_ids))


async def test_a_cache_is_stale_only_where_that_was_asked_for(engine: EngineUnderTest) -> None:
    """Case D6, the other way round: `keep_stale_cache` reads on what the old weights wrote, and clears nothing."""
    keeping = HttpEngine(engine.client.url, keep_stale_cache=True)
    prompt = prompt_of(300, seed=9)
    sampling = SamplingParams(max_tokens=60)
    try:
        start = (await engine.client.health()).tokens_generated
        running = asyncio.create_task(keeping.generate(prompt, SamplingParams(max_tokens=LONG), request_id="kept"))
        await until(engine, lambda health: health.tokens_generated >= start + 50)
        await keeping.publish(engine.version + 1, engine.second)
        await until_more(engine, 200)
        await keeping.abort("kept")
        kept = await running
        cut = kept.versions.index(engine.version + 1)
        fresh = reference(engine.second, prompt, kept.token_ids)[cut:]
        assert_same(kept.logprobs[:cut], reference(engine.first, prompt, kept.token_ids)[:cut])
        assert (torch.tensor(kept.logprobs[cut:]) - fresh).abs().max() > 100 * TOLERANCE
    finally:
        await keeping.close()
    await engine.client.publish(engine.version + 2, engine.second)
    done = await engine.client.generate(prompt, sampling)
    assert set(done.versions) == {engine.version + 2}
    assert_same(done.logprobs, reference(engine.second, prompt, done.token_ids))


async def test_a_bad_snapshot_changes_nothing(engine: EngineUnderTest, tmp_path: Path) -> None:
    with pytest.raises(EngineRefused if engine.says_whose_fault else EngineFault, match=r"nothing|no snapshot"):
        await engine.client.publish(engine.version + 1, tmp_path / "nothing")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(EngineFault):
        await engine.client.publish(engine.version + 1, tmp_path)
    done = await engine.client.generate([1, 2, 3], SamplingParams(max_tokens=3))
    assert set(done.versions) == {engine.version}
    assert_same(done.logprobs, reference(engine.first, [1, 2, 3], done.token_ids))


async def test_weights_that_give_nan_are_a_fault_and_not_a_logprob(engine: EngineUnderTest) -> None:
    await engine.client.publish(engine.version + 1, engine.broken)
    with pytest.raises(EngineFault):
        await engine.client.generate([1, 2, 3], SamplingParams(max_tokens=3))
    await engine.client.publish(engine.version + 2, engine.first)
    done = await engine.client.generate([1, 2, 3], SamplingParams(max_tokens=3))
    assert_same(done.logprobs, reference(engine.first, [1, 2, 3], done.token_ids))


async def test_an_abort_returns_the_tokens_so_far(engine: EngineUnderTest) -> None:
    start = (await engine.client.health()).tokens_generated
    running = asyncio.create_task(
        engine.client.generate([1, 2], SamplingParams(max_tokens=engine.max_context), request_id="doomed")
    )
    await until(engine, lambda health: health.tokens_generated >= start + 3)
    await engine.client.abort("doomed")
    done = await running
    assert done.finish_reason == "abort"
    assert 3 <= len(done.token_ids) == len(done.logprobs) == len(done.versions)
    assert_same(done.logprobs, reference(engine.first, [1, 2], done.token_ids))
    await engine.client.abort("never there")


async def test_cancelling_frees_the_slot(engine: EngineUnderTest) -> None:
    start = (await engine.client.health()).tokens_generated
    sampling = SamplingParams(max_tokens=engine.max_context)
    running = [asyncio.create_task(engine.client.generate([1, i], sampling)) for i in range(8)]
    await until(engine, lambda health: health.running == 8 and health.tokens_generated > start)
    for task in running:
        task.cancel()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results)
    health = await until(engine, lambda health: health.running == 0)
    assert health.waiting == 0
    assert health.tokens_generated - start < 8 * (engine.max_context - 2), "nothing was cut short"


async def test_a_client_that_goes_away_stops_its_generation(engine: EngineUnderTest) -> None:
    """Case G6, for a client that dies before it can ask for an abort."""
    # As many as fit, because one alone may be at its end before anyone has seen that its client is gone.
    start, count = (await engine.client.health()).tokens_generated, engine.max_sequences
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": engine.max_context - 2, "logprobs": 0}}
    async with aiohttp.ClientSession() as session:
        url = engine.client.url + "/inference/v1/generate"
        calls = [asyncio.create_task(session.post(url, json=body)) for _ in range(count)]
        await until(engine, lambda health: health.tokens_generated > start)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    health = await until(engine, lambda health: health.running == 0)
    assert health.tokens_generated - start < count * (engine.max_context - 2), "they ran to their ends"


async def test_a_pause_keeps_requests_and_resume_goes_on(engine: EngineUnderTest) -> None:
    async with aiohttp.ClientSession(engine.client.url) as session:
        start = (await engine.client.health()).tokens_generated
        sampling = SamplingParams(max_tokens=LONG)
        running = asyncio.create_task(engine.client.generate([1, 2], sampling, request_id="paused"))
        await until(engine, lambda health: health.tokens_generated > start)
        async with session.post("/pause?mode=keep") as response:
            assert response.status == 200
        paused_at = (await engine.client.health()).tokens_generated
        late = asyncio.create_task(engine.client.generate([3], SamplingParams(max_tokens=1)))
        for _ in range(20):
            assert (await engine.client.health()).tokens_generated == paused_at < start + LONG
        async with session.post("/resume") as response:
            assert response.status == 200
    assert len((await late).token_ids) == 1
    await until_more(engine, 50)
    await engine.client.abort("paused")
    assert_same((done := await running).logprobs, reference(engine.first, [1, 2], done.token_ids))
    assert len(done.token_ids) > paused_at - start


async def test_past_the_time_limit_the_request_is_gone(engine: EngineUnderTest) -> None:
    with pytest.raises(EngineFault, match="no answer within"):
        await engine.client.generate([1, 2], SamplingParams(max_tokens=engine.max_context), timeout_s=0.02)
    await until(engine, lambda health: health.running == 0)


async def test_the_stop_token_is_part_of_the_action(engine: EngineUnderTest) -> None:
    """Case B8: the stop token, if sampled, is an action token with its log-prob."""
    stops = tuple(range(0, VOCABULARY, 4))
    done = await engine.client.generate([5, 6], SamplingParams(max_tokens=400, stop_token_ids=stops))
    assert done.finish_reason == "stop"
    assert [t in stops for t in done.token_ids] == [False] * (len(done.token_ids) - 1) + [True]
    assert_same(done.logprobs, reference(engine.first, [5, 6], done.token_ids))


async def test_a_full_context_ends_with_length(engine: EngineUnderTest) -> None:
    prompt = prompt_of(engine.max_context - 3)
    done = await engine.client.generate(prompt, SamplingParams(max_tokens=50))
    assert (done.finish_reason, len(done.token_ids)) == ("length", 3)
    assert_same(done.logprobs, reference(engine.first, prompt, done.token_ids))


async def test_a_seed_gives_the_same_action_alone_and_in_a_crowd(engine: EngineUnderTest) -> None:
    async def run(seed: int | None) -> tuple[int, ...]:
        return (await engine.client.generate([7, 8, 9], SamplingParams(max_tokens=20, seed=seed))).token_ids

    alone = await run(1)
    crowd = await asyncio.gather(*(run(s) for s in [None, 1, 2, None, 1, 3]))
    assert crowd[1] == crowd[4] == alone
    assert len({crowd[0], crowd[1], crowd[2], crowd[3], crowd[5]}) == 5


@pytest.mark.parametrize("temperature", [0.5, 1.7])
async def test_logprobs_are_of_the_tempered_distribution(engine: EngineUnderTest, temperature: float) -> None:
    """Case A19, engine side."""
    done = await engine.client.generate([3, 1], SamplingParams(max_tokens=30, temperature=temperature))
    assert_same(done.logprobs, reference(engine.first, [3, 1], done.token_ids, temperature))


async def test_temperature_zero_takes_the_best_token(engine: EngineUnderTest) -> None:
    done = await engine.client.generate([3, 1], SamplingParams(max_tokens=10, temperature=0.0))
    best = reference_logits(engine.first, [3, 1], done.token_ids).argmax(-1)
    assert list(done.token_ids) == best.tolist()


async def test_logprobs_are_of_what_top_k_and_top_p_leave(engine: EngineUnderTest) -> None:
    done = await engine.client.generate([3, 1], SamplingParams(max_tokens=30, top_k=5, top_p=0.8))
    for token, logprob, logits in zip(
        done.token_ids, done.logprobs, reference_logits(engine.first, [3, 1], done.token_ids), strict=True
    ):
        kept, mass = [], 0.0
        for rank in logits.argsort(descending=True)[:5].tolist():
            if mass >= 0.8:
                break
            kept.append(rank)
            mass = float(
                logits.softmax(-1)[kept].sum() / logits.topk(5).values.logsumexp(-1).sub(logits.logsumexp(-1)).exp()
            )
        assert token in kept
        expected = logits[token] - logits[kept].logsumexp(-1)
        assert logprob == pytest.approx(expected.item(), abs=TOLERANCE)


async def test_a_prompt_beyond_the_context_is_refused_by_its_own_error(engine: EngineUnderTest) -> None:
    with pytest.raises(ContextOverflow):
        await engine.client.generate(prompt_of(engine.max_context), SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([], SamplingParams()),
        ([VOCABULARY], SamplingParams()),
        ([-1], SamplingParams()),
        ([1], SamplingParams(temperature=-1.0)),
        ([1], SamplingParams(top_p=0.0)),
        ([1], SamplingParams(top_k=-5)),
        ([1], SamplingParams(max_tokens=0)),
    ],
)
async def test_bad_input_is_refused_and_harms_nobody(
    engine: EngineUnderTest, prompt: list[int], sampling: SamplingParams
) -> None:
    if prompt == [VOCABULARY] and not engine.knows_vocabulary:
        pytest.skip("this engine takes the vocabulary from a tokenizer, which the model under test lacks")
    good = asyncio.create_task(engine.client.generate([1, 2], SamplingParams(max_tokens=20)))
    with pytest.raises(EngineRefused) as refusal:
        await engine.client.generate(prompt, sampling)
    assert 400 <= refusal.value.status < 500
    assert len((await good).token_ids) == 20


async def test_more_requests_than_slots_all_end(engine: EngineUnderTest) -> None:
    async def run(i: int) -> Completion:
        return await engine.client.generate(prompt_of(1 + i % 40, seed=i), SamplingParams(max_tokens=1 + i % 13))

    calls: list[Awaitable[Completion]] = [run(i) for i in range(3 * engine.max_sequences)]
    done = await asyncio.gather(*calls)
    assert [len(d.token_ids) for d in done] == [1 + i % 13 for i in range(len(done))]
    for i in (0, 39, 64):
        assert_same(done[i].logprobs, reference(engine.first, prompt_of(1 + i % 40, seed=i), done[i].token_ids))
    health = await engine.client.health()
    assert (health.running, health.waiting, health.max_context) == (0, 0, engine.max_context)
