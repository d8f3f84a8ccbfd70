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


class ServeError(ValueError):
    """A server that cannot be started; the message names the key or the file and says what to do."""


class ServeConfig(BaseModel):
    """Section `serve` of a recipe. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 picks a free one."""
    model_name: str | None = None
    """What clients ask for; None: the name of the run."""
    keys_file: Path | None = None
    """Bearer keys, one `name:key` a line; also read from $SAO_SERVE_KEYS, comma-separated. None at all: no key is
    needed, which is allowed on the loopback interface only. Names that begin with `admin` may change versions."""
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
    feedback_ttl_s: float = Field(default=3600.0, gt=0)
    """How long a response waits for feedback; after that it expires unlearned and feedback is answered 410."""
    retention_s: float = Field(default=30 * 24 * 3600.0, gt=0)
    """What was said is wiped so long after a conversation's last sign of life."""
    delivery_wait_s: float = Field(default=1.0, ge=0)
    """How long an answer to final feedback waits for the episode to be in the store. It is in the server's own journal
    before that."""
    keep_versions: int = Field(default=8, ge=1)
    max_journal_bytes: int | None = Field(default=None, ge=65536)
    learner_restarts: int = Field(default=5, ge=0)
    """How often in a row a learner that died is started again."""
    learner_backoff_s: float = Field(default=1.0, gt=0)
    """Before the first restart; doubled each time, at most a minute."""
    learner_settled_s: float = Field(default=300.0, gt=0)
    """A learner that lived so long is not in a row of failures any more."""
    simulated_per_minute: float = Field(default=60.0, gt=0, le=600)
    """Most verdicts a minute of the simulated users that the page can let in."""


class _Foreign(BaseModel):
    """Keys of a section that somebody else checks."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Model(_Foreign):
    path: Path | None = None
    dtype: str = "auto"


class _Env(_Foreign):
    id: str = ""
    kwargs: dict[str, Any] = {}


class _Engine(_Foreign):
    urls: tuple[str, ...] = ()
    launch: Literal["local", "vllm"] = "local"
    vllm_environment: Path | None = None
    vllm_eager: bool = True
    vllm_options: tuple[str, ...] = ()
    max_sequences: int = 64
    max_context: int = 4096
    threads: int = 1


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
    max_attempts: int = 3
    keep_trained: int | None = None
    max_bytes: int | None = None


class _Learner(_Foreign):
    batch_size: int = Field(default=128, ge=1)
    steps: int = 60
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

    @property
    def run_dir(self) -> Path:
        """`runs/<name>`."""
        return self.runs_dir / self.name

    @property
    def folder(self) -> Path:
        """Where the server keeps what is its own."""
        return self.run_dir / "serve"

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
    for word in overrides or []:
        _override(data, word)
    try:
        return ServeRecipe.model_validate(data)
    except ValidationError as error:
        raise ServeError(f"{path}: {wrong_keys(error)}") from error


def _override(data: dict[str, Any], word: str) -> None:
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ServeError(f"cannot read the override {word!r}: write it as section.key=value, e.g. serve.port=8080")
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(data.get(parent), dict):
            if data.get(parent) is not None:
                raise ServeError(f"cannot set {key}: {parent} is a value, not a section")
            data[parent] = {}
        data = data[parent]
    try:
        data[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ServeError(f"cannot read the value of the override {key}: {value!r} is not valid YAML") from error
