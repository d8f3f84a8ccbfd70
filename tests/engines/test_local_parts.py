"""The parts of the local engine by themselves: slots, plans, sampling."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from byte_model import write_byte_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agent.engines.local.model import sample
from agent.engines.local.scheduler import Generation, Scheduler, Slots
from agent.engines.local.stop_strings import StopStrings
from agent.episode import SamplingParams

NO_EOS: frozenset[int] = frozenset()


def generation(prompt: list[int], max_tokens: int = 4, context: int = 1000) -> Generation:
    return Generation.new("x", prompt, SamplingParams(max_tokens=max_tokens), NO_EOS, context)


def advance(scheduler: Scheduler, token: int = 1) -> list[Generation]:
    step = scheduler.plan()
    rows = len(step.sampling)
    return scheduler.advance(step, [token] * rows, [-1.0] * rows, 0)


def test_a_slot_is_reused_only_by_a_true_extension() -> None:
    slots = Slots(3)
    taken = slots.take([1, 2, 3])
    assert taken == (0, 0)
    slots.give(0, [1, 2, 3])
    assert slots.take([1, 2, 3]) == (1, 0), "one token must be left to read"
    assert slots.take([1, 9, 3, 4]) == (2, 0)
    assert slots.take([1, 2, 3, 4]) == (0, 3)
    assert slots.take([5]) is None


def test_the_longest_prefix_wins_and_the_oldest_is_evicted() -> None:
    slots = Slots(3)
    for _ in range(3):
        slots.take([0])
    slots.give(1, [7])
    slots.give(0, [7, 8])
    slots.give(2, [5])
    assert slots.take([7, 8, 9]) == (0, 2)
    assert slots.take([6, 6]) == (1, 0)


def test_forgotten_prefixes_are_not_reused() -> None:
    """Case D6."""
    slots = Slots(1)
    slots.take([1])
    slots.give(0, [1, 2])
    slots.forget()
    assert slots.take([1, 2, 3]) == (0, 0)


def test_a_long_prompt_does_not_starve_decoding() -> None:
    scheduler = Scheduler(max_sequences=2, slots=2, prefill_budget=10)
    short = generation([1], max_tokens=50)
    scheduler.submit(short)
    advance(scheduler)
    scheduler.submit(generation(list(range(95))))
    for _ in range(10):
        before = len(short.logprobs)
        advance(scheduler)
        assert len(short.logprobs) == before + 1
    assert not scheduler.plan().prefill, "the long prompt is read by now"


def test_after_new_weights_tokens_stay_and_keys_go() -> None:
    """Case A20."""
    scheduler = Scheduler(max_sequences=1, slots=1, prefill_budget=100)
    running = generation([3, 4, 5], max_tokens=9)
    scheduler.submit(running)
    advance(scheduler)
    advance(scheduler)
    scheduler.forget()
    (chunk,) = scheduler.plan().prefill
    assert chunk == (running, 0, 5)
    assert (running.tokens, len(running.logprobs)) == ([3, 4, 5, 1, 1], 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 4), st.integers(1, 20))
def test_no_slot_is_shared_or_lost(seed: int, max_sequences: int, spare: int, budget: int) -> None:
    """Whatever comes, ends, is aborted or swapped: a slot has one owner, its tokens are the owner's, and all return."""
    rng = random.Random(seed)
    scheduler = Scheduler(max_sequences=max_sequences, slots=max_sequences + spare, prefill_budget=budget)
    held: dict[int, list[int]] = {}  # what a real cache would hold, by slot
    everyone: list[Generation] = []
    for _ in range(60):
        action = rng.random()
        if action < 0.3:
            base = rng.choice(everyone).tokens if everyone and rng.random() < 0.6 else []
            prompt = [*base, *(rng.randrange(3) for _ in range(rng.randint(1, 12)))]
            everyone.append(generation(prompt, max_tokens=rng.randint(1, 6)))
            scheduler.submit(everyone[-1])
        elif action < 0.35 and everyone:
            scheduler.abort(rng.choice(everyone))
        elif action < 0.4:
            scheduler.forget()
            held.clear()
        step = scheduler.plan()
        for g in scheduler.running:
            assert held.get(g.slot, [])[: g.computed] == g.tokens[: g.computed], "keys of another sequence"
        assert len({g.slot for g in scheduler.running}) == len(scheduler.running) <= max_sequences
        assert sum(end - start for _, start, end in step.prefill) <= budget
        for g, start, end in [*((g, g.computed, g.computed + 1) for g in step.decode), *step.prefill]:
            held[g.slot] = g.tokens[:start] + g.tokens[start:end]
        tokens = [rng.randrange(3) for _ in step.sampling]
        scheduler.advance(step, tokens, [-1.0] * len(tokens), 0)
    for _ in range(3000):
        if not (scheduler.running or scheduler.waiting):
            break
        advance(scheduler)
    assert all(g.finish_reason for g in everyone), "someone waits for ever"
    scheduler.forget()
    assert [scheduler.slots.take([0]) for _ in range(max_sequences + spare)] == [
        (slot, 0) for slot in range(max_sequences + spare)
    ]


def draw(logits: torch.Tensor, uniform: torch.Tensor, **options: float) -> tuple[list[int], list[float]]:
    rows = logits.shape[0]
    temperature = torch.full((rows,), options.get("temperature", 1.0))
    top_p = torch.full((rows,), options["top_p"]) if "top_p" in options else None
    top_k = torch.full((rows,), int(options["top_k"])) if "top_k" in options else None
    return sample(logits, temperature, top_p, top_k, uniform)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.8}]
)
def test_tokens_come_as_often_as_their_logprobs_say(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 12) * 2
    # An even grid of uniform numbers instead of random ones: the counts are then exact to one grid step.
    n = 20_000
    tokens, logprobs = draw(logits.expand(n, -1), (torch.arange(n, dtype=torch.float64) + 0.5) / n, **options)
    share = torch.bincount(torch.tensor(tokens), minlength=12) / n
    claimed = {t: p for t, p in zip(tokens, logprobs, strict=True)}
    assert sum(torch.tensor(p).exp().item() for p in claimed.values()) == pytest.approx(1, abs=1e-5)
    for token, logprob in claimed.items():
        assert share[token].item() == pytest.approx(torch.tensor(logprob).exp().item(), abs=2 / n)


def test_tempered_logprobs_of_two_tokens() -> None:
    """Case A19: logits [2, 0] at temperature .5 give the behaviour that the ratios .896929 and 6.627462 divide by."""
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    tokens, logprobs = draw(logits, torch.tensor([0.1, 0.999], dtype=torch.float64), temperature=0.5)
    assert tokens == [0, 1]
    untempered = logits[0].log_softmax(-1)
    ratios = (untempered - torch.tensor(logprobs)).exp().tolist()
    assert ratios == pytest.approx([0.896929, 6.627462], abs=1e-5)


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 10_000))
def test_no_draw_hits_a_token_of_probability_zero(uniform: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(1, 50) * 30
    logits[0, ::2] = -torch.inf
    tokens, logprobs = draw(logits, torch.tensor([uniform], dtype=torch.float64))
    assert tokens[0] % 2 == 1
    assert logprobs[0] > -torch.inf


def test_a_stop_string_is_met_by_the_token_that_completes_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_byte_model(tmp_path) / "tokenizer.json"))
    ids = tokenizer.encode("so é Observation: 42", add_special_tokens=False).ids
    met = StopStrings(tmp_path).watch(("Observation:", "never said"))
    first = next(i for i in range(1, len(ids) + 1) if met(ids[:i]))
    assert tokenizer.decode(ids[:first]) == "so é Observation:"
    scheduler, running = Scheduler(max_sequences=1, slots=1, prefill_budget=10), generation([5], max_tokens=50)
    running.ends_text = met
    scheduler.submit(running)
    for token in ids:
        if advance(scheduler, token):
            break
    assert (running.sampled, running.finish_reason) == (ids[:first], "stop")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        StopStrings(None).watch(("x",))
