"""The recipe as a whole: which sections there are, and which of them contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from agent.runtime.settings import EnvConfig
from agent.serve.config import ServeConfig
from learner.config.adapter import check_adapter
from learner.config.evaluation import EvaluationConfig, HeldOutSet, check_stop_at
from learner.config.mixture import MixedEnvConfig, check_mixture
from learner.config.model import ModelConfig
from learner.config.operations import HubConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.section import Section
from learner.config.services import EngineConfig, HardwareConfig, RuntimeSection, StoreSection
from learner.config.stages import SFTConfig, ValuePretrainingConfig
from learner.config.update import LearnerConfig


class Recipe(Section):
    """Everything a run needs; the resolved recipe is saved with the run.

    `environments`: several training environments, mixed by weight, instead of `env`, which is then the first of them.
    `key_file`: file with the key that store, engines and runtime share, where $SAO_KEY does not hold it; without either
    one is made for the run (see "Doors" in docs/architecture.md).
    """

    name: str
    runs_dir: Path = Path("runs")
    key_file: Path | None = None
    seed: int = 0
    model: ModelConfig
    env: EnvConfig = EnvConfig(id="sao/PythonTIR-v0")
    environments: tuple[MixedEnvConfig, ...] = ()
    evaluation: EvaluationConfig = EvaluationConfig()
    sft: SFTConfig | None = None
    value_pretraining: ValuePretrainingConfig | None = None
    learner: LearnerConfig = LearnerConfig()
    engine: EngineConfig = EngineConfig()
    runtime: RuntimeSection = RuntimeSection()
    store: StoreSection = StoreSection()
    hardware: HardwareConfig = HardwareConfig()
    serve: ServeConfig | None = None
    hub: HubConfig | None = None

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def published_dtype(self) -> Literal["float32", "bfloat16"]:
        """The dtype of the weights that engines are given: their own, so that nothing is sent that they round off."""
        return self.engine.dtype or self.model.computes_in

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Every optimiser of the run, by its key."""
        found = {"learner.policy": self.learner.policy, "learner.critic": self.learner.critic}
        if self.sft is not None:
            found["sft.optimizer"] = self.sft.optimizer
        if self.value_pretraining is not None:
            found["value_pretraining.optimizer"] = self.value_pretraining.optimizer
        return found

    @property
    def pretrains_critic(self) -> bool:
        """Whether there is a value pretraining: a section for it, and an algorithm with a critic."""
        return self.value_pretraining is not None and self.learner.resolve().needs_critic

    @property
    def held_out_sets(self) -> tuple[HeldOutSet, ...]:
        """What is evaluated: `evaluation.sets`; or one set, of `evaluation.env`; or one for each environment."""
        config, runtime = self.evaluation, self.runtime
        chosen: list[dict[str, Any]] = [one.model_dump(exclude_none=True) for one in config.sets]
        if not chosen and config.env is None:
            chosen = [{"name": one.name, "env": one.env} for one in self.environments]
        defaults = {
            "name": "",
            "env": config.env or self.env,
            "tasks": config.tasks,
            "samples": config.samples,
            "sampling": config.sampling or runtime.sampling,
            "max_tokens_per_turn": config.max_tokens_per_turn or runtime.max_tokens_per_turn,
            "max_context_tokens": config.max_context_tokens or runtime.max_context_tokens,
            "every": self.learner.evaluate_every,
        }
        return tuple(HeldOutSet.model_validate(defaults | one) for one in chosen or [{}])

    @model_validator(mode="before")
    @classmethod
    def _env_of_a_mixture(cls, data: Any) -> Any:
        """`env` is the first of `environments`; a saved recipe says so, another one is refused."""
        if not isinstance(data, dict) or not data.get("environments") or not isinstance(data["environments"], list):
            return data
        first = data["environments"][0]
        if not isinstance(first, dict):
            return data
        env = {"id": first.get("id"), "kwargs": first.get("kwargs", {})}
        env |= {key: first[key] for key in ("model", "tools") if first.get(key) is not None}
        own = data.get("env", env)
        if not isinstance(own, dict) or {key: value for key, value in own.items() if value is not None} != env:
            raise ValueError("give `env` (one environment) or `environments` (several, with weights), not both")
        return {**data, "env": env}

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
        own = self.evaluation.engines or 0
        launched = (self.engine.count + own) * self.hardware.gpus_per_engine
        if self.engine.launch == "vllm" and not self.engine.urls and self.hardware.engine_gpus not in (0, launched):
            raise ValueError(
                f"engine.count {self.engine.count}{f' + evaluation.engines {own}' if own else ''} of "
                f"hardware.gpus_per_engine {self.hardware.gpus_per_engine} is not "
                f"hardware.engine_gpus {self.hardware.engine_gpus}"
            )
        self._check_transfer()
        self._check_offload()
        check_adapter(self)
        returned = (self.engine.launch == "vllm" or self.engine.urls) and not self.learner.online
        if self.learner.routing == "replayed" and not returned:
            raise ValueError(
                "learner.routing 'replayed' needs episodes that carry the experts an engine chose: set "
                "engine.launch=vllm (the local engine returns none, and a server, learner.online, keeps none)"
            )
        if self.runtime.harness is not None and self.learner.routing == "replayed":
            raise ValueError(
                "learner.routing 'replayed' with runtime.harness: its episodes carry no experts; write own"
            )
        if self.runtime.harness is not None and self.learner.online:
            raise ValueError(
                "runtime.harness has no effect with learner.online, which takes its episodes from a server"
            )
        if self.runtime.max_context_tokens > self.engine.max_context:
            raise ValueError("runtime.max_context_tokens is larger than engine.max_context")
        if self.store.max_ready is not None and self.store.max_ready < self.learner.batch_size:
            raise ValueError("store.max_ready is smaller than learner.batch_size: a batch could never fill")
        needed = (self.store.forced_lag or 0) + self.learner.checkpoint_every - 1
        if self.store.forced_lag is not None and needed > self.store.max_lag:
            raise ValueError(
                f"store.forced_lag {self.store.forced_lag} with learner.checkpoint_every "
                f"{self.learner.checkpoint_every}: as many batches wait, or wait for their commit, as store.max_lag "
                f"{self.store.max_lag} allows at all; raise it to {needed}"
            )
        if self.learner.checkpoint_every > self.store.max_lag + 1:
            raise ValueError(
                f"learner.checkpoint_every {self.learner.checkpoint_every} is above store.max_lag + 1: claims are "
                "committed with a checkpoint, so the staleness budget would run dry before the next one"
            )
        if (within := self.learner.commit_within) is not None and within > self.store.max_lag + 1:
            raise ValueError(
                f"learner.commit_within {within} is above store.max_lag + 1: the store lends no more batches than that "
                "before one is committed; lower it, or leave it out"
            )
        if self.learner.packing == "packed" and self.hardware.context > 1:
            raise ValueError(
                "learner.packing 'packed' with hardware.context: a part of packed rows would begin in the middle of "
                "one. Write learner.packing=buckets, or hardware.context=1"
            )
        for key in ("ep", "tp", "context"):
            if self.model.compile and getattr(self.hardware, key) > 1:
                raise ValueError(
                    f"model.compile with hardware.{key}: a compiled layer knows no exchange between ranks within it. "
                    f"Write model.compile=false, or hardware.{key}=1"
                )
        algorithm = self.learner.resolve()
        if self.store.order != "completion" and algorithm.samples_per_prompt > 1:
            raise ValueError(
                f"store.order {self.store.order!r} works on single rollouts; {self.learner.algorithm!r} groups"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> Recipe:
        check_mixture(self.environments)
        check_stop_at(self.evaluation.stop_at, self.held_out_sets)
        if self.environments and self.learner.online:
            raise ValueError("environments: learner.online takes its episodes from a server; leave one of them out")
        if self.environments and self.store.url:
            raise ValueError(
                "environments: the store at store.url deals the tasks; give it the key `environments` (docs/store.md) "
                "and this recipe `env`, or leave store.url out"
            )
        if self.runtime.count > 1 and self.learner.online:
            raise ValueError("runtime.count: learner.online takes its episodes from a server; leave one of them out")
        longest = max(one.max_context_tokens for one in self.held_out_sets)
        if longest > self.engine.max_context:
            raise ValueError(f"evaluation: max_context_tokens {longest} is larger than engine.max_context")
        beside = "engines" if self.evaluation.engines is not None else "share"
        if self.evaluation.is_beside and self.learner.online:
            raise ValueError(f"evaluation.{beside} has no effect with learner.online, which evaluates nothing")
        if self.evaluation.engines is not None and not self.runtime.launch:
            raise ValueError(
                "evaluation.engines: the runtime that is started elsewhere would take its episodes; set "
                "runtime.launch=true, or choose evaluation.share"
            )
        if self.evaluation.share is not None and self.store.url:
            raise ValueError(
                "evaluation.share: the store at store.url knows no share; choose evaluation.engines, or leave it out"
            )
        return self

    def _check_offload(self) -> None:
        if self.hardware.learner_gpus:
            return
        for key, optimizer in self.optimizers.items():
            if optimizer.offload:
                raise ValueError(
                    f"{key}.offload: on a CPU (hardware.learner_gpus 0) moments are in the host's memory; write false"
                )

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
