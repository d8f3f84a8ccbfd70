"""`python -m learner.parity`: says whether a running engine and a model agree, by exit code and by a cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_tools import micro_recipe, write_micro_model
from run_tools import ROOT

from agent.engines.base import Completion
from agent.engines.local.launch import local_engine
from learner import parity as parity_command
from learner.config import ModelConfig
from learner.faults import LearnerFault
from learner.losses import log_bounds
from learner.model.loading import load_policy_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two micro models with far from uniform distributions, and one with a smaller vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    config = micro_recipe(folder).model
    found = {}
    for name, seed, changes in (("served", 4, {}), ("other", 9, {}), ("small", 4, {"vocab_size": 270})):
        path = write_micro_model(folder / name, seed=seed, **changes)
        model = load_policy_model(path, config)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(5)
        model.save_pretrained(path)
        found[name] = path
    return found


def command(*words: str) -> tuple[int, str]:
    """Exit code and all output of the real command."""
    done = subprocess.run(
        [sys.executable, "-m", "learner.parity", *words], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


async def measured(url: str, model: Path, **changes: object):  # type: ignore[no-untyped-def]
    options = {
        "config": ModelConfig(path=model),
        "temperature": 1.0,
        "tokens": 24,
        "prompts": 8,
        "bounds": log_bounds(0.3, 5.0),
        "threshold": 1e-4,
        "measure": "max",
    }
    return await parity_command.measure_parity(url, model, **{**options, **changes})  # type: ignore[arg-type]


async def test_agreement_is_exit_code_0_and_another_model_is_1_with_its_cause(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Case H5, on demand: a real engine over HTTP; max difference under 1e-4 in float32."""
    import asyncio

    async with local_engine(models["served"], version=3, log=tmp_path / "engine.log") as url:
        words = ("--engine", url, "--model", str(models["served"]), "--temperature", "0.7", "--tokens", "24")
        code, text = await asyncio.to_thread(command, *words, "--measure", "max")
        assert code == 0, text
        assert "version 3" in text
        assert "drop 0.000%" in text
        report = await measured(url, models["served"])
        assert report.max_difference < 1e-4
        assert report.p99_ratio_error <= report.max_ratio_error < 1e-3
        assert report.mean_ratio_error <= report.max_ratio_error

        report = await measured(url, models["other"])
        assert "different weights" in report.cause
        assert report.gated_share > 0
        assert report.worst("max") > report.worst("mean") > 1e-4
        with pytest.raises(LearnerFault, match="another model"):
            await measured(url, models["small"], temperature=2.0, tokens=64)
        code = await asyncio.to_thread(parity_command.main, ["--engine", url, "--model", str(models["other"])])
        assert code == 1


def test_an_engine_that_is_not_there_is_one_paragraph(models: dict[str, Path], capfd: pytest.CaptureFixture) -> None:
    assert parity_command.main(["--engine", "http://127.0.0.1:9", "--model", str(models["served"])]) == 1
    text = capfd.readouterr().err
    assert "is it running?" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "words", [("--temperature", "0"), ("--tokens", "0"), ("--prompts", "0"), ("--eps-low", "-1"), ("--dtype", "int8")]
)
def test_values_that_cannot_be_are_refused(words: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parity_command.main(["--engine", "http://x", "--model", "y", *words])
    assert caught.value.code == 2


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parity_command.main(["--help"])
    assert caught.value.code == 0
    assert "python -m learner.parity --engine http" in capsys.readouterr().out


def test_weights_swapped_during_the_comparison_are_refused() -> None:
    mixed = [Completion((1, 2), (-1.0, -1.0), (3, 4), "length")]
    with pytest.raises(LearnerFault, match="versions 3, 4"):
        parity_command.check_versions(mixed)
    assert parity_command.check_versions([Completion((1,), (-1.0,), (3,), "stop")]) == 3
