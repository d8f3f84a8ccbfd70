"""After every publication an engine must show that it samples from the trainer's weights: from all of them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_tools import build_learner, micro_recipe
from safetensors.torch import load_file, save_file

from agent.engines.base import Completion, EngineFault
from agent.engines.client import HttpEngine
from agent.episode import SamplingParams
from learner.config import Recipe
from learner.faults import LearnerFault
from learner.probes.parity_probe import PROBE_PROMPTS, ParityProbe
from learner.run.display import Display
from learner.run.learner import Learner
from learner.run.publication import Publication
from learner.services.processes import Services

_PROBLEMS = {"source": "tiny_fold", "size": 16, "seed": 0}
SECTIONS: dict[str, Any] = {
    "env": {"id": "sao/PythonTIR-v0", "kwargs": {"system_prompt": "", "problems": _PROBLEMS, "spares": 0}},
    "runtime": {"launch": False, "max_context_tokens": 400, "max_tokens_per_turn": 16},
    "learner": {"steps": 8, "batch_size": 8, "parity_threshold": 1e-3},
}


class StaleExpert(Services):
    """Real services whose engine keeps an old expert in the next `times` publications, as a packed kernel would."""

    times = 0

    async def publish(self, version: int, weights: Path, *, timeout_s: float) -> None:
        if self.times > 0:
            self.times -= 1
            weights = await asyncio.to_thread(with_another_expert, weights)
        await super().publish(version, weights, timeout_s=timeout_s)


def with_another_expert(weights: Path) -> Path:
    """A copy of the snapshot in which one expert of the first layer is another one's."""
    copy = weights.parent.with_name("stale") / weights.name
    shutil.copytree(weights, copy, dirs_exist_ok=True)
    tensors = load_file(copy / "model.safetensors")
    names = [name for name in tensors if ".layers.0." in name and ".experts.0." in name]
    assert names, sorted(tensors)
    for name in names:
        tensors[name] = tensors[name.replace(".experts.0.", ".experts.1.")].clone()
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@dataclass
class Parts:
    recipe: Recipe
    learner: Learner
    services: StaleExpert
    publication: Publication


@pytest.fixture
async def parts(micro_model: Path, tmp_path: Path) -> AsyncIterator[Parts]:
    """A publication on real services, store and engine, whose learner has weights that no engine has yet."""
    recipe = micro_recipe(tmp_path, **SECTIONS)
    learner = build_learner(micro_model, tmp_path, **SECTIONS)
    with torch.no_grad():  # a distribution far from uniform, in which an expert matters
        model = learner.policy.unwrapped.model
        model.get_output_embeddings().weight.mul_(4)
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.mul_(6)
    store = {"tasks": 4, "seed": 0}
    async with StaleExpert.start(recipe, model=micro_model, folder=tmp_path / "run", store_config=store) as services:
        assert isinstance(services, StaleExpert)
        probe = await ParityProbe.build(recipe, learner.policy.unwrapped, model=learner.source)
        publication = Publication(recipe, learner, services, tmp_path / "run", Display("probe"), probe)
        learner.progress.version = 1
        yield Parts(recipe, learner, services, publication)


async def test_an_expert_that_stays_old_stops_the_run_at_that_publication(parts: Parts) -> None:
    """Case H5, after every publication: the difference is seen at once, published again, and then it is a fault."""
    figures = await parts.publication.publish()
    assert figures["parity/max_difference"] < 1e-4
    assert (figures["parity/published_again"], figures["parity/unanswered"]) == (0.0, 0.0)
    assert figures["time/publish_s"] > 0
    assert figures["time/probe_s"] > 0

    parts.learner.progress.version, parts.services.times = 2, 1
    figures = await parts.publication.publish()
    assert figures["parity/published_again"] == 1.0
    assert figures["parity/max_difference"] < 1e-4, "the second publication was whole"

    parts.learner.progress.version, parts.services.times = 3, 2
    with pytest.raises(LearnerFault, match=r"after a publication.*version 3.*Likely cause.*published twice"):
        await parts.publication.publish()


async def test_what_a_probe_says_of_engines_that_are_gone_or_behind_and_how_often_it_asks(parts: Parts) -> None:
    config = parts.recipe.learner.model_copy(update={"probe_every": 2})
    parts.publication.recipe = parts.recipe.model_copy(update={"learner": config})
    assert "parity/max_difference" not in await parts.publication.publish(), "version 1 of every second one"
    parts.learner.progress.version = 2
    assert "parity/max_difference" in await parts.publication.publish()

    probe, gone = parts.publication.probe, HttpEngine("http://127.0.0.1:9")
    figures, fault = await probe.check(parts.services.engines, 3)
    assert "version [2] after version 3" in fault
    assert "parity/max_difference" not in figures
    probe.behind_server = True
    for other in (1, 3):  # its operator has gone back, or holds the publication: no fault of the weights
        figures, fault = await probe.check(parts.services.engines, other)
        assert (figures, fault) == ({"parity/unanswered": 0.0, "parity/not_served": 1.0}, "")
    probe.behind_server = False
    try:  # no disagreement: whether an engine is alive is asked elsewhere
        figures, fault = await probe.check([gone, *parts.services.engines], 2)
    finally:
        await gone.close()
    assert (figures["parity/unanswered"], fault) == (1.0, "")
    assert figures["parity/max_difference"] < 1e-4


class Recording:
    """Remembers what it is asked, and fails as an engine does."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Completion:
        self.prompts.append(list(prompt_ids))
        raise EngineFault("not there")


async def test_no_cache_can_hold_a_probes_prompt(micro_model: Path, tmp_path: Path) -> None:
    """Kept keys and values of the old weights would look like a wrong publication."""
    recipe, learner = micro_recipe(tmp_path, **SECTIONS), build_learner(micro_model, tmp_path, **SECTIONS)
    probe, engine = await ParityProbe.build(recipe, learner.policy.unwrapped, model=learner.source), Recording()
    for version in (1, 2, 1 + probe.vocabulary):
        await probe.check([engine], version)  # type: ignore[list-item]
    assert len({tuple(p[:2]) for p in engine.prompts}) == 3
    assert len(engine.prompts) == 3 * PROBE_PROMPTS
    assert all(0 <= token < probe.vocabulary for p in engine.prompts for token in p)
