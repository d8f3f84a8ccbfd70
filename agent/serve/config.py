"""The configuration of a server: section `serve` of a recipe, and the keys of other sections that it needs.

The server may not import the learner, so it reads the recipe's file itself. In its own section an unknown key is an
error; sections that belong to others are checked by those.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent.chat.settings import ChatConfig
from agent.configuration_errors import wrong_keys
from agent.doors.door import is_loopback
from agent.serve.doors.settings import DoorsConfig
from agent.serve.owner_config import EventsConfig, FeedbackConfig, FiguresConfig
from envs.key_values import WrongWord, override


class ServeError(ValueError):
    """A server that cannot be started; the message names the key or the file and says what to do."""


class ReplicasConfig(BaseModel):
    """Section `serve.replicas`: several servers of one run, with a store of its own process (docs/serve_model.md).

    The owner of versions and learner gives `host` and `port`, where replicas and the learner find it behind the run's
    key. A replica gives `owner`, that address, and a `name` of its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """Of the owner's inner port; 0 picks a free one."""
    owner: str | None = None
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_-]*$")
    """Of a replica; its journal, versions and log are apart from the owner's by it."""
    poll_s: float = Field(default=1.0, gt=0)
    """How often a replica asks what the owner serves."""

    @model_validator(mode="after")
    def _named(self) -> ReplicasConfig:
        if self.owner is not None and not self.name:
            raise ValueError("name is missing: a replica keeps its journal in a folder of this name")
        return self


class ClientsConfig(BaseModel):
    """Section `serve.clients`: what clients of each wire may ask, and how they are answered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reasoning: Literal["auto", "think", "harmony", "none"] = "auto"
    """How thinking is told from what is said: between `<think>` tags, in harmony's channel, or not at all; auto: as
    models of the chat template's family write it."""
    max_n: int = Field(default=8, ge=1, le=128)
    """Most responses to one prompt, and most prompts of one completion."""
    alive_every_s: float = Field(default=10.0, gt=0)
    """How long a stream may be silent before it says that it is alive."""
    long_body_bytes: int = Field(default=16384, ge=0)
    """From here on a request is read and rendered beside the loop that everybody's streams go through."""


class CanaryConfig(BaseModel):
    """Section `serve.canary`: a new version is tried on a share of the answers before it answers everybody."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(default=0.1, gt=0, lt=1)
    """Of the time, and so of the answers, that go to the new version."""
    min_verdicts: int = Field(default=50, ge=2)
    """So many on each of the two before they are compared."""
    tolerance: float = Field(default=0.05, ge=0)
    """How much lower the new version's mean reward may be, where the difference is no chance."""
    period_s: float = Field(default=20.0, gt=0)
    """The new version answers for `share` of every period: two swaps of the engine's weights."""
    longest_s: float = Field(default=3600.0, gt=0)
    """After that a trial is decided by the verdicts that there are."""


class ServeConfig(BaseModel):
    """Section `serve` of a recipe. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 picks a free one."""
    model_name: str | None = None
    """What clients ask for; None: the name of the run."""
    keys_file: Path | None = None
    """Bearer keys, one `name:key` a line; also read from $SAO_SERVE_KEYS, comma-separated. None at all: the server
    makes one at its first start, `runs/<name>/serve/key`. Names that begin with `admin` may change versions."""
    doors: DoorsConfig = DoorsConfig()
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one response; None: `runtime.max_tokens_per_turn`."""
    max_body_bytes: int = Field(default=1 << 20, ge=1024)
    max_concurrent: int = Field(default=256, ge=1)
    """Generations at once; a request beyond it is answered 503."""
    requests_per_minute: float = Field(default=6000.0, gt=0)
    """By key (by address where there are no keys), and so for the next one."""
    feedback_per_minute: float = Field(default=6000.0, gt=0)
    burst: int = Field(default=500, ge=1)
    """How many calls may come at once before the rates above count."""
    generate_s: float = Field(default=600.0, gt=0)
    write_s: float = Field(default=30.0, gt=0)
    """How long a client may leave a chunk unread before its generation is stopped."""
    write_buffer_bytes: int = Field(default=1 << 16, ge=1)
    """What may wait for a slow client inside this process."""
    feedback_ttl_s: float = Field(default=7 * 24 * 3600.0, gt=0)
    """How long a verdict on a response is taken; after that it expires unlearned and feedback is answered 410."""
    feedback: FeedbackConfig = FeedbackConfig()
    figures: FiguresConfig = FiguresConfig()
    events: EventsConfig = EventsConfig()
    retention_s: float = Field(default=30 * 24 * 3600.0, gt=0)
    """What was said is wiped so long after a conversation's last sign of life."""
    delivery_wait_s: float = Field(default=1.0, ge=0)
    """How long an answer to final feedback waits for the episode to be in the store. It is in the server's own journal
    before that."""
    replicas: ReplicasConfig = ReplicasConfig()
    keep_versions: int = Field(default=8, ge=1)
    max_journal_bytes: int | None = Field(default=None, ge=65536)
    clients: ClientsConfig = ClientsConfig()
    judged_by: Literal["user", "key"] = "user"
    """Who counts as one for `store.max_share_per_user`: every `user` that a key names, for keys that applications hold;
    or the key, for keys that people hold, who could name any number of users. Without a key it is the address."""
    canary: CanaryConfig | None = None
    """None: a publication is served to everybody at once."""
    learner_restarts: int = Field(default=5, ge=0)
    """How often in a row a learner that died is started again."""
    learner_backoff_s: float = Field(default=1.0, gt=0)
    """Before the first restart; doubled each time, at most a minute."""
    learner_settled_s: float = Field(default=300.0, gt=0)
    """A learner that lived so long is not in a row of failures any more."""
    simulated_per_minute: float = Field(default=60.0, gt=0, le=600)
    """Most verdicts a minute of the simulated users that the page can let in."""

    @model_validator(mode="after")
    def _open_for_this_machine_alone(self) -> ServeConfig:
        if self.doors.open and not is_loopback(self.host):
            raise ValueError(f"doors.open: only on the loopback interface, not with host {self.host}; leave it out")
        return self


class _Foreign(BaseModel):
    """Keys of a section that somebody else checks."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Adapter(_Foreign):
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    publish: Literal["adapter", "merged"] = "adapter"


class _Model(_Foreign):
    path: Path | None = None
    dtype: str = "auto"
    compute_dtype: str | None = None
    policy_adapter: _Adapter | None = None


class _Env(_Foreign):
    id: str = ""
    kwargs: dict[str, Any] = {}


class _Engine(_Foreign):
    urls: tuple[str, ...] = ()
    launch: Literal["local", "vllm"] = "local"
    vllm_environment: Path | None = None
    vllm_eager: bool = True
    vllm_options: tuple[str, ...] = ()
    dtype: str | None = None
    max_sequences: int = 64
    max_context: int = 4096
    threads: int = 1


class _Hardware(_Foreign):
    learner_gpus: int = 0
    engine_gpus: int = 0
    gpus_per_engine: int = 1


class _Sampling(_Foreign):
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    stop: tuple[str, ...] = ()


class _Runtime(_Foreign):
    chat: ChatConfig = ChatConfig()
    sampling: _Sampling = _Sampling()
    max_tokens_per_turn: int = Field(default=1024, ge=1)
    max_context_tokens: int = Field(default=4096, ge=2)


class _Store(_Foreign):
    url: str | None = None
    max_lag: int = 4
    max_ready: int | None = None
    stale_policy: str = "train"
    max_lag_at_claim: int | None = None
    order: str = "completion"
    max_share_per_user: float | None = Field(default=0.125, gt=0, le=1)
    user_window_s: float = Field(default=600.0, ge=0)
    max_attempts: int = 3
    keep_trained: int | None = None
    max_bytes: int | None = None


class _Learner(_Foreign):
    batch_size: int = Field(default=128, ge=1)
    steps: int | None = None
    truncation: str = "terminal"


class ServeRecipe(_Foreign):
    """What a server needs of a recipe."""

    name: str
    runs_dir: Path = Path("runs")
    key_file: Path | None = None
    seed: int = 0
    model: _Model = _Model()
    env: _Env = _Env()
    engine: _Engine = _Engine()
    hardware: _Hardware = _Hardware()
    runtime: _Runtime = _Runtime()
    store: _Store = _Store()
    learner: _Learner = _Learner()
    serve: ServeConfig = ServeConfig()

    @model_validator(mode="before")
    @classmethod
    def _empty_section(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _one_engine(self) -> ServeRecipe:
        if len(self.engine.urls) > 1:
            raise ValueError("engine.urls: a server works with one engine; give one address, or none")
        return self

    @model_validator(mode="after")
    def _one_store(self) -> ServeRecipe:
        if self.serve.replicas.owner is not None and self.store.url is None:
            raise ValueError("store.url is missing: a replica (serve.replicas.owner) hands in to the store of the run")
        return self

    @property
    def published_dtype(self) -> str:
        """The dtype of the weights as the engine holds them."""
        return self.engine.dtype or self.model.compute_dtype or self.model.dtype

    @property
    def run_dir(self) -> Path:
        """`runs/<name>`."""
        return self.runs_dir / self.name

    @property
    def folder(self) -> Path:
        """Where the server keeps what is its own."""
        name = self.serve.replicas.name
        return self.run_dir / (f"serve-{name}" if name else "serve")

    @property
    def engine_log(self) -> Path:
        """What the engine says."""
        name = self.serve.replicas.name
        return self.run_dir / (f"engine-{name}.log" if name else "engine.log")

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.serve.model_name or self.name

    def model_folder(self, recipe: str = "RECIPE") -> Path:
        """The cold-started model of the run, or the model that the recipe names."""
        for folder in (self.run_dir / "sft", self.model.path):
            if folder is not None and (folder / "config.json").is_file():
                return folder
        raise ServeError(
            f"no model to serve: neither {self.run_dir / 'sft'} nor model.path ({self.model.path}) holds a "
            f"config.json. Make one with `python -m learner.sft {recipe}`, or give model.path"
        )


def load_recipe(path: Path, overrides: list[str] | None = None) -> ServeRecipe:
    """Read what a server needs of the recipe at `path`, with `a.b=value` overrides; raises `ServeError`."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ServeError(f"cannot read the recipe {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ServeError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ServeError(f"{path} must hold a mapping of keys, got {type(data).__name__}")
    try:
        override(data, overrides or (), "section.key=value, e.g. serve.port=8080")
    except WrongWord as error:
        raise ServeError(f"overrides: {error}") from error
    try:
        return ServeRecipe.model_validate(data)
    except ValidationError as error:
        raise ServeError(f"{path}: {wrong_keys(error)}") from error
