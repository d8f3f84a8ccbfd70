"""The configuration of one agent runtime: a frozen model in which an unknown key is an error that names the key."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agent.chat.settings import ChatConfig
from agent.configuration_errors import wrong_keys
from agent.episode import SamplingParams
from envs.asking.endpoint import ModelEndpoint
from envs.mcp_tools.settings import ToolSettings


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the key and what to do."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EnvConfig(_Frozen):
    """Which environment, and with which arguments: `envs.make_core(id, **arguments)`.

    `model`: the language model that the environment asks, if it asks one; None: the engines of the run. `tools`: tools
    that it has beside its own.
    """

    id: str
    kwargs: dict[str, Any] = {}
    model: ModelEndpoint | None = None
    tools: ToolSettings | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """What `envs.make_core` is given beside the id."""
        added = {"model": self.model, "tools": self.tools}
        return {**self.kwargs, **{key: value for key, value in added.items() if value is not None}}

    @model_validator(mode="after")
    def _once(self) -> EnvConfig:
        for key in ("model", "tools"):
            if getattr(self, key) is not None and key in self.kwargs:
                raise ValueError(f"give `{key}` or `kwargs.{key}`, not both")
        return self


class SamplingConfig(_Frozen):
    """How actions are sampled; `max_tokens` is set per turn by the runtime, `seed` comes with the ticket."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    seeded: bool = False
    """Derive every request's seed from the ticket's, so that one engine at one version repeats an episode."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an action, for policies that write no tool calls; the engine reads its tokens as text then."""

    def params(self, *, max_tokens: int, stop_token_ids: tuple[int, ...], seed: int | None = None) -> SamplingParams:
        """The engine's sampling parameters for a turn of at most `max_tokens` tokens."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=stop_token_ids,
            stop=self.stop,
        )


class EvaluationSettings(_Frozen):
    """One of several evaluation sets: its environment, and how its episodes are sampled (None: as in training)."""

    env: EnvConfig
    sampling: SamplingConfig | None = None
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    max_context_tokens: int | None = Field(default=None, ge=2)


class HarnessConfig(_Frozen):
    """An agent that exists already and makes the turns itself, through a session address; see docs/harness.md.

    Give `command` or `call`. In the words of `command`, the values of `environment` and in `folder`, {task_id},
    {task_file}, {session_url}, {openai_base_url}, {anthropic_base_url}, {api_key} and {model} stand for what is of the
    episode, {scratch} for an empty folder that lives as long as it, and {python} for the runtime's own interpreter.
    """

    command: tuple[str, ...] = ()
    """A program that is started once an episode."""
    call: str = Field(default="", pattern=r"^$|^[\w.]+:\w+$")
    """`package.module:function`, called with an `agent.harness.task.HarnessTask`. One that is `async` runs inside the
    runtime; any other in a process of its own."""
    environment: dict[str, str] = {}
    """Further environment variables of the program."""
    folder: str | None = None
    """Where the program runs; None: where the runtime does."""
    reward: Literal["environment", "posted"] = "environment"
    """Who grades: the environment's verifier, or the harness itself with `POST .../reward`."""
    model: str = "policy"
    """The model's name, as it is listed; a request may ask for any."""
    host: str = "127.0.0.1"
    """Where session addresses listen. Their secret is in the path; beyond this machine it would travel in the clear."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free one."""
    url: str | None = None
    """How the program reaches that, where it is not http://host:port: from inside a container, say."""
    grace_s: float = Field(default=5.0, gt=0)
    """From SIGTERM to SIGKILL, for a program that has to end."""
    max_branches: int = Field(default=64, ge=0)
    """Chains beside the main one that an episode may have; a request that would begin another one is refused."""

    @model_validator(mode="after")
    def _one_way_to_start_it(self) -> HarnessConfig:
        if bool(self.command) == bool(self.call):
            raise ValueError("give `command` (a program) or `call` (package.module:function), one of the two")
        if self.call and (self.environment or self.folder):
            raise ValueError("`environment` and `folder` are of a `command`; a `call` runs where the runtime runs")
        return self


class StageLimits(_Frozen):
    """How long each stage may take, in seconds. Past a limit the stage has failed, except where the comment differs.

    "The clocks of an episode" in docs/runtime.md draws which of them encloses which.
    """

    reset_s: float = Field(default=60.0, gt=0)
    step_s: float = Field(default=120.0, gt=0)
    """One environment step. The policy's own slow code is answered long before; this is for a hung sandbox."""
    generate_s: float = Field(default=600.0, gt=0)
    """One engine request. Past it the turn goes on from what was sampled; without a token the request is made again, at
    most `agent.runtime.engine_requests.REQUEST_FAULTS` times."""
    put_s: float = Field(default=30.0, gt=0)
    """One attempt to deliver an episode; attempts are repeated until `store_patience_s`."""
    episode_s: float = Field(default=3600.0, gt=0)
    """Wall clock of a whole episode: past it the episode is truncated ("wall_clock") and graded as it stands.
    Time in which it waits for an engine to come back is not counted."""
    shutdown_s: float = Field(default=10.0, gt=0)
    """From the first signal to the end of the process."""
    store_patience_s: float = Field(default=120.0, gt=0)
    """How long the store may be away before the runtime stops with an error."""
    engine_patience_s: float = Field(default=600.0, gt=0)
    """How long every engine may be away before the runtime stops with an error."""
    engine_check_s: float = Field(default=10.0, gt=0)
    """One question to an engine how it is; unanswered, it gets no requests until it answers again."""
    engine_check_every_s: float = Field(default=5.0, gt=0)


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """The part of a runtime's configuration that one episode needs."""

    env_id: str
    sampling: SamplingConfig
    max_context_tokens: int
    max_tokens_per_turn: int
    limits: StageLimits
    worker: str = ""
    environment: str = ""


class RuntimeConfig(_Frozen):
    """Everything that `python -m agent.runtime` needs; see `EXAMPLE` for a file."""

    store: str
    engines: tuple[str, ...] = Field(min_length=1)
    model: str
    """Folder (or hub id) whose tokenizer and chat template render the episodes."""
    env: EnvConfig
    evaluation_env: EnvConfig | None = None
    """Environment of tickets of kind "evaluate"; None: the training environment serves them too."""
    environments: dict[str, EnvConfig] = {}
    """Several training environments by name, for tickets that name one; `env` is for those that name none."""
    evaluations: dict[str, EvaluationSettings] = {}
    """Evaluation sets by name, for tickets of kind "evaluate" that name one; "": instead of `evaluation_env`."""
    tickets: Literal["all", "train", "evaluate"] = "all"
    """Which kind of tickets this runtime runs."""
    concurrency: int = Field(default=64, ge=1)
    chat: ChatConfig = ChatConfig()
    """How conversations are rendered, and in which form the policy calls tools."""
    sampling: SamplingConfig = SamplingConfig()
    evaluation_sampling: SamplingConfig | None = None
    """Sampling of evaluation episodes; None: as in training."""
    max_context_tokens: int = Field(default=4096, ge=2)
    """Prompt, actions and observations together. No recorded episode is longer."""
    max_tokens_per_turn: int = Field(default=1024, ge=1)
    limits: StageLimits = StageLimits()
    engine_keepalive_s: float = Field(default=2.0, gt=0)
    """How long a connection to an engine is kept while nobody uses it. Less than the engine keeps it: vLLM 5 s, or what
    its VLLM_HTTP_TIMEOUT_KEEP_ALIVE says. Where turns are further apart than this, each one connects again."""
    harness: HarnessConfig | None = None
    """Who makes the turns: None: this runtime; else that agent, and `python -m agent.harness` has to be started."""
    worker: str = ""
    progress_every_s: float = Field(default=10.0, gt=0)
    spool: str | None = None
    """Folder for finished episodes that the store did not take in time; the next start of a runtime delivers them."""
    lease_wait_s: float = Field(default=10.0, gt=0)
    """How long the store may hold a lease request open while it has no ticket."""
    faults_in_a_row: int | None = Field(default=None, ge=1)
    """The runtime stops when more tickets than this fail one after the other; None: 50, or 3 for each slot if more."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    key_file: Path | None = None
    """File with the key that store and engines ask for; None: what is in SAO_KEY, if anything is."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of `/metrics` and `/episodes` (0: any free one); None: no port. It asks for the key too."""
    metrics_host: str = "127.0.0.1"
    """The interface of that port; beyond this machine a key is needed."""
    port_file: Path | None = None
    """That port is written there once it answers."""

    @field_validator("engines", mode="before")
    @classmethod
    def _one_engine_may_be_a_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def most_faults_in_a_row(self) -> int:
        """`faults_in_a_row`, or its default."""
        return self.faults_in_a_row or max(50, 3 * self.concurrency)

    @property
    def worker_name(self) -> str:
        """`worker`, or a name that no other process of this host has."""
        return self.worker or f"{socket.gethostname()}-{os.getpid()}"


EXAMPLE = """\
store: http://127.0.0.1:8700
engines: [http://127.0.0.1:8800]      # several: an episode stays on its engine while that is sound
model: runs/tir_tiny/sft              # tokenizer and chat template
env:
  id: sao/PythonTIR-v0
  kwargs:
    problems: [{problem: "What is 6*7?", answer: "42"}]
evaluation_env:                       # optional: the held-out tasks
  id: sao/PythonTIR-v0
  kwargs:
    problems: [{problem: "What is 7*8?", answer: "56"}]
concurrency: 64
chat: {template_kwargs: {}}           # e.g. {enable_thinking: false}: what the chat template may be told
sampling: {temperature: 1.0, top_p: 1.0}
max_context_tokens: 4096
max_tokens_per_turn: 1024
limits: {reset_s: 60, step_s: 120, generate_s: 600, put_s: 30, episode_s: 3600, shutdown_s: 10, store_patience_s: 120}
worker: laptop-0
spool: runs/tir_tiny/undelivered      # finished episodes that the store could not take before the runtime left
key_file: runs/tir_tiny/key           # the key of store and engines, where they ask for one; without it: $SAO_KEY
metrics_port: 9100                    # /metrics for Prometheus, /episodes for python -m agent.inspect --live
"""


def parse_config(text: str, *, source: str = "the configuration") -> RuntimeConfig:
    """Read YAML (and so JSON) into a `RuntimeConfig`; raises `ConfigError` in one paragraph."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is neither YAML nor JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source} must be a mapping of keys such as `store` and `engines`; see --help for an example"
        )
    try:
        return RuntimeConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {wrong_keys(error)}") from error


def load_config(path: Path) -> RuntimeConfig:
    """Read a configuration file; raises `ConfigError` when it is missing or wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_config(text, source=str(path))
