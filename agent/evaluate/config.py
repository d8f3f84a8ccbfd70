"""What is evaluated, and how: frozen models in which an unknown or impossible key is an error that names it.

What makes two samples comparable is `Evaluation.identity`: one results folder holds samples of one identity only. How
many tasks and samples, how fast and how patiently (`Workload`, `Pacing`) may change from one session to the next.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agent.chat.settings import ChatConfig
from agent.runtime.settings import EnvConfig, StageLimits
from envs.tool_calls import FamilyFormat

_OWN_KEYS = ("model", "messages", "tools", "tool_choice", "stream", "n", "temperature", "top_p", "max_tokens", "seed")
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class EvaluationError(ValueError):
    """What stops an evaluation before or in the midst of it; the message says what to do."""


class WrongArgument(EvaluationError):
    """An argument that cannot be used; the message names it."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(_Frozen):
    """How turns are sampled. None: not sent, and so as the endpoint does by itself (1.0 at an engine of ours).

    `max_tokens` bounds one turn. `seed` makes a seed for each request, where the endpoint knows seeds; the episodes'
    own seeds follow from it too.
    """

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0)


class Endpoint(_Frozen):
    """An OpenAI-compatible chat endpoint.

    `url`: as OpenAI's clients take it (".../v1"). `api_key_env`: the environment variable that holds the key; unset is
    no key. `calls`: "structured" (read from `tool_calls`, and from the text where there are none) or "text" (the
    endpoint is told not to read calls, `tool_choice: none`). `tool_format`: the form in which calls stand in text.
    `return_reasoning`: send `reasoning_content` back with its turn, as some models want between calls. `body`: more
    keys of every request, such as `reasoning_effort`.
    """

    url: str
    model: str = Field(min_length=1)
    api_key_env: str = "OPENAI_API_KEY"
    calls: Literal["structured", "text"] = "structured"
    tool_format: FamilyFormat = "hermes"
    return_reasoning: bool = False
    body: dict[str, Any] = {}

    @field_validator("url")
    @classmethod
    def _is_a_base(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(
                f"must be the endpoint's base, http(s)://host/v1, not {parts._replace(query='').geturl()!r}"
            )
        if parts.username or parts.password:
            raise ValueError("holds a user or a password: put the key into an environment variable, see --api-key-env")
        return url.rstrip("/").removesuffix("/chat/completions")

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not name.isidentifier():  # not shown: it may be the key itself
            raise ValueError("takes the name of an environment variable, not the key")
        return name

    @field_validator("body")
    @classmethod
    def _adds_keys_only(cls, body: dict[str, Any]) -> dict[str, Any]:
        for key in body:
            if key in _OWN_KEYS:
                raise ValueError(f"{key} is not for --body: it has an option of its own, or is set by the evaluation")
        return body

    def key(self) -> str | None:
        """The API key; None where the variable is unset or empty. Raises `WrongArgument` for one that is no header."""
        key = os.environ.get(self.api_key_env, "").strip()
        if any(not " " < letter < "\x7f" for letter in key):
            raise WrongArgument(f"--api-key-env: the value of {self.api_key_env} has characters that no key has")
        return key or None


class RolloutEngine(_Frozen):
    """A rollout engine (`agent.engines`): token ids in and out. `model`: folder of its tokenizer and chat template."""

    urls: tuple[str, ...] = Field(min_length=1)
    model: Path
    chat: ChatConfig = ChatConfig()
    max_context_tokens: int | None = Field(default=None, ge=2)


class Workload(_Frozen):
    """Which samples are wanted. `tasks`: by id; None: all, or the first `limit`. `passes_at`: the reward from which a
    sample passes; None: any above 0."""

    samples: int = Field(default=1, ge=1)
    tasks: tuple[str, ...] | None = None
    limit: int | None = Field(default=None, ge=1)
    passes_at: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _names_or_counts(self) -> Workload:
        if self.tasks is not None and self.limit is not None:
            raise ValueError("tasks and limit exclude each other: the first names tasks, the second counts them")
        return self


class Pacing(_Frozen):
    """How fast, and how patiently. `concurrency`: samples at once. `rpm`, `tpm`: most requests and tokens a minute.

    `request_s`: one request. `patience_s`: how long one turn may wait for an endpoint that is away, or asks to come
    later. `episode_s`: one sample; past it the episode is truncated and graded as it stands. `reset_s`, `step_s`: one
    call of the environment; past it the sample is a fault.
    """

    concurrency: int = Field(default=8, ge=1)
    rpm: int | None = Field(default=None, ge=1)
    tpm: int | None = Field(default=None, ge=1)
    request_s: _Seconds = 600.0
    patience_s: _Seconds = 600.0
    episode_s: _Seconds = 3600.0
    reset_s: _Seconds = 3600.0
    step_s: _Seconds = 3600.0


class Evaluation(_Frozen):
    """One evaluation: an environment, whoever acts in it, and how much of it is wanted."""

    env: EnvConfig
    policy: Endpoint | RolloutEngine
    sampling: Sampling = Sampling()
    max_turns: int | None = Field(default=None, ge=1)
    workload: Workload = Workload()
    pacing: Pacing = Pacing()

    def identity(self, policy_version: int | None = None) -> dict[str, Any]:
        """What every sample of one results folder has in common, as flat plain data by the option's name.

        `policy_version`: of the weights, where an engine tells it.
        """
        flat: dict[str, Any] = {"ENV": self.env.id, "--env-arg": self.env.kwargs, "--max-turns": self.max_turns}
        flat |= {f"--{key.replace('_', '-')}": value for key, value in self.sampling.model_dump(mode="json").items()}
        if isinstance(self.policy, Endpoint):
            given = self.policy.model_dump(mode="json", exclude={"api_key_env"})
            flat |= {f"--{key.replace('_', '-')}": value for key, value in given.items()}
        else:
            flat |= {
                "--model-folder": str(self.policy.model.absolute()),
                "--max-context-tokens": self.policy.max_context_tokens,
                "chat": self.policy.chat.model_dump(mode="json"),
                "policy version": policy_version,
            }
        return flat

    @property
    def stage_limits(self) -> StageLimits:
        """The limits of an episode's stages, as the runtime names them."""
        return StageLimits(
            reset_s=self.pacing.reset_s,
            step_s=self.pacing.step_s,
            episode_s=self.pacing.episode_s,
            generate_s=self.pacing.request_s,
            engine_patience_s=self.pacing.patience_s,
        )

    def seed_of(self, task_id: str, number: int, request: int = 0) -> int:
        """A seed of 31 bits for one request of one sample (0: the episode's own), the same in every session."""
        text = f"{self.sampling.seed or 0}\0{task_id}\0{number}\0{request}"
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1

    @property
    def policy_name(self) -> str:
        """For people: the endpoint's model, or the engine's folder."""
        return self.policy.model if isinstance(self.policy, Endpoint) else str(self.policy.model)

    @property
    def tool_format(self) -> FamilyFormat:
        """The form of calls in texts; for an engine it is the chat template's, unless the configuration says one."""
        if isinstance(self.policy, Endpoint):
            return self.policy.tool_format
        return "hermes" if self.policy.chat.tool_format == "auto" else self.policy.chat.tool_format
