"""The table of studies: each arm is a recipe, searches are alike for all, and names are what files can be called."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel

from learner.algorithms import ALGORITHMS
from learner.config import RecipeError
from learner.model.critic import freeze, new_critic
from learner.model.tiny import build_config
from learner.study.arms import Arm, Job, Study, search_grid
from learner.study.machine import seconds
from learner.study.search import preset_of, search_jobs
from learner.study.table import STUDIES, get_study

ARMS = [(study, arm) for study in STUDIES.values() for arm in study.arms]


@pytest.mark.parametrize(("study", "arm"), ARMS, ids=[f"{study.name}-{arm.name}" for study, arm in ARMS])
def test_every_arm_is_a_recipe_that_does_what_its_words_say(study: Study, arm: Arm) -> None:
    job = Job(study, arm, 3, study.updates)
    recipe = job.recipe()
    assert recipe.seed == 3
    assert recipe.learner.algorithm == job.algorithm == preset_of(arm)
    assert recipe.learner.batch_size == 128 or study.runner == "simulate"
    if recipe.learner.resolve().needs_groups:
        assert recipe.learner.resolve().samples_per_prompt == 8
    if study.runner == "train":
        assert recipe.pretrains_critic == (recipe.learner.resolve().needs_critic and arm.name != "none")


def test_the_studies_are_those_of_the_paper() -> None:
    assert {
        "main", "long", "updates", "attention", "value_data", "granularity", "lag", "gate", "alpha", "order", "online",
        "dynamics",
    } == set(STUDIES)  # fmt: skip
    assert {job.algorithm for job in (Job(STUDIES["main"], arm, 0, 1) for arm in STUDIES["main"].arms)} == {
        "sao", "sao_dis_only", "grpo_dis", "grpo", "vapo", "sao_running_mean", "rloo", "flash_reinforce",
    }  # fmt: skip
    assert STUDIES["long"].updates == 1000
    with pytest.raises(ValueError, match="there are main, long"):
        get_study("mian")
    with pytest.raises(ValueError, match="it has sao, "):
        get_study("main").arm("soa")


def test_no_method_gets_more_tries_than_another() -> None:
    """A baseline that is searched less is tuned down."""
    assert {len(set(search_grid(name))) for name in ALGORITHMS} == {6}
    jobs = search_jobs(STUDIES["main"], seeds=(1,))
    assert len(jobs) == 6 * len({preset_of(arm) for arm in STUDIES["main"].arms})
    for job in jobs:
        job.recipe()
    first = jobs[: len(jobs) // 6]  # one setting of each preset, before any has a second
    assert len({job.algorithm for job in first}) == len(first)


def test_what_a_search_found_lies_between_the_study_and_the_arm() -> None:
    study = STUDIES["gate"]
    found = ("learner.policy.lr=0.0008", "learner.eps_low=0.8", "learner.eps_high=3")
    at = {arm.name: Job(study, arm, 0, 5, found).recipe().learner for arm in study.arms}
    assert {learner.policy.lr for learner in at.values()} == {0.0008}
    assert at["sao"].resolve().eps_low == 0.8
    assert at["narrow"].resolve().eps_low == 0.1


def test_a_word_that_no_recipe_takes_is_refused_before_anything_runs() -> None:
    study = STUDIES["main"]
    with pytest.raises(RecipeError, match=r"learner\.lerning"):
        Job(study, study.arms[0], 0, 5, more=("learner.lerning=3",)).recipe()
    with pytest.raises(ValueError, match="part of file names"):
        Arm("a/b")


@pytest.mark.parametrize(("text", "expected"), [("30m", 1800.0), ("2h", 7200.0), ("90s", 90.0), ("45", 45.0)])
def test_a_budget_is_read_as_people_write_it(text: str, expected: float) -> None:
    assert seconds(text) == expected
    with pytest.raises(ValueError, match="30m, 2h or 90s"):
        seconds(text + "x")


def test_arms_share_a_cold_start_only_where_model_and_environment_are_the_same() -> None:
    starts = {name: {Job(study, arm, 0, 1).start_words for arm in study.arms} for name, study in STUDIES.items()}
    assert all(len(found) == 1 for found in starts.values())
    assert starts["attention"] == {("model.tiny.experts=0",)}
    values = {Job(STUDIES["value_data"], arm, 0, 1).value_words for arm in STUDIES["value_data"].arms}
    assert len(values) == 4


def test_every_critic_of_the_attention_study_can_be_made() -> None:
    """LoRA finds nothing to adapt in a mixture of experts, and would fail after the cold start."""
    for arm in STUDIES["attention"].arms:
        recipe = Job(STUDIES["attention"], arm, 0, 1).recipe()
        assert recipe.model.tiny is not None
        with torch.device("meta"):
            body = AutoModel.from_config(build_config(recipe.model.tiny, recipe.model.tiny.vocab_size, 1))
            critic = new_critic(body)
            settings = recipe.learner.resolve().critic
            assert settings is not None
            assert freeze(critic, settings.trainable)


def test_a_forced_lag_that_could_never_be_reached_is_refused_by_its_key() -> None:
    """Batches whose commit waits for a checkpoint take up room too: the queue would never be full enough."""
    main = STUDIES["main"]
    keys = ("store.forced_lag=4", "learner.checkpoint_every=2")
    with pytest.raises(RecipeError, match=r"store\.forced_lag 4 with learner\.checkpoint_every 2.*raise it to 5"):
        Job(main, main.arms[0], 0, 5, more=(*keys, "store.max_lag=4")).recipe()
    assert Job(main, main.arms[0], 0, 5, more=(*keys, "store.max_lag=5")).recipe().store.forced_lag == 4
