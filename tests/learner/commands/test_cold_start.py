"""The tiny tokenizer, and that traces are encoded as the runtime records episodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from learner_tools import write_micro_model

from agent.chat.renderer import ChatRenderer
from envs import make_core
from envs.core import Message
from envs.python_tir.traces import write_traces
from learner.data.traces import encode_trace
from learner.model.tiny import SPECIAL_TOKENS, TAGS, train_tokenizer
from learner.sft import batches


@pytest.fixture(scope="module")
def traces() -> list[list[Message]]:
    """Traces over the tiny recipe's own problems, executed by a real interpreter, a third of them imperfect."""
    return asyncio.run(written())


async def written() -> list[list[Message]]:
    env = make_core(
        "sao/PythonTIR-v0", problems={"source": "tiny_fold", "size": 200, "seed": 5}, system_prompt="", max_turns=12
    )
    try:
        return [
            messages
            for rate, ids in ((0.0, env.task_ids[:16]), (0.9, env.task_ids[16:24]))
            async for messages in write_traces(env, list(ids), seed=1, error_rate=rate)
        ]
    finally:
        await env.aclose()


def texts(traces: list[list[Message]]) -> list[str]:
    return [f"{m['role']}\n{m['content']}" for messages in traces for m in messages]


def test_the_vocabulary_stays_within_its_size_and_tags_are_single_tokens(
    traces: list[list[Message]],
) -> None:
    tokenizer = train_tokenizer(texts(traces) * 3, 384)
    assert len(tokenizer) <= 384
    for word in (*TAGS, *SPECIAL_TOKENS):
        assert len(tokenizer.encode(f"x{word}y")) == 3, word
    for tag in TAGS:
        assert tag in tokenizer.decode(tokenizer.encode(tag), skip_special_tokens=True)
    assert len(tokenizer.encode("1234")) == 4  # digits stand alone
    for text in (*texts(traces)[:20], "naïve 漢字 \x00 🙂"):
        assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_a_trace_is_encoded_as_the_runtime_would_have_recorded_it(traces: list[list[Message]], tmp_path: Path) -> None:
    """`start` for the prompt, the sampled ids of an action, `extend` for what follows; the mask only on actions."""
    renderer = ChatRenderer.from_pretrained(write_micro_model(tmp_path / "model"))
    assert any(len(messages) > 4 for messages in traces)
    for messages in traces:
        ids, mask = encode_trace(messages, renderer)
        recorded = list(renderer.start(messages[:1], None).token_ids)
        on = [False] * len(recorded)
        for i, message in enumerate(messages[1:], start=1):
            if message["role"] == "assistant":
                action = renderer.encode_action(message["content"])
                recorded += action
                on += [True] * len(action)
            else:
                rendering = renderer.extend(messages[:i], action, [message], None)
                recorded += rendering.token_ids
                on += [False] * len(rendering.token_ids)
        assert ids.tolist() == recorded
        assert mask.tolist() == on
        assert mask[-1]  # the end of the last turn is an action token
        spoken = "".join(m["content"] for m in messages if m["role"] == "assistant")
        assert renderer.decode(ids[mask].tolist()).replace("<|im_end|>", "") == spoken


def test_batches_take_every_example_once_an_epoch() -> None:
    examples = [(torch.full((n + 2,), n), torch.ones(n + 2, dtype=torch.bool)) for n in range(12)]
    seen = [ids for ids, _ in batches(examples, 4, 6, seed=0)]
    first, second = (sorted(int(row[0]) for ids in part for row in ids) for part in (seen[:3], seen[3:]))
    assert first == second == list(range(12))
    for ids, mask in batches(examples, 4, 3, seed=0):
        assert [int(m.sum()) for m in mask] == [int(row[0]) + 2 for row in ids]  # padding is masked
