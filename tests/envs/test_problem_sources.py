"""Problem sources: what a recipe describes is what is loaded, and mistakes are named."""

from __future__ import annotations

import csv
import json
import re
import threading
from collections import Counter
from pathlib import Path

import pytest

from envs import make_core
from envs.python_tir.problems.sets import ProblemSourceError, shared_questions
from envs.python_tir.problems.sources import PRESETS, answer_in_column, load_problems

INLINE = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(5)]
HELD_OUT = {"source": "tiny_fold", "size": 384, "seed": 0}


def test_inline_problems_keep_their_order_and_have_stable_ids() -> None:
    problems = load_problems(INLINE)
    assert [problems[i].answer for i in range(5)] == ["1", "2", "3", "4", "5"]
    assert [problems.index(problems.task_id(i)) for i in range(5)] == list(range(5))
    with pytest.raises(KeyError):
        problems.index("inline/5")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ([{"problem": "x"}], "no 'answer'"),
        ([], "empty"),
        ("aime1066", "presets: aime24"),
        ({"source": "nowhere"}, "unknown problem source"),
        ({"source": "file"}, "'path' is missing"),
        ({"source": "file", "path": "/nowhere.jsonl"}, "cannot be read"),
        ({"source": "file", "path": "x.jsonl", "column": "y"}, "unknown key 'column'"),
        ({"source": "reasoning_gym", "families": {"no_such_family": {}}}, "no_such_family"),
        ({"source": "reasoning_gym", "families": {"chain_sum": {"terms": 3}}}, "chain_sum"),
        ({"source": "reasoning_gym", "families": {"chain_sum": {"min_terms": 9, "max_terms": 3}}}, "max_terms"),
        ({"source": "reasoning_gym", "families": {"chain_sum": {"seed": 3}}}, "belongs to the source"),
        ({"source": "reasoning_gym", "families": {}}, "families"),
        ({"source": "reasoning_gym", "families": {"lcm": {"weight": -1}}}, "positive"),
        (
            [{"source": "preset", "name": "aime24", "weight": 1}, {"source": "x"}],
            "unknown problem source|datasets|load",
        ),
    ],
)
def test_a_wrong_description_is_one_clear_error(spec: object, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ProblemSourceError, match=says):
        load_problems(spec)  # type: ignore[arg-type]


def test_an_impossible_source_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ProblemSourceError, match="presets"):
        make_core("sao/PythonTIR-v0", problems="aime1066")


def test_jsonl_and_csv_with_column_names(tmp_path: Path) -> None:
    rows = [{"Q": "1+1?", "A": "so\n#### 2"}, {"Q": 'a, "b"\n{c}?', "A": "#### 1,000 "}]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    with (tmp_path / "set.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["Q", "A"])
        writer.writeheader()
        writer.writerows(rows)
    for name in ("set.jsonl", "set.csv"):
        spec = {"source": "file", "path": str(tmp_path / name), "problem": "Q", "answer": "A", "extract": "gsm8k"}
        problems = load_problems(spec)
        assert [(problems[i].question, problems[i].answer) for i in range(2)] == [
            ("1+1?", "2"),
            ('a, "b"\n{c}?', "1,000"),
        ]


def test_an_absent_column_is_named_with_those_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n')
    with pytest.raises(ProblemSourceError, match=r"no column 'problem'.*It has: question, answer"):
        load_problems({"source": "file", "path": str(path)})


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text("{nope")
    with pytest.raises(ProblemSourceError, match=r"broken\.jsonl is not jsonl"):
        load_problems({"source": "file", "path": str(path)})


def test_a_data_set_is_loaded_by_id_and_its_columns_are_checked(tmp_path: Path) -> None:
    """`datasets` takes a folder where a hub id stands, so the real loader runs without a network."""
    pytest.importorskip("datasets")
    (tmp_path / "test.jsonl").write_text('{"question": "1+1?", "solution": "#### 2"}\n')
    spec = {"source": "huggingface", "dataset": str(tmp_path), "problem": "question", "answer": "solution"}
    assert load_problems({**spec, "extract": "gsm8k"})[0].answer == "2"
    with pytest.raises(ProblemSourceError, match=r"no column 'answer'.*It has: question, solution"):
        load_problems({**spec, "answer": "answer"})
    with pytest.raises(ProblemSourceError, match="could not be loaded"):
        load_problems({**spec, "split": "no_such_split"})


def test_extraction_takes_the_last_match_and_refuses_none() -> None:
    assert answer_in_column("#### 1\nno\n#### 2", "gsm8k") == "2"
    assert answer_in_column(" 7 ", None) == "7"
    with pytest.raises(ProblemSourceError, match="finds nothing"):
        answer_in_column("no answer", "gsm8k")


def test_presets_cover_the_sets_that_are_reported() -> None:
    names = {"aime24", "aime25", "hmmt25_nov", "beyond_aime", "imo_answerbench", "math500", "gsm8k"}
    assert names == set(PRESETS)
    unpinned = {name for name, preset in PRESETS.items() if not re.fullmatch("[0-9a-f]{40}", preset.revision or "")}
    assert unpinned <= {"beyond_aime"}, "a set that changes would change what was measured on it"


def test_weights_set_the_shares_and_lose_no_problem() -> None:
    small = {"source": "reasoning_gym", "size": 10, "seed": 1, "families": {"lcm": {}}, "weight": 3}
    large = {"source": "reasoning_gym", "size": 60, "seed": 2, "families": {"chain_sum": {}}, "weight": 1}
    problems = load_problems([small, large])
    families = Counter(problems[i].family for i in range(len(problems)))
    assert families == {"lcm": 180, "chain_sum": 60}
    ids = [problems.task_id(i) for i in range(len(problems))]
    assert len(set(ids)) == len(ids) == 240
    assert all(problems.index(task_id) == i for i, task_id in enumerate(ids))
    assert len({problems[i].question for i in range(180)}) <= 10


def test_sources_without_weights_are_joined() -> None:
    problems = load_problems([{"source": "reasoning_gym", "size": 3, "families": {"lcm": {}}}, HELD_OUT])
    assert len(problems) == 387


def test_a_weight_that_would_repeat_a_set_for_ever_is_refused() -> None:
    tiny = {"source": "reasoning_gym", "size": 100, "seed": 1, "families": {"lcm": {}}, "weight": 1e-7}
    with pytest.raises(ProblemSourceError, match="less unequal"):
        load_problems([tiny, {**HELD_OUT, "weight": 1}])


def test_nearby_seeds_overlap_and_exclude_removes_every_shared_question() -> None:
    """reasoning-gym seeds item i with seed + i; and small families repeat themselves at any distance."""
    held_out = load_problems(HELD_OUT)
    one_step_away = {"source": "reasoning_gym", "size": 384, "families": {"chain_sum": {"min_digits": 2}}}
    assert (
        len(shared_questions(load_problems({**one_step_away, "seed": 0}), load_problems({**one_step_away, "seed": 1})))
        > 300
    )
    train = {"source": "tiny_fold", "size": 3000, "seed": 5_000_000}
    assert shared_questions(load_problems(train), held_out)
    assert not shared_questions(load_problems({**train, "exclude": HELD_OUT}), held_out)


def test_a_family_too_small_to_hold_questions_out_says_so() -> None:
    family = {"products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    held_out = {"source": "reasoning_gym", "size": 3000, "seed": 0, "families": family}
    train = load_problems(
        {"source": "reasoning_gym", "size": 50, "seed": 10**7, "families": family, "exclude": held_out}
    )
    with pytest.raises(ProblemSourceError, match="too few questions"):
        [train[i] for i in range(50)]


def test_the_tiny_mixture_has_the_recipes_proportions() -> None:
    problems = load_problems({"source": "tiny_fold", "size": 6000, "seed": 3})
    rows = [problems[i] for i in range(6000)]
    families = Counter(row.family for row in rows)
    assert set(families) == {"chain_sum", "products", "lcm"}
    assert all(1800 < count < 2200 for count in families.values())
    operands = Counter(row.question.count("*") + 1 for row in rows if row.family == "products")
    total = sum(operands.values())
    for count, share in {3: 0.6, 4: 0.25, 5: 0.1, 6: 0.05}.items():
        assert operands[count] / total == pytest.approx(share, abs=0.04)
    assert not any(row.answer == "0" for row in rows if row.family == "products")


def test_the_same_description_gives_the_same_problems_and_is_loaded_once() -> None:
    spec = {"source": "tiny_fold", "size": 50, "seed": 11}
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(load_problems(dict(spec)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    problems = load_problems(spec)
    assert [problems[i] for i in range(50)] == [problems[i] for i in range(50)]
    assert problems.index(problems.task_id(17)) == 17


def test_a_familys_question_can_be_worded_anew() -> None:
    spec = {"source": "reasoning_gym", "size": 5, "families": {"chain_sum": {"question": "sum {expression}"}}}
    assert load_problems(spec)[0].question.startswith("sum ")


def test_task_ids_are_a_sequence_made_on_demand() -> None:
    ids = make_core("sao/PythonTIR-v0", problems={"source": "tiny_fold", "size": 10**6, "seed": 1}).task_ids
    assert len(ids) == 10**6
    assert ids[-1] == ids[10**6 - 1]
    assert ids[5:7] == [ids[5], ids[6]]
