"""A served policy that is a base and adapters: publications, holds, rollbacks and restarts, the start included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from serve_tools import client, serving, write_models, write_recipe
from transformers import AutoModelForCausalLM
from vllm_tools import have_vllm

from agent.engines.base import EngineRefused
from agent.engines.client import HttpEngine
from agent.episode import SamplingParams
from agent.serve.config import ServeError
from agent.serve.versions.starting_adapter import write_empty_adapter
from learner.config import AdapterConfig
from learner.model.adapter import add_adapter, write_adapter

PROMPT = tuple(range(3, 20))
SAME = 1e-3


class Policy:
    """The base as a trainer holds it, with an adapter of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shape = {"experts": 0, "hidden_size": 64, "head_dim": 32, "expert_width": 64}
        self.base = write_models(folder, **shape)[0]
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.base).eval()
        add_adapter(self.model, AdapterConfig(rank=4))

    def publishable(self, number: int) -> Path:
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        write_adapter(self.model, self.base, self.folder / f"adapter{number}")
        return self.folder / f"adapter{number}"

    def recipe(self) -> Path:
        path = write_recipe(self.folder, self.base)
        data = yaml.safe_load(path.read_text())
        data["model"] |= {"policy_adapter": {"rank": 4}, "dtype": "float32"}
        path.write_text(yaml.safe_dump(data))
        return path


async def scores(engine: HttpEngine) -> tuple[int, list[float]]:
    """The version of a greedy answer and its log-probs: another adapter, other numbers."""
    answer = await engine.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0.0))
    return answer.versions[0], list(answer.logprobs)


async def follows_publications(policy: Policy, *words: str, within_s: float) -> None:
    recipe = policy.recipe()
    with serving(recipe, *words, within_s=within_s) as server:
        learner = HttpEngine(server.engine, key=server.key)
        version, base = await scores(learner)
        assert version == 0
        await learner.publish(1, policy.publishable(1))
        version, first = await scores(learner)
        assert version == 1
        assert first != pytest.approx(base, abs=SAME)
        await learner.publish(2, policy.publishable(2))
        _, second = await scores(learner)
        assert second != pytest.approx(first, abs=SAME)
        with pytest.raises(EngineRefused, match="next_version=3"):
            await learner.publish(2, policy.publishable(3))
        async with client(server.url) as api:
            for old, new, wanted in ((0, 3, base), (1, 4, first)):
                status, answer = await api.call("POST", "/v1/versions/rollback", {"version": old})
                assert (status, answer["version"]) == (200, new)
                assert await scores(learner) == (new, pytest.approx(wanted, abs=SAME))
        await learner.close()
    with serving(recipe, *words, within_s=within_s) as server:  # case G7
        learner = HttpEngine(server.engine, key=server.key)
        assert await scores(learner) == (4, pytest.approx(first, abs=SAME))
        await learner.close()


@pytest.mark.timeout(300)
async def test_a_server_publishes_and_takes_back_adapters(tmp_path: Path) -> None:
    """It kept versions as whole weights only, and refused them."""
    await follows_publications(Policy(tmp_path), within_s=120)


@pytest.mark.vllm
@pytest.mark.xdist_group("serve-vllm")
@pytest.mark.timeout(900)
@pytest.mark.skipif(not have_vllm(), reason="vLLM's environment is not here: make vllm")
async def test_a_server_publishes_and_takes_back_adapters_on_vllm(tmp_path: Path) -> None:
    await follows_publications(Policy(tmp_path), "engine.launch=vllm", within_s=600)


def test_a_base_without_query_projections_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"policy_adapter\.publish=merged"):
        write_empty_adapter(tmp_path, tmp_path / "adapter", rank=4, alpha=8.0)
    assert not (tmp_path / "adapter").exists()


def test_the_starting_adapter_names_its_base_and_is_written_at_once(tmp_path: Path) -> None:
    base, _ = write_models(tmp_path / "models", experts=0)
    write_empty_adapter(base, tmp_path / "run" / "adapter", rank=4, alpha=8.0)
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    assert (config["r"], config["target_modules"]) == (4, ["q_proj"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["adapter"]
