"""Bad input at the command line: exit code 1, one paragraph, no traceback, nothing left running."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from learner_tools import build_learner, random_episodes
from run_tools import ROOT, write_run

from learner import evaluate, pretrain_value, sft, train
from learner.config import Recipe, load_recipe
from learner.run.folder import claim_run
from learner.train import summary


def one_paragraph(text: str) -> str:
    """What was printed as an error, joined to one line; fails on a traceback or a second paragraph."""
    assert "Traceback" not in text
    _, mark, error = text.partition("error: ")
    assert mark, text
    assert "\n\n" not in error.strip(), error
    return " ".join(error.split())


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def refused(capfd: pytest.CaptureFixture[str], *words: str, main=train.main) -> str:  # type: ignore[no-untyped-def]
    capfd.readouterr()
    assert main(list(words)) == 1
    return one_paragraph(capfd.readouterr().err)


def test_the_command_itself_says_it_in_one_paragraph_and_exits_with_one(recipe: Path) -> None:
    """By the real command, for one fault: a model path that leads nowhere."""
    words = ["model={path: /no/such/model}", "sft=null", "value_pretraining=null"]
    done = subprocess.run(
        [sys.executable, "-m", "learner.train", str(recipe), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    said = one_paragraph(done.stderr)
    assert "model.path" in said
    assert "/no/such/model" in said


def test_a_missing_model_path_is_named_whatever_the_stage(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = (str(recipe), "model={path: /no/such/model}", "sft=null")
    for main in (train.main, pretrain_value.main, evaluate.main):
        assert "/no/such/model" in refused(capfd, *words, main=main)
    assert "/no/such/model" in refused(capfd, str(recipe), "model={path: /no/such/model}", main=sft.main)


def test_a_dataset_without_the_named_column_names_it(
    recipe: Path, micro_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (f"model={{path: {micro_model}}}", "sft=null", "value_pretraining=null")
    said = refused(capfd, str(recipe), *words, "env.kwargs.problems.problem=question")
    assert "question" in said
    assert "train.jsonl" in said


def test_an_unknown_key_and_a_missing_recipe(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "learner.stpes: unknown key" in refused(capfd, str(recipe), "learner.stpes=3")
    assert "no recipe at nowhere.yaml" in refused(capfd, "nowhere.yaml")


def test_square_brackets_in_a_message_are_text_and_not_markup(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The terminal library reads [bold] and [/x] as markup: a message may hold what the person wrote."""
    assert "[/red]" in refused(capfd, str(recipe), "model={path: '/no/such/[/red]'}", "sft=null")


def test_a_second_learner_on_the_same_run_is_refused(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with claim_run(load_recipe(recipe)):
        said = refused(capfd, str(recipe))
    assert f"process {os.getpid()}" in said


def test_traces_that_are_not_there_are_said_to_be_missing(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = refused(capfd, str(recipe), "sft.traces=/no/such/traces.jsonl")
    assert "sft.traces: cannot read /no/such/traces.jsonl: No such file" in said


def test_a_method_without_a_critic_has_none_to_pretrain(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = refused(capfd, str(recipe), "learner.algorithm=grpo_dis", "sft=null", main=pretrain_value.main)
    assert "'grpo_dis' has no critic to pretrain" in said


def test_traces_of_another_form_name_the_file(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = recipe.parent / "traces.jsonl"
    silent = '{"messages": [{"role": "user", "content": "x"}]}'
    for text in ('{"prompt": "x"}', "[1]", '{"messages": [{"role": "user"}]}', "no json", "", silent):
        path.write_text(text)
        assert str(path) in refused(capfd, str(recipe))


def test_more_traces_than_tasks_is_said_with_both_numbers(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = refused(capfd, str(recipe), "sft.traces=null", "sft.clean_traces=500", "sft.imperfect_traces=0")
    assert "500" in said
    assert "64" in said


def test_a_tiny_model_without_a_cold_start_is_refused(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "cold start" in refused(capfd, str(recipe), "sft=null")


def test_a_full_disk_is_said_so(recipe: Path, tmp_path: Path) -> None:
    """The disk is full (here: a limit on the size of files) when the cold start writes its model."""

    def body() -> None:
        sys.stderr.flush()
        os.dup2(os.open(tmp_path / "said", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = open(2, "w")  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        code = train.main([str(recipe)])
        sys.stderr.flush()
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(60)
    assert process.exitcode == 1, (tmp_path / "said").read_text()
    said = one_paragraph((tmp_path / "said").read_text())
    assert "disk is full" in said
    assert "runs_dir" in said
    assert not (tmp_path / "runs" / "micro" / "sft").exists()  # nothing half written is found again


def test_a_run_stopped_before_its_first_step_still_has_a_summary(recipe: Path) -> None:
    tables = summary(load_recipe(recipe), [], 3.0)
    assert len(tables) == 1


def test_a_summary_tells_how_much_was_trained_at_a_lag(recipe: Path, micro_model: Path) -> None:
    """`tokens trained at lag >= 1` counts by the version at the time of the step."""
    own = build_learner(micro_model, recipe.parent / "runs")
    own.progress.version = 1
    batch, _ = own.step(random_episodes(8))  # all of version 0
    assert own.progress.stale_tokens == batch.action_tokens
    own.progress.version = 0
    own.step(random_episodes(8))
    assert own.progress.stale_tokens == batch.action_tokens
    assert own.progress.action_tokens == 2 * batch.action_tokens


def test_the_recipe_that_ships_is_valid_and_its_sets_are_disjoint() -> None:
    recipe = load_recipe(None)
    assert isinstance(recipe, Recipe)
    train_set = recipe.env.kwargs["problems"]
    assert recipe.evaluation.env is not None
    assert train_set["exclude"] == recipe.evaluation.env.kwargs["problems"]
    text = yaml.safe_dump(json.loads(recipe.model_dump_json()))
    assert not re.search(r"/(work|tmp)/", text)
