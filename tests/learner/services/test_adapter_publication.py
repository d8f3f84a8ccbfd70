"""A run whose policy has an adapter: engines are held against the trainer after each publication and after a crash."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from control_server import until
from learner_tools import MICRO, build_learner, micro_recipe, random_episodes

from agent.engines.adapters import base_of
from learner.probes.parity_probe import ParityProbe
from learner.services.engine_fleet import Fleet


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["dense", "moe"])
async def test_engines_serve_the_adapter_that_the_trainer_holds_after_a_step_and_after_a_crash(
    tmp_path: Path, dense_model: Path, micro_model: Path, kind: str
) -> None:
    """The dense one is published as an adapter, that of experts added to whole weights."""
    adapter: dict[str, Any] = {"rank": 2, "targets": "attention"}
    if kind == "moe":
        adapter |= {"experts": True, "publish": "merged"}
    sections: dict[str, Any] = {
        "model": {"tiny": MICRO, "policy_adapter": adapter},
        "env": {"id": "sao/PythonTIR-v0", "kwargs": {"problems": {"source": "tiny_fold", "size": 16}, "spares": 0}},
        "runtime": {"max_context_tokens": 400, "max_tokens_per_turn": 16, "limits": {"engine_patience_s": 300.0}},
        "learner": {"batch_size": 8, "policy": {"lr": 0.1, "warmup_steps": 0}, "parity_threshold": 1e-4},
    }
    source = dense_model if kind == "dense" else micro_model
    recipe, learner = micro_recipe(tmp_path, **sections), build_learner(source, tmp_path, **sections)
    start = learner.export_for_engines(tmp_path / "weights" / "start")
    assert base_of(start) == (source if kind == "dense" else None)
    probe = await ParityProbe.build(recipe, learner.policy.unwrapped, model=learner.source)
    async with Fleet.start(recipe, model=start, version=0, folder=tmp_path) as fleet:
        await probe.gate(fleet.engines)
        for version in (1, 2):  # B is zero at first: A has its first gradient in the second step
            assert learner.step(random_episodes(8, seed=version))[1].policy_moved
            _, fault = await probe.check(fleet.engines, version - 1)
            assert fault  # it has moved, and is not published
            folder = learner.export_for_engines(tmp_path / "weights" / f"v{version}")
            await fleet.publish(version, folder, timeout_s=120)
            figures, fault = await probe.check(fleet.engines, version)
            assert (fault, figures["parity/unanswered"]) == ("", 0.0)
        [member] = fleet._members
        assert member.process is not None
        member.process.send_signal(signal.SIGKILL)
        await until(lambda: not fleet.engines)
        await until(lambda: len(fleet.engines) == 1)
        figures, fault = await probe.check(fleet.engines, 2)
        assert (fault, figures["parity/unanswered"]) == ("", 0.0)
