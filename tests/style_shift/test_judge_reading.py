"""Property tests of what is read from and shown to a judge."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from envs.style_shift.judging.cache import cache_key
from envs.style_shift.judging.judge import JudgeFault
from envs.style_shift.judging.rubric import SCHEMA, fence_for, messages, read_verdict
from envs.style_shift.schedule import NONE, STYLES

TEXTS = st.text(alphabet=st.one_of(st.sampled_from("`\n {}\"'ab"), st.characters()), max_size=200)


@given(prompt=TEXTS, text=TEXTS)
def test_the_fence_is_longer_than_any_run_inside_it(prompt: str, text: str) -> None:
    """Case G3."""
    fence = fence_for(prompt, text)
    assert fence not in prompt
    assert fence not in text
    user = messages(prompt, text)[1]["content"]
    assert user.count(fence) == 4
    assert user.split(fence)[1::2] == [f"\n{prompt}\n", f"\n{text}\n"]


@given(content=st.one_of(TEXTS, st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
@example("{}")
@example("[" * 5000)
@example("1" * 5000)
def test_whatever_a_judge_says_is_a_verdict_or_a_fault(content: str) -> None:
    """Case G1."""
    try:
        read_verdict(content)
    except JudgeFault:
        return
    found = json.loads(content)
    assert set(found) == set(SCHEMA["required"])


@given(
    reasoning=st.text(min_size=1).filter(str.strip),
    quality=st.sampled_from([0, 1]),
    style=st.sampled_from([*STYLES, NONE]),
    before=st.text(max_size=30),
    after=st.text(max_size=30),
)
def test_a_verdict_is_read_exactly_and_never_out_of_prose(
    reasoning: str, quality: int, style: str, before: str, after: str
) -> None:
    """Case G2."""
    content = json.dumps({"reasoning": reasoning, "quality": quality, "style": style}, ensure_ascii=False)
    verdict = read_verdict(content)
    assert (verdict.reasoning, verdict.quality, verdict.style) == (reasoning, quality, style)
    draft = json.dumps({"reasoning": before, "quality": 1 - quality, "style": NONE})
    for said in (f"<think>{draft}</think>{content}", f"{before}{content}{after}", f"{draft}\n{content}"):
        try:
            assert read_verdict(said).quality == quality
        except JudgeFault:
            assert not said.startswith("<think>") or "</think>" in reasoning


@given(first=st.tuples(*[st.text(max_size=4)] * 5), second=st.tuples(*[st.text(max_size=4)] * 5))
def test_two_questions_never_share_a_cache_key(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    """Case G4."""
    names = ("model", "rubric_version", "style", "prompt", "text")
    same = cache_key(**dict(zip(names, first, strict=True))) == cache_key(**dict(zip(names, second, strict=True)))
    assert same == (first == second)
