"""The recipe: one pydantic model a process, read from YAML, overridden by dotted `key=value` words.

Unknown keys and impossible combinations are errors that name the key.
"""

from __future__ import annotations

from learner.config.adapter import AdapterConfig
from learner.config.evaluation import EvaluationConfig, EvaluationSetConfig, HeldOutSet, StopAtConfig
from learner.config.methods import MethodConfig, RunningMeanConfig
from learner.config.mixture import MixedEnvConfig
from learner.config.model import ModelConfig, TinyModelConfig
from learner.config.operations import HubConfig, ProfileConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.reading import load_recipe, parse_recipe, save_recipe
from learner.config.recipe import Recipe
from learner.config.section import RecipeError
from learner.config.services import EngineConfig, HardwareConfig, RuntimeSection, StoreSection
from learner.config.stages import HeldOutProbeConfig, JudgedGateConfig, SFTConfig, ValuePretrainingConfig
from learner.config.update import ENDLESS, KLConfig, LearnerConfig

__all__ = [
    "ENDLESS",
    "AdapterConfig",
    "EngineConfig",
    "EvaluationConfig",
    "EvaluationSetConfig",
    "HardwareConfig",
    "HeldOutProbeConfig",
    "HeldOutSet",
    "HubConfig",
    "JudgedGateConfig",
    "KLConfig",
    "LearnerConfig",
    "MethodConfig",
    "MixedEnvConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "Recipe",
    "RecipeError",
    "RunningMeanConfig",
    "RuntimeSection",
    "SFTConfig",
    "StopAtConfig",
    "StoreSection",
    "TinyModelConfig",
    "ValuePretrainingConfig",
    "load_recipe",
    "parse_recipe",
    "save_recipe",
]
