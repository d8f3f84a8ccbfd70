"""The stages before and beside the update: cold start, value pretraining, probe."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from learner.config.optimizer import OptimizerConfig
from learner.config.section import Section


class SFTConfig(Section):
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


class ValuePretrainingConfig(Section):
    """The critic before RL: regression on returns of the cold-started policy's own episodes."""

    episodes: int = 1024
    held_out_episodes: int = 256
    steps: int = 60
    batch_size: int = 128
    # No adapters: RL starts from plain weights, and would find random ones in their place.
    trainable: Literal["experts", "mlp", "all"] = "all"
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-3, warmup_steps=5)


class HeldOutProbeConfig(Section):
    """Safe learning: new weights are published only if they still find the held-out texts likely (docs/online.md).

    `texts`: JSON lines of conversations that end on a sound answer, several to a prompt where there are several sound
    ones; None: the script of the environment writes them. `prompts`: how many prompts are asked, of each at most
    `texts_per_prompt` answers. `margin`: by how much (nats a token) the score may fall below the best published one.
    """

    texts: Path | None = None
    prompts: int = Field(default=8, ge=1)
    texts_per_prompt: int = Field(default=32, ge=1)
    margin: float = Field(default=1.0, gt=0)


class JudgedGateConfig(Section):
    """A share of the judged conversations is not trained on: by them new weights are judged before they are published.

    `keep`: how many of the last ones are asked, twice a step. `tolerance`: by how much their estimated reward may fall
    in one step. `least`: on so many, by their effective number, an estimate must rest; below it the gate is open.
    """

    share: float = Field(default=0.1, gt=0, le=0.5)
    keep: int = Field(default=128, ge=2)
    tolerance: float = Field(default=0.05, gt=0)
    least: int = Field(default=24, ge=1)
