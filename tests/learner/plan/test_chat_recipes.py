"""The recipes that serve a real model on one GPU: they fit, with what vLLM is given, and the server reads them too."""

from __future__ import annotations

import pytest
from run_tools import ROOT

from agent.serve.children.engine import engine_launch
from agent.serve.config import load_recipe as load_served
from learner.config import load_recipe
from learner.plan import phases

FOLDER = ROOT / "recipes" / "adapters"


@pytest.mark.parametrize("name", ["chat_4b_lora", "chat_8b_lora"])
def test_a_chat_recipe_fits_beside_its_engine(name: str) -> None:
    """vLLM takes its share at the start, whatever the learner needs later."""
    path = FOLDER / f"{name}.yaml"
    recipe = load_recipe(path)
    found = phases.make_plan(recipe)
    found.check()
    assert found.room >= 1
    assert "--gpu-memory-utilization" in recipe.engine.vllm_options


@pytest.mark.parametrize("path", sorted(FOLDER.glob("chat_*.yaml")), ids=lambda path: path.stem)
def test_the_server_reads_a_chat_recipe_as_the_learner_does(path) -> None:  # type: ignore[no-untyped-def]
    served = load_served(path)
    adapter = served.model.policy_adapter
    assert adapter is not None
    assert adapter.publish == "adapter"
    launch = engine_launch(served, None)
    assert (launch.kind, launch.devices, launch.parallel) == ("vllm", None, 1)
    assert launch.max_context >= served.runtime.max_context_tokens


def test_a_second_gpu_is_the_engines() -> None:
    """Engine and learner would both have taken the first one."""
    words = ["hardware.engine_gpus=2", "hardware.gpus_per_engine=2"]
    served = load_served(FOLDER / "chat_8b_lora.yaml", words)
    launch = engine_launch(served, "4,5,6")
    assert (launch.devices, launch.parallel) == ("5,6", 2)
