"""A learner whose weights are cut over processes takes the steps of one process: policy, critic, figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_worker import learner, trained
from learner_tools import write_micro_model
from run_tools import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from learner.config import ModelConfig
from learner.model.forward import PolicyForward
from learner.model.loading import load_policy_model

WORKER = str(Path(__file__).parents[1] / "layout_worker.py")
# Of two ranks: the one that most runs use, for each kind of model. The others take a minute and more.
TWO = ("untied:replicate=2", "moe:fsdp=2", "untied:fsdp=2,kl=1")
MORE_OF_TWO = ("dense:fsdp=2", "dense:tp=2", "untied:tp=2,ep=2", "moe:fsdp=2,ep=2", "untied:fsdp=2,ep=2,recompute=1")
NARROW = ("dense:fsdp=2,narrow=1", "dense:tp=2,narrow=1", "dense:replicate=2,narrow=1")
FOUR = (
    "moe:fsdp=4,ep=2",
    "untied:fsdp=2,tp=2",
    "dense:fsdp=2,tp=2",
    "untied:fsdp=2,tp=2,ep=4",
    "moe:replicate=2,fsdp=2",
    "untied:replicate=2,fsdp=2,ep=2",
    "moe:fsdp=2,context=2,kl=1",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Experts with a tied and with an untied head, and none."""
    folder = tmp_path_factory.mktemp("models")
    found = {"moe": write_micro_model(folder / "moe", kv_heads=2)}
    found["dense"] = write_micro_model(folder / "dense", kv_heads=2, experts=0)
    found["untied"] = write_micro_model(folder / "untied", kv_heads=2)
    found["other"] = write_micro_model(folder / "other", kv_heads=2, seed=1)  # that a policy is pulled to
    config = AutoConfig.from_pretrained(found["untied"])
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(found["untied"])
    return found


@pytest.fixture(scope="module")
def one_process(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What one process has trained in the place of a job, made once."""
    made: dict[str, dict[str, Any]] = {}

    def of(job: str) -> dict[str, Any]:
        name, keys = job.split(":")
        keys = "kl=1" if "kl=1" in keys else ""
        if (known := name + keys) not in made:
            made[known] = trained(learner(models[name], tmp_path_factory.mktemp(name), keys))
        return made[known]

    return of


def run(count: int, jobs: tuple[str, ...], models: dict[str, Path], folder: Path, *, within_s: float) -> Path:
    """Let `count` ranks do all jobs, and say where what they trained lies."""
    words = [f"{models[name]}:{keys}" for name, keys in (job.split(":") for job in jobs)]
    run_ranks(count, [WORKER, str(folder), *words], within_s=within_s)
    return folder


def compare(folder: Path, job: str, count: int, whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Hold what every rank has against one process; returns what they have."""
    ranks = [torch.load(folder / f"{job.replace(':', '_')}_{rank}.pt") for rank in range(count)]
    for found in ranks:
        for module in ("policy", "critic"):
            assert found[module].keys() == whole[module].keys()
            for name, weight in whole[module].items():
                torch.testing.assert_close(found[module][name], weight, atol=1e-6, rtol=0, msg=f"{module} {name}")
        for own, figures in zip(found["figures"], whole["figures"], strict=True):
            for name, figure in figures.items():
                # Quantiles are of a rank's own rows, and norms by kind of parameter are not known of cut weights.
                if not name.startswith(("ratio/", "norms/")):
                    assert own[name] == pytest.approx(figure, rel=1e-5, abs=1e-6), name
    return ranks


@pytest.fixture(scope="module")
def two(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    jobs = (*TWO, "dense:fsdp=2,ep=2", "moe:fsdp=4", "moe:tp=2,replicate=2")
    return run(2, jobs, models, tmp_path_factory.mktemp("two"), within_s=250)


@pytest.mark.xdist_group("layouts")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", TWO)
def test_two_ranks_train_as_one_process(two: Path, one_process: Callable[[str], dict[str, Any]], job: str) -> None:
    """Tied and untied heads, frozen attention, both gradient norms above their clips, uneven micro-batches.

    Case N2: with whole copies and an untied head, a rank that ran out of rows hung until the collective's limit.
    """
    whole = one_process(job)
    assert whole["figures"][0]["policy/gradient_norm"] > 0.05
    assert ("policy/kl" in whole["figures"][0]) == ("kl" in job)
    assert whole["figures"][0]["critic/gradient_norm"] > 0.5
    ranks = compare(two, job, 2, whole)
    for found in ranks:
        held, total = found["held"]
        assert held <= 0.55 * total if "fsdp" in job else held == total
    counts = [found["micro-batches"] for found in ranks]
    assert [padded for _, padded in counts[0]] == [padded for _, padded in counts[1]]
    assert any(own < padded for rank in counts for own, padded in rank), "no rank was padded: the test shows nothing"


@pytest.mark.xdist_group("layouts")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("dense:fsdp=2,ep=2", "hardware.ep 2: this model (qwen3) has no experts"),
        ("moe:fsdp=4", "hardware: fsdp 4 is for 4 processes, and this was started in 2; start it with `accelerate"),
        ("moe:tp=2,replicate=2", "hardware: replicate 2, tp 2 is for 4 processes, and this was started in 2"),
    ],
)
def test_a_layout_that_does_not_suit_is_refused_by_name(two: Path, job: str, words: str) -> None:
    assert words in (two / f"{job.replace(':', '_')}.refused").read_text()


@pytest.mark.xdist_group("layouts")
@pytest.mark.timeout(300)
def test_a_probe_on_the_main_process_alone_is_answered_by_all_ranks(two: Path, models: dict[str, Path]) -> None:
    """It would have waited for weights of ranks that were waiting for it."""
    found = torch.load(two / "asked.pt")
    policy = PolicyForward(load_policy_model(models["untied"], ModelConfig(path=models["untied"])))
    assert policy.load_state_dict(found["weights"], strict=False).unexpected_keys == []
    with torch.no_grad():
        logprobs, _ = policy(found["ids"], found["ids"] > 1)
    torch.testing.assert_close(found["logprobs"], logprobs, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "jobs"), [(2, MORE_OF_TWO), (4, FOUR)])
def test_every_other_layout_trains_as_one_process(
    models: dict[str, Path],
    one_process: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    count: int,
    jobs: tuple[str, ...],
) -> None:
    run(count, jobs, models, tmp_path, within_s=800)
    for job in jobs:
        compare(tmp_path, job, count, one_process(job))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wide_weights_compute_in_bfloat16_in_every_layout(models: dict[str, Path], tmp_path: Path) -> None:
    """However they are cut: FSDP2 casts what it gathers, elsewhere autocast does."""
    run(2, NARROW, models, tmp_path, within_s=800)
    wide = trained(learner(models["dense"], tmp_path, ""))
    for job in NARROW:
        found = torch.load(tmp_path / f"{job.replace(':', '_')}_0.pt")
        assert len(found["narrow"]) >= 14, job  # two layers' projections
        for own, figures in zip(found["figures"], wide["figures"], strict=True):
            for name in ("policy/gradient_norm", "critic/gradient_norm", "policy/entropy"):
                assert own[name] == pytest.approx(figures[name], rel=0.05), (job, name)
