"""The numbers of a method, as a recipe sets them: for the method that runs, or for one by name."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from learner.algorithms import Algorithm, get_algorithm
from learner.config.section import Section
from learner.methods.options import carried, complaints, with_options


class RunningMeanConfig(Section):
    """The history of a running-mean baseline, see `learner.baselines`; the paper's online one is the last 128.

    None: the preset's own.
    """

    window: int | None = Field(default=None, ge=1)
    per_prompt: bool | None = None
    include_current: bool | None = None


class MethodConfig(Section):
    """The numbers of a method. None: the preset's own, see docs/algorithms.md, key by key.

    `lam: adaptive` is the lambda by length, for a preset that has a fixed one.
    """

    critic_updates: int | None = None
    critic_trainable: Literal["experts", "mlp", "lora", "all"] | None = None
    eps_low: float | None = None
    eps_high: float | None = None
    mismatch: tuple[float, float] | None = None
    gamma: float | None = None
    lam: float | Literal["adaptive"] | None = None
    alpha: float | None = Field(default=None, gt=0)
    samples_per_prompt: int | None = None
    aggregation: Literal["token_mean", "sequence_mean"] | None = None
    denominator: Literal["action", "trusted"] | None = None
    normalize_group: bool | None = None
    rho_bar: float | None = Field(default=None, gt=0)
    c_bar: float | None = Field(default=None, gt=0)
    max_divergence: float | None = Field(default=None, ge=0)
    running_mean: RunningMeanConfig | None = None

    def chosen(self) -> dict[str, Any]:
        """The numbers that are set, by their keys in `learner.methods.options.OPTIONS`."""
        found = {key: getattr(self, key) for key in MethodConfig.model_fields if key != "running_mean"}
        if self.running_mean is not None:
            found |= {f"running_mean.{key}": value for key, value in self.running_mean}
        return {key: None if value == "adaptive" else value for key, value in found.items() if value is not None}


class MethodsConfig(MethodConfig):
    """Which method runs, its numbers, and those of other methods for the case that one of them is chosen.

    What stands flat is for the method that runs and is refused if it does not act there. What stands under
    `methods.<name>` waits until that method, or an ablation of it, is chosen.
    """

    algorithm: str = "sao"
    methods: dict[str, MethodConfig] = Field(default_factory=dict)

    def resolve(self) -> Algorithm:
        """The preset with this recipe's own numbers in place."""
        return with_options(get_algorithm(self.algorithm), self._waiting_for(self.algorithm) | self.chosen())

    def _waiting_for(self, name: str) -> dict[str, Any]:
        """What `methods` sets for the preset `name`: its own section, over what it shares with its family."""
        preset, shared = get_algorithm(name), dict[str, Any]()
        if preset.family in self.methods:
            shared = carried(self.methods[preset.family].chosen(), get_algorithm(preset.family), preset)
        return shared | (self.methods[name].chosen() if name in self.methods else {})

    @model_validator(mode="after")
    def _every_number_acts(self) -> MethodsConfig:
        wrong = complaints(self.resolve(), self.chosen())
        for name, section in self.methods.items():
            own = with_options(get_algorithm(name), self._waiting_for(name))
            wrong += [f"methods.{name}.{said}" for said in complaints(own, section.chosen())]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self
