"""What runs beside the learner, and on which devices: engines, runtime, store."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from agent.chat.settings import ChatConfig
from agent.runtime.settings import HarnessConfig, SamplingConfig, StageLimits
from learner.config.section import Section


class EngineConfig(Section):
    """Where tokens come from: `urls` of engines that run, or none, and then `count` are started here (`launch`).

    One that was started here and ends is started again, `restarts` times an hour each; then the run stops.
    `vllm_options` are further words for `vllm serve`, and `vllm_environment` is where it is installed (`make vllm`).
    `keep_stale_cache`: keys and values outlive a publication (see docs/engines.md). `transfer`: how weights reach
    vLLM: "snapshot" (a folder that the engine reads), "broadcast" (to engines on other GPUs or machines), "ipc" (to an
    engine on the learner's own GPU). `dtype`: in which engines hold and are given the weights (None: the dtype of the
    learner's forwards).
    """

    urls: tuple[str, ...] = ()
    launch: Literal["local", "vllm"] = "local"
    count: int = Field(default=1, ge=1)
    restarts: int = Field(default=3, ge=0)
    vllm_environment: Path | None = None
    vllm_eager: bool = True
    vllm_options: tuple[str, ...] = ()
    max_sequences: int = 64
    max_context: int = 4096
    threads: int = 1
    dtype: Literal["float32", "bfloat16"] | None = None
    keep_stale_cache: bool = False
    transfer: Literal["snapshot", "broadcast", "ipc"] = "snapshot"


class RuntimeSection(Section):
    """How episodes are run, in the runtime's own terms; with `launch` the runtime is a child of the learner.

    `count`: so many runtimes are started, which share `concurrency`: one process has one core for its episodes.
    `python`: the interpreter that runs them, with this project installed (None: this one). OpenHands needs 3.12.
    `engine_keepalive_s`: how long a connection to an engine is kept while nobody uses it (None: a minute to engines
    that are started here, and less than vLLM's own 5 s to those that run).
    `metrics_port`: of its `/metrics` and `/episodes` (0: a free one, which `runtime.port` in the run's folder names;
    None: no port), on the interface `metrics_host`. It asks for the run's key. Where there are several runtimes, all
    but the first have free ones.
    `harness`: an agent that exists already and makes the turns itself (docs/harness.md).
    """

    launch: bool = True
    count: int = Field(default=1, ge=1)
    python: Path | None = None
    concurrency: int = Field(default=64, ge=1)
    chat: ChatConfig = ChatConfig()
    sampling: SamplingConfig = SamplingConfig()
    max_tokens_per_turn: int = Field(default=1024, ge=1)
    max_context_tokens: int = Field(default=4096, ge=2)
    limits: StageLimits = StageLimits()
    metrics_port: int | None = Field(default=0, ge=0, le=65535)
    metrics_host: str = "127.0.0.1"
    harness: HarnessConfig | None = None
    engine_keepalive_s: float | None = Field(default=None, gt=0)

    @property
    def shares(self) -> list[int]:
        """The `concurrency` of each runtime."""
        least, more = divmod(self.concurrency, self.count)
        return [least + (i < more) for i in range(self.count)]

    @model_validator(mode="after")
    def _each_has_a_share(self) -> RuntimeSection:
        if self.count > self.concurrency:
            raise ValueError(f"count {self.count} is more than concurrency {self.concurrency}, which they share")
        if self.count > 1 and not self.launch:
            raise ValueError("count: with launch=false no runtime is started here; start several where they run")
        return self


class StoreSection(Section):
    """The episode store. The keys mean what they mean in `agent.store.config`; without `url` a store is started here.

    `max_lag`: how many versions rollouts may run ahead of training (the staleness budget). `forced_lag`: how many they
    do: so many batches wait in the queue, and what is trained is that old once the queue has gone round.
    `keep_trained`: how many trained episodes keep their tokens (None: all), the newest; `max_bytes`: ceiling of the
    store's file.
    """

    url: str | None = None
    max_lag: int = Field(default=4, ge=0)
    forced_lag: int | None = Field(default=None, ge=0)
    max_ready: int | None = None
    stale_policy: Literal["train", "drop"] = "train"
    max_lag_at_claim: int | None = None
    order: Literal["completion", "window", "quota"] = "completion"
    max_share_per_user: float | None = Field(default=None, gt=0, le=1)  # None: a server has 1/8
    user_window_s: float = Field(default=600.0, ge=0)
    max_attempts: int = Field(default=3, ge=1)
    keep_trained: int | None = Field(default=None, ge=0)
    max_bytes: int | None = Field(default=None, ge=65536)


class HardwareConfig(Section):
    """What a run is planned for: read by `learner.plan`, and by the launch of vLLM (GPUs and tensor parallelism).

    `learner_gpus`: GPUs that the learner's state is sharded over (0: the CPU). `engine_gpus`: GPUs of the engines,
    `gpus_per_engine` each (tensor parallel); 0: one engine on the learner's own devices. `memory_gib`: memory of one
    GPU (None: of this machine). `peak_flops`: operations a second of one of the learner's devices, for `speed/mfu`
    (None: as its maker says, for the GPUs of a table, in bfloat16).

    How the learner's processes lie, whose product is their number: `fsdp` parts that each copy of the weights is cut
    into, `tp` parts of each matrix, `context` parts of each row's tokens, `replicate` copies. `ep`: parts that the
    experts are cut into, across `fsdp` x `tp`. All 1: each process holds a whole copy, however many are started.
    """

    learner_gpus: int = Field(default=0, ge=0)
    engine_gpus: int = Field(default=0, ge=0)
    gpus_per_engine: int = Field(default=1, ge=1)
    memory_gib: float | None = Field(default=None, gt=0)
    peak_flops: float | None = Field(default=None, gt=0)
    fsdp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    replicate: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)

    @property
    def layout(self) -> str:
        """The keys of the layout that are not 1, in words."""
        keys = {name: getattr(self, name) for name in ("replicate", "fsdp", "tp", "context", "ep")}
        return ", ".join(f"{name} {size}" for name, size in keys.items() if size > 1) or "a whole copy on each"

    @model_validator(mode="after")
    def _whole_engines(self) -> HardwareConfig:
        if self.engine_gpus % self.gpus_per_engine:
            raise ValueError(f"engine_gpus {self.engine_gpus} is no multiple of gpus_per_engine {self.gpus_per_engine}")
        return self

    @model_validator(mode="after")
    def _whole_layout(self) -> HardwareConfig:
        if self.tp > 1 and self.context > 1:
            raise ValueError(f"tp {self.tp} and context {self.context} do not go together: set one of them to 1")
        if self.ep > 1 and self.ep % self.tp:
            raise ValueError(f"ep {self.ep} is no multiple of tp {self.tp}")
        if (self.fsdp * self.context * self.tp) % self.ep:
            raise ValueError(f"ep {self.ep} does not divide fsdp x context x tp, over which the experts lie")
        world = self.fsdp * self.tp * self.replicate * self.context
        if self.learner_gpus and world not in (1, self.learner_gpus):
            raise ValueError(f"learner_gpus {self.learner_gpus} is not what {self.layout} makes: {world}")
        return self
