"""The recipe: one pydantic model a process, read from YAML, overridden by dotted `key=value` words.

Unknown keys and impossible combinations are errors that name the key.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent.runtime_config import EnvConfig, SamplingConfig, StageLimits
from agent.serve.config import ServeConfig
from agent.validation import wrong_keys
from learner.algorithms import Algorithm, CriticSettings, RunningMeanSettings, get_algorithm


class RecipeError(ValueError):
    """A recipe that cannot be run; the message names the key and says what to write instead."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TinyModelConfig(_Section):
    """A model made on the spot: Qwen3-MoE (`experts` > 0) or dense Qwen3, with its own BPE tokenizer."""

    vocab_size: int = 384
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 64
    init_std: float = 0.05
    max_context: int = 1024


class ModelConfig(_Section):
    """`path`: a folder in Hugging Face format (weights, config, tokenizer, chat template); or else `tiny`.

    Exactly one of the two. `dtype` is the dtype of the trained weights, `compute_dtype` that of the forwards (None:
    the same); updates of 1e-6 are lost in bfloat16, so large runs keep float32 weights and compute in bfloat16.
    `experts_implementation` and `attention_implementation` are transformers' own names. With `recompute_layers` a
    layer's activations are made again in the backward pass. `architecture`: a name in recipes/models, or a folder with
    a config.json, from which `learner.plan` knows the model before its weights are there.
    """

    path: Path | None = None
    tiny: TinyModelConfig | None = None
    architecture: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    recompute_layers: bool = False
    attention_implementation: str = "sdpa"
    experts_implementation: str | None = "grouped_mm"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give either `path` (an existing model) or `tiny` (a model made here), not both or none")
        return self

    @property
    def computes_in(self) -> Literal["float32", "bfloat16"]:
        """The dtype of the forwards."""
        return self.compute_dtype or self.dtype


class OptimizerConfig(_Section):
    """AdamW with linear warm-up (steps) and a gradient-norm clip; `final_lr_ratio` < 1 lets the rate fall linearly."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 10
    clip_norm: float = 1.0
    final_lr_ratio: float = Field(default=1.0, ge=0, le=1)


class SFTConfig(_Section):
    """Cold start: `clean_steps` on faultless traces, then `imperfect_steps` on traces with mistakes.

    The environment's script writes the traces, unless `traces` names a JSONL of message lists; then with `epochs` the
    number of updates follows from theirs. Traces above `max_trace_tokens` are left out (None: none is).
    `micro_batch_rows`: traces a process has in memory at once (None: its part of the batch).
    """

    traces: Path | None = None
    epochs: float | None = Field(default=None, gt=0)
    max_trace_tokens: int | None = Field(default=None, ge=1)
    micro_batch_rows: int | None = Field(default=None, ge=1)
    clean_traces: int = 20_000
    imperfect_traces: int = 2_000
    error_rate: float = Field(default=0.3, ge=0, le=1)
    clean_steps: int = 1000
    imperfect_steps: int = 40
    batch_size: int = 32
    optimizer: OptimizerConfig = OptimizerConfig(lr=1.5e-2, betas=(0.9, 0.98), warmup_steps=20, final_lr_ratio=0.1)

    @model_validator(mode="after")
    def _epochs_need_traces(self) -> SFTConfig:
        if self.epochs is not None and self.traces is None:
            raise ValueError("epochs counts passes over `traces`, and there is none; set clean_steps instead")
        return self


class ValuePretrainingConfig(_Section):
    """The critic before RL: regression on returns of the cold-started policy's own episodes."""

    episodes: int = 1024
    held_out_episodes: int = 256
    steps: int = 60
    batch_size: int = 128
    # No adapters: RL starts from plain weights, and would find random ones in their place.
    trainable: Literal["experts", "mlp", "all"] = "all"
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-3, warmup_steps=5)


class HeldOutProbeConfig(_Section):
    """Safe learning: new weights are published only if they still find the held-out texts likely (docs/online.md).

    `texts`: JSON lines of conversations that end on a sound answer, several to a prompt where there are several sound
    ones; None: the script of the environment writes them. `prompts`: how many prompts are asked, of each at most
    `texts_per_prompt` answers. `margin`: by how much (nats a token) the score may fall below the best published one.
    """

    texts: Path | None = None
    prompts: int = Field(default=8, ge=1)
    texts_per_prompt: int = Field(default=32, ge=1)
    margin: float = Field(default=1.0, gt=0)


class RunningMeanConfig(_Section):
    """The history of a running-mean baseline, see `learner.baselines`; the paper's online one is the last 128."""

    window: int = Field(default=128, ge=1)
    per_prompt: bool = False
    include_current: bool = True


class LearnerConfig(_Section):
    """The update. `None` means the algorithm's own value (see docs/algorithms.md).

    `online`: episodes come from a server whenever users have judged them (docs/online.md). Then nothing is evaluated,
    no environment is needed, and silence is no fault.
    """

    algorithm: str = "sao"
    steps: int = 60
    batch_size: int = 128
    policy: OptimizerConfig = OptimizerConfig(lr=1e-6)
    critic: OptimizerConfig = OptimizerConfig(lr=5e-6)
    critic_only_steps: int = 0
    critic_updates: int | None = None
    critic_trainable: Literal["experts", "mlp", "lora", "all"] | None = None
    eps_low: float | None = None
    eps_high: float | None = None
    gamma: float | None = None
    alpha: float | None = None
    running_mean: RunningMeanConfig | None = None
    online: bool = False
    held_out_probe: HeldOutProbeConfig | None = None
    advantage_scale: Literal["none", "std"] = "none"
    truncation: Literal["terminal", "bootstrap", "drop"] = "terminal"
    micro_batch_tokens: int = 16_384
    max_padding: float = 0.05
    logprob_chunk: int = 8_192
    checkpoint_every: int = 1
    keep_checkpoints: int = 2
    evaluate_every: int = 10
    shuffle_rewards: bool = False
    parity_threshold: float = 0.05
    probe_every: int = Field(default=1, ge=0)  # publications between two comparisons of engines and trainer; 0: none
    rollout_patience_s: float = 120.0
    publication_timeout_s: float = 60.0
    collective_timeout_s: float = 600.0
    tracker: str | None = "tensorboard"

    def resolve(self) -> Algorithm:
        """The preset with this recipe's own numbers in place."""
        preset = get_algorithm(self.algorithm)
        own: dict[str, Any] = {
            k: v for k in ("eps_low", "eps_high", "gamma", "alpha") if (v := getattr(self, k)) is not None
        }
        if preset.critic is not None:
            updates = preset.critic.updates if self.critic_updates is None else self.critic_updates
            own["critic"] = CriticSettings(updates, self.critic_trainable or preset.critic.trainable)
        if self.running_mean is not None and preset.running_mean is not None:
            own["running_mean"] = RunningMeanSettings(**self.running_mean.model_dump())
        return replace(preset, **own)

    @model_validator(mode="after")
    def _known_algorithm(self) -> LearnerConfig:
        algorithm = self.resolve()
        if self.batch_size % algorithm.samples_per_prompt:
            raise ValueError(
                f"batch_size {self.batch_size} is no multiple of the {algorithm.samples_per_prompt} samples "
                f"a prompt of {self.algorithm!r}"
            )
        if self.truncation == "bootstrap" and not algorithm.needs_critic:
            raise ValueError(f"truncation 'bootstrap' needs a critic, and {self.algorithm!r} has none")
        if self.evaluate_every < 1 or self.checkpoint_every < 1:
            raise ValueError("evaluate_every and checkpoint_every must be at least 1")
        return self


class EngineConfig(_Section):
    """Where tokens come from: `urls` of engines that run, or none, and then `count` are started here (`launch`).

    One that was started here and ends is started again, `restarts` times an hour each; then the run stops.
    `vllm_options` are further words for `vllm serve`, and `vllm_environment` is where it is installed (`make vllm`).
    `keep_stale_cache`: keys and values outlive a publication (see docs/engines.md). `transfer`: how weights reach
    vLLM: "snapshot" (a folder that the engine reads), "broadcast" (to engines on other GPUs or machines), "ipc" (to an
    engine on the learner's own GPU).
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
    keep_stale_cache: bool = False
    transfer: Literal["snapshot", "broadcast", "ipc"] = "snapshot"


class RuntimeSection(_Section):
    """How episodes are run, in the runtime's own terms; with `launch` the runtime is a child of the learner.

    `python`: the interpreter that runs it, with this project installed (None: this one). OpenHands needs 3.12.
    """

    launch: bool = True
    python: Path | None = None
    concurrency: int = Field(default=64, ge=1)
    sampling: SamplingConfig = SamplingConfig()
    max_tokens_per_turn: int = Field(default=1024, ge=1)
    max_context_tokens: int = Field(default=4096, ge=2)
    limits: StageLimits = StageLimits()


class StoreSection(_Section):
    """The episode store. The keys mean what they mean in `agent.store.config`; without `url` a store is started here.

    `max_lag`: how many versions rollouts may run ahead of training (the staleness budget).
    """

    url: str | None = None
    max_lag: int = Field(default=4, ge=0)
    max_ready: int | None = None
    stale_policy: Literal["train", "drop"] = "train"
    max_lag_at_claim: int | None = None
    order: Literal["completion", "window", "quota"] = "completion"
    max_attempts: int = Field(default=3, ge=1)


class EvaluationConfig(_Section):
    """Held-out evaluation on a pinned version."""

    env: EnvConfig | None = None
    tasks: int = 256
    samples: int = 1
    timeout_s: float = 600.0


class HardwareConfig(_Section):
    """What a run is planned for: read by `learner.plan`, and by the launch of vLLM (GPUs and tensor parallelism).

    `learner_gpus`: GPUs that the learner's state is sharded over (0: the CPU). `engine_gpus`: GPUs of the engines,
    `gpus_per_engine` each (tensor parallel); 0: one engine on the learner's own devices. `memory_gib`: memory of one
    GPU (None: of this machine).
    """

    learner_gpus: int = Field(default=0, ge=0)
    engine_gpus: int = Field(default=0, ge=0)
    gpus_per_engine: int = Field(default=1, ge=1)
    memory_gib: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _whole_engines(self) -> HardwareConfig:
        if self.engine_gpus % self.gpus_per_engine:
            raise ValueError(f"engine_gpus {self.engine_gpus} is no multiple of gpus_per_engine {self.gpus_per_engine}")
        return self


class Recipe(_Section):
    """Everything a run needs; the resolved recipe is saved with the run."""

    name: str
    runs_dir: Path = Path("runs")
    seed: int = 0
    model: ModelConfig
    env: EnvConfig = EnvConfig(id="sao/PythonTIR-v0")
    evaluation: EvaluationConfig = EvaluationConfig()
    sft: SFTConfig | None = None
    value_pretraining: ValuePretrainingConfig | None = None
    learner: LearnerConfig = LearnerConfig()
    engine: EngineConfig = EngineConfig()
    runtime: RuntimeSection = RuntimeSection()
    store: StoreSection = StoreSection()
    hardware: HardwareConfig = HardwareConfig()
    serve: ServeConfig | None = None

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def pretrains_critic(self) -> bool:
        """Whether there is a value pretraining: a section for it, and an algorithm with a critic."""
        return self.value_pretraining is not None and self.learner.resolve().needs_critic

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.runtime.sampling.top_p != 1.0 or self.runtime.sampling.top_k != -1:
            raise ValueError(
                "runtime.sampling.top_p and top_k must stay 1.0 and -1: the learner cannot reproduce a truncated "
                "distribution, so every ratio would be wrong"
            )
        if self.runtime.sampling.temperature <= 0:
            raise ValueError(
                "runtime.sampling.temperature must be above 0: greedy actions have no log-probs to learn from"
            )
        if self.learner.online and self.learner.resolve().samples_per_prompt > 1:
            raise ValueError(
                f"learner.online: {self.learner.algorithm!r} needs several rollouts of a prompt, and a served "
                "conversation is one; choose a single-rollout algorithm such as sao"
            )
        launched = self.engine.count * self.hardware.gpus_per_engine
        if self.engine.launch == "vllm" and not self.engine.urls and self.hardware.engine_gpus not in (0, launched):
            raise ValueError(
                f"engine.count {self.engine.count} of hardware.gpus_per_engine {self.hardware.gpus_per_engine} is not "
                f"hardware.engine_gpus {self.hardware.engine_gpus}"
            )
        self._check_transfer()
        if self.runtime.max_context_tokens > self.engine.max_context:
            raise ValueError("runtime.max_context_tokens is larger than engine.max_context")
        if self.store.max_ready is not None and self.store.max_ready < self.learner.batch_size:
            raise ValueError("store.max_ready is smaller than learner.batch_size: a batch could never fill")
        if self.learner.checkpoint_every > self.store.max_lag + 1:
            raise ValueError(
                f"learner.checkpoint_every {self.learner.checkpoint_every} is above store.max_lag + 1: claims are "
                "committed with a checkpoint, so the staleness budget would run dry before the next one"
            )
        algorithm = self.learner.resolve()
        if self.store.order != "completion" and algorithm.samples_per_prompt > 1:
            raise ValueError(
                f"store.order {self.store.order!r} works on single rollouts; {self.learner.algorithm!r} groups"
            )
        return self

    def _check_transfer(self) -> None:
        if (transfer := self.engine.transfer) == "snapshot":
            return
        if self.engine.launch == "local" and not self.engine.urls:
            raise ValueError(f"engine.transfer {transfer!r} needs vLLM: the local engine reads snapshots only")
        if self.learner.online:
            raise ValueError(
                f"engine.transfer {transfer!r}: a server keeps its versions on disk, so it needs snapshots"
            )
        if transfer == "ipc" and self.hardware.engine_gpus:
            raise ValueError("engine.transfer 'ipc' is for an engine on the learner's own GPU; choose broadcast")


DEFAULT_RECIPE = "tir_tiny.yaml"
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


def load_recipe(path: Path | None, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe (None: the tiny one that ships with the package) and apply `a.b=value` overrides.

    Raises `RecipeError` with one paragraph that names the file and the key.
    """
    source = path if path is not None else resources.files("recipes") / DEFAULT_RECIPE
    try:
        data = yaml.safe_load(source.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecipeError(f"there is no recipe at {path}; recipes ship in the folder recipes/") from error
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{source} is not a text file in UTF-8: {error}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{source} must hold a mapping of keys, got {type(data).__name__}")
    for word in overrides or []:
        _override(data, word)
    return parse_recipe(data, str(source))


def parse_recipe(data: dict[str, Any], source: str = "the recipe") -> Recipe:
    """Check plain data against the schema; `RecipeError` names every wrong key."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{source}: {wrong_keys(error)}") from error


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe, so that the run can be repeated from its folder alone."""
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), encoding="utf-8")


def _override(data: dict[str, Any], word: str) -> None:
    key, separator, value = word.partition("=")
    if not separator or not key:
        raise RecipeError(f"cannot read the override {word!r}: write it as section.key=value, e.g. learner.steps=20")
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise RecipeError(f"cannot set {key}: {parent} is a value, not a section")
    # YAML 1.1 reads 2e-6 as a string, people don't.
    if _EXPONENT.fullmatch(value):
        data[last] = float(value)
        return
    try:
        data[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"cannot read the value of the override {key}: {value!r} is not valid YAML") from error
