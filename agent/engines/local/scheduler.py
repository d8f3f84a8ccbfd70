"""What the `local` engine decides between two steps: who runs, in which slot, and which tokens go in. No torch here.

A generation's life:

    waiting ──a slot is free──▶ running ──stop, length, abort──▶ finished
                                  │  its slot becomes idle: the tokens stay in it until another generation needs it
                                  └──weights change: `computed` falls to 0, the tokens stay, the keys are made again

A slot holds the keys and values of one sequence. A prompt that extends all the tokens of an idle slot takes that
slot over and is charged for the new tokens only: this is how the turns of an episode share their prefix.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.engines.steering import NO_STEERING, Steering
from agent.episode import SamplingParams


@dataclass(slots=True, eq=False)
class Generation:
    """One request inside the engine.

    `tokens` is the prompt and what was sampled after it; the first `computed` of them have keys and values in slot
    `slot`, made by the present weights. `limit` is the length of `tokens` at which it ends with "length".
    `finish_reason` is "" while it is alive, "error" if the model gave no number. `on_token` is called in the event
    loop after every step that sampled a token of it. `ends_text` says of what was sampled whether a stop string is
    met. `top`: of each sampled token the likeliest others, where `steering` asks for them, itself first.
    """

    id: str
    tokens: list[int]
    prompt_length: int
    limit: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    uniform: Callable[[], float]
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int = -1
    reused: int = 0
    finish_reason: str = ""
    stop_reason: int | None = None
    on_token: Callable[[], None] | None = None
    ends_text: Callable[[list[int]], bool] | None = None
    steering: Steering = NO_STEERING
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    @classmethod
    def new(
        cls, request_id: str, prompt: Sequence[int], sampling: SamplingParams, eos: frozenset[int], max_context: int
    ) -> Generation:
        """A generation with its own source of uniform numbers where `sampling.seed` is given."""
        return cls(
            id=request_id,
            tokens=list(prompt),
            prompt_length=len(prompt),
            limit=min(len(prompt) + sampling.max_tokens, max_context),
            sampling=sampling,
            stop_token_ids=eos | frozenset(sampling.stop_token_ids),
            uniform=random.random if sampling.seed is None else random.Random(sampling.seed).random,
        )

    @property
    def sampled(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]


@dataclass(slots=True)
class Step:
    """What one forward does. `decode`: one token each. `prefill`: tokens [start, end) of each; a chunk that reaches
    the end of its sequence is sampled from as well."""

    decode: list[Generation]
    prefill: list[tuple[Generation, int, int]]

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def sampling(self) -> list[Generation]:
        """The generations that a token is sampled for, in the order of the forward's rows."""
        return self.decode + [g for g, _, end in self.prefill if end == len(g.tokens)]


class Slots:
    """Which slot is whose. Idle slots remember their tokens, the least recently used goes first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._idle: OrderedDict[int, list[int]] = OrderedDict()

    def take(self, prompt: list[int]) -> tuple[int, int] | None:
        """A slot for `prompt` and how many of its tokens are there already; None if all slots are busy."""
        best, length = -1, 0
        for slot, tokens in self._idle.items():
            n = len(tokens)
            # Only whole extensions: cutting a slot back would take the prefix away from the episode that owns it.
            # At least one token must go through the model, to have logits to sample from.
            if length < n < len(prompt) and prompt[n - 1] == tokens[-1] and prompt[:n] == tokens:
                best, length = slot, n
        if best >= 0:
            del self._idle[best]
            return best, length
        if self._free:
            return heapq.heappop(self._free), 0
        if self._idle:
            return self._idle.popitem(last=False)[0], 0
        return None

    def give(self, slot: int, tokens: list[int]) -> None:
        """Take `slot` back; `tokens` are those that it holds keys and values of."""
        if tokens:
            self._idle[slot] = tokens
        else:
            heapq.heappush(self._free, slot)

    def forget(self) -> None:
        """Drop every idle prefix, because the weights that made them are gone (case D6)."""
        for slot in self._idle:
            heapq.heappush(self._free, slot)
        self._idle.clear()


class Scheduler:
    """Admits generations between steps. `prefill_budget` bounds the prompt tokens of one step, so that the others
    go on decoding while a long prompt (or every prompt, after a weight swap) is read."""

    def __init__(self, *, max_sequences: int, slots: int, prefill_budget: int) -> None:
        if slots < max_sequences:
            raise ValueError(f"slots ({slots}) must be at least max_sequences ({max_sequences})")
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.slots = Slots(slots)
        self._max_sequences = max_sequences
        self._prefill_budget = prefill_budget

    def submit(self, generation: Generation) -> None:
        """Queue a generation; `plan` admits it."""
        self.waiting.append(generation)

    def plan(self) -> Step:
        """Admit what fits, and say what the next forward does. Falsy when there is nothing to do."""
        while self.waiting and len(self.running) < self._max_sequences:
            taken = self.slots.take(self.waiting[0].tokens)
            if taken is None:
                break
            generation = self.waiting.popleft()
            generation.slot, generation.computed = taken
            generation.reused = generation.computed
            self.running.append(generation)
        step = Step([], [])
        left = self._prefill_budget
        for generation in self.running:
            pending = len(generation.tokens) - generation.computed
            if pending == 1:
                step.decode.append(generation)
            elif left > 0:
                taken_now = min(pending, left)
                left -= taken_now
                step.prefill.append((generation, generation.computed, generation.computed + taken_now))
        return step

    def advance(self, step: Step, tokens: list[int], logprobs: list[float], version: int) -> list[Generation]:
        """Record a forward and its samples (one a row of `step.sampling`); returns the generations that ended."""
        sampling = step.sampling
        for generation in step.decode:
            generation.computed += 1
        for generation, _, end in step.prefill:
            generation.computed = end
        finished = []
        for generation, token, logprob in zip(sampling, tokens, logprobs, strict=True):
            generation.tokens.append(token)
            generation.logprobs.append(logprob)
            generation.versions.append(version)
            if math.isnan(logprob):  # broken weights: nothing after this means anything
                generation.finish_reason = "error"
            elif token in generation.stop_token_ids:
                generation.finish_reason, generation.stop_reason = "stop", token
            elif generation.ends_text is not None and generation.ends_text(generation.sampled):
                generation.finish_reason = "stop"
            elif len(generation.tokens) >= generation.limit:
                generation.finish_reason = "length"
            else:
                continue
            finished.append(generation)
        if finished:
            self._release(finished)
        return finished

    def abort(self, generation: Generation) -> None:
        """End a waiting or running generation with what it has. Does nothing to a finished one."""
        if generation.finish_reason:
            return
        generation.finish_reason = "abort"
        if generation.slot >= 0:
            self._release([generation])
        else:
            self.waiting.remove(generation)

    def forget(self) -> None:
        """The weights have changed: every key and value is stale, every token stays (cases A20, D6)."""
        self.slots.forget()
        for generation in self.running:
            generation.computed = 0

    def _release(self, finished: list[Generation]) -> None:
        for generation in finished:
            self.slots.give(generation.slot, generation.tokens[: generation.computed])
        self.running = [g for g in self.running if not g.finish_reason]
