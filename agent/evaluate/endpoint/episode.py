"""`chat_sample`: one task, one environment, one chat endpoint in; one `Sample` out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from agent.episode import StopReason
from agent.evaluate.config import Endpoint, Evaluation
from agent.evaluate.endpoint import actions
from agent.evaluate.endpoint.client import ChatClient, ContextFull, Counts, EndpointFault
from agent.evaluate.endpoint.wire import Reply, clean, turn_limit
from agent.evaluate.sample import Said, Sample, Tokens
from agent.runtime.environment_calls import EnvironmentCalls, Opening, Outcome
from agent.runtime.episode_clock import EpisodeClock
from envs.core import AsyncEnv, EnvironmentFault, Message


async def chat_sample(
    task_id: str, number: int, env: AsyncEnv, client: ChatClient, evaluation: Evaluation, endpoint: Endpoint
) -> Sample:
    """Run one episode of `env` with the model behind `client`, and return what is kept of it.

        reset -> [ ask -> action text -> step -> answers ]* -> graded -> Sample

    The context that is full, a turn cut by its limit, too many turns and the wall clock end it through `atruncate`,
    which grades it as it stands. A failing environment, and an endpoint that gives no answer, make it a fault: a
    sample without a reward, with what it has cost. Raises `EndpointUnusable`, after which no sample will do.
    """
    episode = _ChatEpisode(task_id, number, env, client, evaluation, endpoint)
    try:
        return await episode.run()
    except (EnvironmentFault, EndpointFault, actions.UnwritableCall) as fault:
        return episode.fault(f"{type(fault).__name__}: {fault}")


class _ChatEpisode:
    def __init__(
        self,
        task_id: str,
        number: int,
        env: AsyncEnv,
        client: ChatClient,
        evaluation: Evaluation,
        endpoint: Endpoint,
    ) -> None:
        self._task_id, self._number, self._client = task_id, number, client
        self._evaluation, self._endpoint = evaluation, endpoint
        self._env = EnvironmentCalls(env, evaluation.env.id, evaluation.stage_limits)
        self._conversation: list[Message] = []
        self._tools: list[dict[str, Any]] = []
        self._said: list[Said] = []
        self._counts, self._tokens = Counts(), Tokens()
        self._turns = 0
        self._reward = 0.0
        self._metrics: dict[str, Any] = {}
        self._generate_s = 0.0
        self._began = time.monotonic()
        self._clock = EpisodeClock(evaluation.pacing.episode_s)

    async def run(self) -> Sample:
        seed = self._evaluation.seed_of(self._task_id, self._number)
        opening = await self._env.reset(seed, self._task_id, self._endpoint.tool_format)
        self._tools = _checked(opening, self._evaluation.env.id)
        self._conversation = actions.opening(opening.messages)
        self._hear(opening.messages)
        while True:
            try:
                reply = await self._reply()
            except ContextFull:
                return await self._truncate("context", "")
            except TimeoutError:
                return await self._truncate("wall_clock", "")
            text = self._speak(reply)
            if reply.finish == "length":
                return await self._truncate(self._which_limit(reply), text)
            outcome = await self._env.step(text)
            self._credit(outcome)
            if outcome.ended is not None:
                return self._sample(outcome.ended)
            self._go_on(reply, outcome.messages)
            if self._evaluation.max_turns is not None and self._turns >= self._evaluation.max_turns:
                return await self._truncate("turns", "")
            if self._clock.over:
                return await self._truncate("wall_clock", "")

    def fault(self, what: str) -> Sample:
        """The sample as a fault: no reward, but what was said and what it has cost."""
        return self._sample(StopReason.INFRASTRUCTURE_ERROR, fault=clean(what))

    async def _reply(self) -> Reply:
        sampling, began = self._evaluation.sampling, time.monotonic()
        seed = None
        if sampling.seed is not None:
            seed = self._evaluation.seed_of(self._task_id, self._number, self._turns + 1)
        try:
            reply = await self._client.ask(
                self._conversation, self._tools, clock=self._clock, seed=seed, counts=self._counts
            )
        finally:
            self._generate_s += time.monotonic() - began
        self._turns += 1
        self._tokens += reply.tokens
        return reply

    def _speak(self, reply: Reply) -> str:
        """Note a turn, and say what the environment is given for it."""
        self._said.append(
            Said(
                role="assistant",
                text=reply.content,
                reasoning=reply.reasoning,
                calls=tuple((call.name, call.arguments) for call in reply.calls),
                finish=reply.finish,
                tokens=reply.tokens.completion,
            )
        )
        if reply.finish == "length":  # no call of a turn that was cut is carried out
            return reply.content
        return actions.action_text(reply.content, reply.calls, self._tools, self._endpoint.tool_format)

    def _which_limit(self, reply: Reply) -> str:
        """Whether a turn was cut by its own limit, or by the end of the context."""
        limit = turn_limit(self._endpoint, self._evaluation.sampling)
        return "turn_tokens" if limit is not None and reply.tokens.completion >= limit else "context"

    def _go_on(self, reply: Reply, messages: Sequence[Message]) -> None:
        message, ids = actions.assistant_message(reply, self._turns, self._tools, self._endpoint)
        self._conversation.append(message)
        self._conversation += actions.answers(messages, ids, self._endpoint, self._tools)
        self._hear(messages)

    def _hear(self, messages: Sequence[Message]) -> None:
        self._said += [
            Said(role=message["role"], text=clean(str(message.get("content") or ""))) for message in messages
        ]

    def _credit(self, outcome: Outcome) -> None:
        self._reward += outcome.reward
        self._metrics |= outcome.metrics
        if outcome.reward and self._turns:
            last = max(index for index, said in enumerate(self._said) if said.role == "assistant")
            reward = self._said[last].reward + outcome.reward
            self._said[last] = msgspec.structs.replace(self._said[last], reward=reward)

    async def _truncate(self, reason: str, text: str) -> Sample:
        outcome = await self._env.truncate(reason, text)
        self._credit(outcome)
        assert outcome.ended is not None  # `EnvironmentCalls.truncate` sees to it
        return self._sample(outcome.ended)

    def _sample(self, stop_reason: StopReason, *, fault: str = "") -> Sample:
        return Sample(
            task_id=self._task_id,
            number=self._number,
            stop_reason=stop_reason.value,
            reward=None if fault else self._reward,
            fault=fault,
            turns=self._turns,
            tokens=self._tokens,
            requests=self._counts.requests,
            retries=self._counts.retries,
            seconds=time.monotonic() - self._began,
            generate_s=self._generate_s,
            environment_s=self._env.seconds,
            metrics=self._metrics,
            transcript=tuple(self._said),
            finished_at=time.time(),
        )


def _checked(opening: Opening, env_id: str) -> list[dict[str, Any]]:
    """The tools; raises `EnvironmentFault` for one that is no schema with a name."""
    for tool in opening.tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise EnvironmentFault(f"{env_id}: info['tools'] must be OpenAI tool schemas: {str(tool)[:200]}")
    return opening.tools
