"""The gate before training: engine and trainer must give the same tokens the same log-probs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from learner_tools import micro_recipe, write_micro_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from agent.engines.base import Completion
from agent.engines.client import HttpEngine
from agent.engines.local.launch import local_engine
from agent.episode import SamplingParams
from learner.config import ModelConfig
from learner.losses import log_bounds
from learner.model.forward import PolicyForward
from learner.model.loading import load_policy_model
from learner.probes import parity_report

BOUNDS = log_bounds(0.3, 5.0)
PROMPTS = [[1, 2, 3], [9, 8, 7, 6], [5]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return micro_recipe(tmp_path_factory.mktemp("recipe")).model


@pytest.fixture(scope="module")
def sharp_model(tmp_path_factory: pytest.TempPathFactory, config: ModelConfig) -> Path:
    """A micro model whose distribution is far from uniform, as a trained one's is."""
    folder = write_micro_model(tmp_path_factory.mktemp("model") / "sharp", seed=4)
    model = load_policy_model(folder, config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def sampled(policy: PolicyForward, *, tokens: int = 24, top_k: int | None = None) -> list[Completion]:
    """What an engine with these weights and this temperature would send, its log-probs those it sampled from."""
    generator, found = torch.Generator().manual_seed(0), []
    for prompt in PROMPTS:
        ids, logprobs = list(prompt), []
        for _ in range(tokens):
            logits = policy.model(torch.tensor([ids])).logits[0, -1].float() / policy.temperature
            if top_k:
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            table = torch.log_softmax(logits, -1)
            token = int(torch.multinomial(table.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(table[token]))
        found.append(Completion(tuple(ids[len(prompt) :]), tuple(logprobs), (3,) * tokens, "length"))
    return found


def compare(policy: PolicyForward, completions: list[Completion]) -> parity_report.ParityReport:
    return parity_report.compare(policy, PROMPTS, completions, bounds=BOUNDS, threshold=0.02)


async def test_a_real_engine_with_the_trainers_weights_passes_and_with_others_does_not(
    sharp_model: Path, config: ModelConfig, tmp_path: Path
) -> None:
    """Case H5, over HTTP: the engine's log-probs are the trainer's, at a temperature of its own too."""
    rng = random.Random(0)
    prompts = [[rng.randrange(260) for _ in range(rng.randint(2, 12))] for _ in range(6)]
    sampling = SamplingParams(temperature=0.7, max_tokens=24)
    async with local_engine(sharp_model, version=3, log=tmp_path / "engine.log") as url:
        engine = HttpEngine(url)
        try:
            completions = await parity_report.sample(engine, prompts, sampling)
        finally:
            await engine.close()
    own = PolicyForward(load_policy_model(sharp_model, config), temperature=0.7)
    report = parity_report.compare(own, prompts, completions, bounds=BOUNDS, threshold=1e-4)
    assert report.mean_difference < 1e-5
    assert report.max_ratio == pytest.approx(1.0, abs=1e-3)
    assert (report.version, report.gated_share, report.cause) == (3, 0.0, "")
    other = PolicyForward(load_policy_model(write_micro_model(tmp_path / "other", seed=9), config), temperature=0.7)
    report = parity_report.compare(other, prompts, completions, bounds=BOUNDS, threshold=0.02)
    assert report.mean_difference > 0.02
    assert "different weights" in report.cause
    assert "different weights" in str(report)


def test_a_forgotten_temperature_is_named_with_both_values(sharp_model: Path, config: ModelConfig) -> None:
    """Case H5, and A19: the engine samples at .5, the learner scores at 1."""
    model = load_policy_model(sharp_model, config)
    completions = sampled(PolicyForward(model, temperature=0.5))
    policy = PolicyForward(model)
    report = compare(policy, completions)
    assert report.mean_difference > 0.02
    assert report.cause.startswith("temperature")
    assert "0.5" in report.cause
    assert policy.temperature == 1.0  # the search put it back
    assert compare(PolicyForward(model, temperature=0.5), completions).cause == ""


def test_truncated_sampling_is_named(sharp_model: Path, config: ModelConfig) -> None:
    """Case H5: top-k (and top-p) make every log-prob of the engine larger than the trainer's."""
    policy = PolicyForward(load_policy_model(sharp_model, config))
    assert compare(policy, sampled(policy, top_k=4)).cause.startswith("truncated sampling")


def test_dropout_in_the_trainer_is_named(tmp_path: Path) -> None:
    """Cases H4 and H5."""
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(shape).eval()
    nn.init.normal_(model.get_output_embeddings().weight)
    policy = PolicyForward(model).eval()
    completions = sampled(policy)
    assert compare(policy, completions).cause == ""
    policy.train()
    assert compare(policy, completions).cause.startswith("dropout is on")


def test_other_weights_are_named(sharp_model: Path, config: ModelConfig) -> None:
    """Case H5."""
    completions = sampled(PolicyForward(load_policy_model(sharp_model, config)))
    model = load_policy_model(sharp_model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    assert "different weights" in compare(PolicyForward(model), completions).cause


def test_a_small_difference_is_put_down_to_precision(sharp_model: Path, config: ModelConfig) -> None:
    """Case H5: bfloat16 on one side only."""
    completions = sampled(PolicyForward(load_policy_model(sharp_model, config)))
    narrow = load_policy_model(sharp_model, config.model_copy(update={"dtype": "bfloat16"}))
    report = parity_report.compare(PolicyForward(narrow), PROMPTS, completions, bounds=BOUNDS, threshold=1e-5)
    assert 1e-5 < report.mean_difference < 0.05
    assert report.cause.startswith("dtype")


def test_a_log_prob_that_is_no_number_fails_the_gate(sharp_model: Path, config: ModelConfig) -> None:
    policy = PolicyForward(load_policy_model(sharp_model, config))
    broken = [Completion(c.token_ids, (-torch.inf, *c.logprobs[1:]), c.versions, "length") for c in sampled(policy)]
    report = compare(policy, broken)
    assert not report.mean_difference <= 0.02
    assert report.cause
