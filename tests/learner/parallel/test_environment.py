"""Cases N11 and N16: what a shell or a missing package would change of a run is refused at its start, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from learner_tools import micro_recipe

from learner.config import RecipeError
from learner.parallel.environment import check_environment
from learner.parallel.ranks import make_accelerator
from learner.run.trackers import flat, run_id

# What `accelerate launch` sets for an ordinary run, on CPUs and on GPUs.
LAUNCHED = {
    "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_CPU_AFFINITY": "1",
    "ACCELERATE_DEBUG_MODE": "true",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "RANK": "0",
}
ELSEWHERE = "fsdp deepspeed megatron_lm parallelism_config".upper().split()
REFUSED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_GRADIENT_CLIPPING": "1.0",
    "ACCELERATE_DOWNCAST_BF16": "true",
    "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_A_SETTING_OF_TOMORROW": "7",
    **{f"ACCELERATE_USE_{plugin}": "true" for plugin in ELSEWHERE},
}


def test_what_a_launcher_sets_for_an_ordinary_run_is_let_through(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path, learner={"tracker": None})
    check_environment(recipe, LAUNCHED)
    wide = micro_recipe(tmp_path, model={"tiny": {}, "compute_dtype": "bfloat16"})
    check_environment(wide, LAUNCHED | {"ACCELERATE_MIXED_PRECISION": "bf16"})


@pytest.mark.parametrize("name", REFUSED)
def test_a_variable_that_changes_numbers_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Gradients were divided by four, in silence."""
    monkeypatch.setenv(name, REFUSED[name])
    with pytest.raises(RecipeError, match=f"{name}={REFUSED[name]} is set in the environment"):
        make_accelerator(micro_recipe(tmp_path, learner={"tracker": None}))


@pytest.mark.parametrize("tracker", ["foo", "", "Wandb", "all"])
def test_a_tracker_that_nobody_knows_is_refused_with_those_that_are_known(tmp_path: Path, tracker: str) -> None:
    with pytest.raises(RecipeError, match=r"learner\.tracker: .* is no tracker .*tensorboard.*wandb.*null"):
        make_accelerator(micro_recipe(tmp_path, learner={"tracker": tracker}))


@pytest.mark.parametrize("tracker", sorted(LOGGER_TYPE_TO_CLASS))
def test_a_tracker_that_is_not_installed_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    """There was no tracking, and no word of it."""
    monkeypatch.setattr("learner.parallel.environment.get_available_trackers", list)
    with pytest.raises(RecipeError, match=rf"learner\.tracker: {tracker} is not installed here: pip install"):
        make_accelerator(micro_recipe(tmp_path, learner={"tracker": tracker}))


def test_a_run_keeps_the_id_that_its_tracker_knows_it_by(tmp_path: Path) -> None:
    first = run_id(tmp_path)
    assert first == run_id(tmp_path)
    assert first.isalnum()
    assert len(first) == 21
    (tmp_path / "other").mkdir()
    assert run_id(tmp_path / "other") != first


def test_a_tracker_is_given_the_whole_recipe_by_the_keys_that_override_it(tmp_path: Path) -> None:
    told = flat(micro_recipe(tmp_path).model_dump(mode="json"))
    assert told["learner.policy.lr"] == 1e-2
    assert told["learner.policy.betas"] == "[0.9, 0.95]"
    assert "learner.gamma" not in told  # the algorithm's own
    assert all(isinstance(value, bool | int | float | str) for value in told.values())
