"""An adapter published in place of whole weights: what is sampled is of the base with the newest one, in flight too."""

from __future__ import annotations

import json
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import VLLM_READY_S, VLLM_TEST_S, make_model
from transformers import AutoModelForCausalLM
from vllm_tools import have_vllm

from agent.child_processes import stop_child
from agent.engines import adapters
from agent.engines.base import Completion, EngineFault, EngineRefused
from agent.engines.client import HttpEngine
from agent.engines.local.launch import launch_local
from agent.engines.vllm.launch import launch_vllm
from agent.episode import SamplingParams
from learner.config import AdapterConfig
from learner.model.adapter import add_adapter, switched_off, write_adapter

PROMPT = tuple(range(3, 30))
# The published adapter changes log-probs by whole nats; kernels differ by a hundred-thousandth.
SAME, OTHER = 1e-3, 0.1


async def on_local(model: Path, log: Path) -> tuple[Process, str]:
    return await launch_local(model, version=0, log=log, max_context=2048, max_sequences=8)


async def on_vllm(model: Path, log: Path) -> tuple[Process, str]:
    limits = {"max_context": 2048, "max_sequences": 8, "ready_timeout_s": VLLM_READY_S}
    return await launch_vllm(model, version=0, log=log, dtype="float32", **limits)  # type: ignore[arg-type]


class Policy:
    """A base and an adapter as a trainer holds them."""

    def __init__(self, folder: Path, *, layers: int = 2, **adapter: Any) -> None:
        self.folder = folder
        # head_dim: vLLM's CPU attention starts at 32. Layers: an answer must not be over before a publication.
        self.base = make_model(folder / "base", "dense", 1, head_dim=32, num_hidden_layers=layers)
        self.model = AutoModelForCausalLM.from_pretrained(self.base).eval()
        add_adapter(self.model, AdapterConfig(rank=4, **adapter))

    def publishable(self, number: int) -> Path:
        """Another adapter, as a folder; number 0 is a fresh one."""
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if number and "lora_B" in name:
                    parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        write_adapter(self.model, self.base, self.folder / f"adapter{number}")
        return self.folder / f"adapter{number}"

    def apart(self, completion: Completion, start: int = 0) -> float:
        """How far the engine's log-probs are from the model's, from token `start` on."""
        ids = torch.tensor([[*PROMPT, *completion.token_ids]])
        first = len(PROMPT)
        with torch.no_grad():
            scores = self.model(ids).logits[0, first - 1 : -1].log_softmax(-1)
        found = scores.gather(-1, ids[0, first:, None]).squeeze(-1)
        return float((found - torch.tensor(completion.logprobs))[start:].abs().max())


async def follows_the_policy(
    policy: Policy, launch: Callable[[Path, Path], Awaitable[tuple[Process, str]]], *, long: int
) -> None:
    process, url = await launch(policy.publishable(0), policy.folder / "log")
    engine = HttpEngine(url, timeout_s=300)
    try:
        assert (await engine.health()).version == 0
        assert policy.apart(await engine.generate(PROMPT, SamplingParams(max_tokens=24))) < SAME
        for version in (1, 2):
            folder = policy.publishable(version)
            under_way = engine.stream(PROMPT, SamplingParams(max_tokens=long))
            assert (await anext(under_way)).completion is None
            await engine.publish(version, folder)
            assert (await engine.health()).version == version
            for _ in range(2):  # the second finds the first one's keys and values
                completion = await engine.generate(PROMPT, SamplingParams(max_tokens=24))
                assert set(completion.versions) == {version}
                assert policy.apart(completion) < SAME
            with switched_off(policy.model):
                assert policy.apart(completion) > OTHER
            [*_, last] = [partial async for partial in under_way]
            assert last.completion is not None
            completion = last.completion
            assert (completion.versions[0], completion.versions[-1]) == (version - 1, version)
            first_new = completion.versions.index(version)
            assert policy.apart(completion, first_new) < SAME
        cut = policy.folder / "cut"
        cut.mkdir()
        (cut / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
        with pytest.raises(EngineFault, match="/v1/load_lora_adapter"):
            await engine.publish(3, cut)
        completion = await engine.generate(PROMPT, SamplingParams(max_tokens=24))
        assert set(completion.versions) == {2}
        assert policy.apart(completion) < SAME
    finally:
        await engine.close()
        await stop_child(process)


@pytest.mark.timeout(600)
async def test_the_local_engine_serves_each_adapter_as_the_trainer_computes_it(tmp_path: Path) -> None:
    await follows_the_policy(Policy(tmp_path), on_local, long=150)


async def test_an_engine_that_was_started_without_an_adapter_is_given_none(tmp_path: Path) -> None:
    """Requests that are in flight would end without it, under its version."""
    policy = Policy(tmp_path, targets="attention")
    engine = HttpEngine("http://127.0.0.1:9")

    async def only_the_base() -> list[Any]:
        return []

    engine._models = only_the_base  # type: ignore[method-assign]
    with pytest.raises(EngineRefused, match=r"no adapter 'policy' from its start; docs/engines\.md"):
        await engine.publish(1, policy.publishable(1))
    await engine.close()


def test_an_adapters_folder_says_what_it_is_for(tmp_path: Path) -> None:
    assert adapters.base_of(tmp_path) is None
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 12, "base_model_name_or_path": "/models/base"}))
    assert adapters.base_of(tmp_path) == Path("/models/base")
    assert adapters.room_for(tmp_path) == 16
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 600, "base_model_name_or_path": "/models/base"}))
    with pytest.raises(EngineFault, match="rank 600, and vLLM serves 512 at most"):
        adapters.room_for(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(EngineFault, match="cannot read the adapter"):
        adapters.base_of(tmp_path)


if have_vllm():  # or else not collected, as in conftest.py

    @pytest.mark.vllm
    @pytest.mark.timeout(VLLM_TEST_S)
    @pytest.mark.xdist_group("vllm-dense")
    async def test_vllm_serves_each_adapter_as_the_trainer_computes_it(tmp_path: Path) -> None:
        await follows_the_policy(Policy(tmp_path, layers=24), on_vllm, long=500)
