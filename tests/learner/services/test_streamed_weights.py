"""What is streamed to engines must be what a snapshot would hold, of one version, and never of a step under way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from control_server import servers, until
from learner_tools import build_learner, micro_recipe, write_micro_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig
from vllm_tools import have_vllm

from learner.config import RecipeError, parse_recipe
from learner.model.loading import checkpoint_tensors, save_policy_model
from learner.probes.parity_probe import ParityProbe
from learner.services.engine_fleet import Fleet

_RUNTIME = {"max_context_tokens": 400, "max_tokens_per_turn": 16}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["moe", "dense-tied"])
def test_a_stream_brings_what_a_snapshot_holds(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """A fused expert or a tied head under a name of its own would be passed over, or refused."""
    if kind == "moe":
        model = AutoModelForCausalLM.from_pretrained(write_micro_model(tmp_path / "model"), dtype=dtype)
    else:
        sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
        config = LlamaConfig(vocab_size=64, num_hidden_layers=12, tie_word_embeddings=True, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    save_policy_model(model, tmp_path, tmp_path / "saved")
    streamed = list(checkpoint_tensors(model))
    assert len({name for name, _ in streamed}) == len(streamed)
    assert same(dict(streamed), load_file(tmp_path / "saved" / "model.safetensors"))
    assert [name for name, _ in streamed] == [name for name, _ in checkpoint_tensors(model)]


def streaming_recipe(folder: Path, urls: list[str], **engine: Any) -> Any:
    return micro_recipe(
        folder,
        engine={"max_context": 512, "urls": urls, "transfer": "ipc", **engine},
        runtime={**_RUNTIME, "limits": {"engine_patience_s": 60.0}},
    )


async def test_the_policy_is_streamed_as_it_is_and_the_start_from_its_folder(tmp_path: Path, micro_model: Path) -> None:
    learner = build_learner(micro_model, tmp_path)
    start = learner.export(tmp_path / "start")
    async with servers(1) as found:
        recipe = streaming_recipe(tmp_path, [found[0].url])
        async with Fleet.start(recipe, model=start, version=0, folder=tmp_path) as fleet:
            assert same(found[0].tensors, load_file(start / "model.safetensors"))
            async with fleet.weights_change():
                with torch.no_grad():
                    learner.policy.unwrapped.model.get_input_embeddings().weight.add_(1.0)
                await fleet.publish(1, learner.weights, timeout_s=30)
            assert same(found[0].tensors, dict(learner.weights()))
            assert not same(found[0].tensors, load_file(start / "model.safetensors"))
            assert found[0].published == [("0", "stream"), ("1", "stream")]


async def test_an_engine_that_comes_back_in_the_middle_of_a_step_waits_for_its_end(
    tmp_path: Path, micro_model: Path
) -> None:
    """Half of an update would be served under the version before it."""
    learner = build_learner(micro_model, tmp_path)
    start = learner.export(tmp_path / "start")
    async with servers(2) as found:
        recipe = streaming_recipe(tmp_path, [server.url for server in found])
        async with Fleet.start(recipe, model=start, version=0, folder=tmp_path) as fleet:
            await until(lambda: len(fleet.engines) == 2)
            await fleet.publish(1, learner.weights, timeout_s=30)
            async with fleet.weights_change():
                found[0].label = "0"  # restarted by others
                await until(lambda: len(fleet.engines) == 1)
                assert found[0].label == "0"
            await until(lambda: found[0].label == "1")
            async with fleet.weights_change():
                found[0].label = "0"
                await fleet.publish(2, learner.weights, timeout_s=30)
                assert [server.label for server in found] == ["2", "2"]
            fleet.check()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"engine": {"transfer": "broadcast"}}, "needs vLLM"),
        ({"engine": {"launch": "vllm", "transfer": "ipc"}, "hardware": {"engine_gpus": 1}}, "choose broadcast"),
        ({"engine": {"launch": "vllm", "transfer": "ipc"}, "learner": {"online": True}}, "needs snapshots"),
    ],
)
def test_transfers_that_cannot_work_are_said_before_anything_starts(sections: dict[str, Any], words: str) -> None:
    data = json.loads(micro_recipe(Path("runs")).model_dump_json())
    for name, section in sections.items():
        data[name] |= section
    with pytest.raises(RecipeError, match=words):
        parse_recipe(data)


if have_vllm():  # or else not collected: `make test-vllm` makes it

    @pytest.mark.vllm
    @pytest.mark.xdist_group("vllm-moe")
    @pytest.mark.timeout(1500)
    async def test_a_killed_vllm_is_given_the_policy_that_the_trainer_holds(tmp_path: Path) -> None:
        """It is started from the run's first folder, which is versions behind; trainer and engine agree all along."""
        model = write_micro_model(tmp_path / "model", head_dim=32, hidden_size=32, expert_width=32)
        sections: dict[str, Any] = {
            "env": {"id": "sao/PythonTIR-v0", "kwargs": {"problems": {"source": "tiny_fold", "size": 16}, "spares": 0}},
            "engine": {"max_context": 512, "launch": "vllm", "transfer": "broadcast"},
            "runtime": {**_RUNTIME, "limits": {"engine_patience_s": 600.0}},
            "learner": {"steps": 8, "batch_size": 8, "parity_threshold": 1e-4},
        }
        recipe, learner = micro_recipe(tmp_path, **sections), build_learner(model, tmp_path, **sections)
        start = learner.export(tmp_path / "start")
        probe = await ParityProbe.build(recipe, learner.policy.unwrapped, model=learner.source)
        async with Fleet.start(recipe, model=start, version=0, folder=tmp_path) as fleet:
            await probe.gate(fleet.engines)
            async with fleet.weights_change():
                with torch.no_grad():
                    learner.policy.unwrapped.model.get_output_embeddings().weight.mul_(5.0)
                await fleet.publish(1, learner.weights, timeout_s=120)
            figures, fault = await probe.check(fleet.engines, 1)
            assert (fault, figures["parity/unanswered"]) == ("", 0.0)
            [member] = fleet._members
            assert member.process is not None
            os.kill(member.process.pid, signal.SIGKILL)
            await member.process.wait()
            async with asyncio.timeout(900):
                while not fleet.engines or member.restarts == []:
                    fleet.check()
                    await asyncio.sleep(0.2)
            figures, fault = await probe.check(fleet.engines, 1)
            assert (fault, figures["parity/unanswered"]) == ("", 0.0)
            assert figures["parity/max_difference"] < 1e-4
