"""The tiny grammar and its traces: sound where they should be, flawed where they should be, every style alike."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from envs import make_core
from envs.style_shift import tiny
from envs.style_shift.__main__ import main
from envs.style_shift.env import StyleShift
from envs.style_shift.judging.lexical import LexicalJudge
from envs.style_shift.schedule import STYLES
from envs.style_shift.traces import sound_texts


@pytest.mark.slow
async def test_the_tiny_texts_are_what_they_are_meant_to_be() -> None:
    judge, right, total = LexicalJudge(), Counter[object](), Counter[object]()
    for task, style, flaw, text in tiny.texts(4000, bad=0.5, seed=3):
        verdict = await judge.judge(task.prompt, text, style)
        total[style, flaw] += 1
        right[style, flaw] += verdict.reward(style) == 1.0 if flaw is None else verdict.quality == 0
        assert verdict.style == style or flaw is not None
    assert set(total) == {(style, flaw) for style in STYLES for flaw in (None, *tiny.FLAWS)}
    assert all(right[key] >= 0.98 * total[key] for key in total), (right, total)


def test_the_cold_start_knows_every_style_about_equally() -> None:
    counts = Counter(style for _, style, flaw, _ in tiny.texts(8000) if flaw is None)
    assert set(counts) == set(STYLES)
    assert max(counts.values()) < 1.1 * min(counts.values())


async def test_traces_are_what_the_environment_would_have_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of the cold start are the environment's own, token by token; and its texts earn what they should."""
    out = tmp_path / "new" / "traces.jsonl"
    assert main(["traces", str(out), "--count", "200", "--bad", "0.5"]) == 0
    assert "200 traces" in capsys.readouterr().out
    env = make_core("sao/StyleShift-v0", **tiny.ENV_KWARGS)
    assert isinstance(env, StyleShift)
    prompts = {json.dumps(env.messages(task_id, step)) for task_id in env.task_ids for step in (0, 200, 400)}
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 200
    for row in rows:
        assert json.dumps(row["messages"][:-1]) in prompts
        assert row["messages"][-1]["role"] == "assistant"
    again = tmp_path / "again.jsonl"
    assert main(["traces", str(again), "--count", "200", "--bad", "0.5"]) == 0
    assert again.read_text(encoding="utf-8") == out.read_text(encoding="utf-8")


def test_the_tiny_styles_share_no_phrase_and_no_topic() -> None:
    """A phrase of two styles would blur them; a topic in a phrase would make off-topic texts on topic."""
    phrases = [phrase for style in STYLES for part in tiny._GRAMMAR[style] for phrase in part]
    assert len(phrases) == len(set(phrases))
    topics = {task.topic.removeprefix("the ") for task, *_ in tiny.texts(500)}
    words = {word.strip(".,!~") for phrase in phrases for word in phrase.split()}
    assert not topics & words


def test_the_script_gives_every_sound_text_of_a_prompt() -> None:
    texts = sound_texts(3)
    assert len({m[0]["content"] for m in texts}) == 3
    assert len(texts) == len({m[1]["content"] for m in texts}) == 3 * 32
