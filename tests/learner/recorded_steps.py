"""Steps of several algorithms on one fixed batch, down to the last bit: what `recorded_steps.json` holds.

    python tests/learner/recorded_steps.py FILE       # write the record; only where new numbers are meant

Bits depend on the processor's instructions as well. The environment below asks torch for its most portable kernels, and
`arithmetic` says whether two machines compute alike at all.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from learner_tools import build_learner, moments, random_episodes, snapshot, write_micro_model
from torch import Tensor

from agent.episode import Episode, StopReason

ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
CASES: dict[str, dict[str, Any]] = {
    "sao": {},
    "sao, scaled": {"advantage_scale": "std", "micro_batch_tokens": 40},
    "sao, bootstrap": {"truncation": "bootstrap", "micro_batch_tokens": 40},
    "sao, critic only": {"critic_only_steps": 1},
    "sao_k1": {"algorithm": "sao_k1"},
    "sao_full_critic": {"algorithm": "sao_full_critic", "truncation": "drop"},
    "sao_step_average": {"algorithm": "sao_step_average"},
    "sao_step_last": {"algorithm": "sao_step_last"},
    "sao_running_mean": {"algorithm": "sao_running_mean"},
    "vapo": {"algorithm": "vapo"},
    "ppo": {"algorithm": "ppo", "micro_batch_tokens": 40},
    "grpo": {"algorithm": "grpo", "batch_size": 16},
    "grpo_dis": {"algorithm": "grpo_dis", "batch_size": 16},
    "rloo": {"algorithm": "rloo", "batch_size": 16},
    "gspo": {"algorithm": "gspo", "batch_size": 16},
    "icepop": {"algorithm": "icepop", "batch_size": 16},
    "impala": {"algorithm": "impala", "truncation": "bootstrap", "micro_batch_tokens": 40},
    "agentrl": {"algorithm": "agentrl", "batch_size": 16},
}


def digest(tensors: Iterable[Tensor]) -> str:
    """One hash of all bits, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def arithmetic() -> str:
    """A hash of what this machine makes of the operations that a step consists of."""
    a = torch.randn(33, 17, generator=torch.Generator().manual_seed(1))
    b = torch.randn(17, 29, generator=torch.Generator().manual_seed(2))
    c = a @ b
    wide = a.double()
    return digest(
        [c, c.softmax(-1), c.exp(), c.abs().log(), c.sum(0), c.rsqrt(), torch.nn.functional.silu(c), wide.var()]
    )


def episodes() -> list[Episode]:
    """Sixteen in groups of eight, every fifth truncated."""
    made = random_episodes(16, seed=3, group_size=8)
    cut = StopReason.TRUNCATED_TURNS
    return [msgspec.structs.replace(e, stop_reason=cut) if i % 5 == 0 else e for i, e in enumerate(made)]


def steps(model: Path, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Two steps with `settings`: the figures of both, and the bits of all that they left."""
    learner = build_learner(model, folder, learner=settings)
    figures: dict[str, float | None] = {}
    tensors: list[Tensor] = []
    for number in range(2):
        _, result = learner.step(episodes())
        # Figures of the batch that a step reports or its caller computes are no matter of its arithmetic.
        chosen = {n: v for n, v in result.figures.items() if n.startswith(("critic/", "policy/", "gate/"))}
        figures |= {f"{number} {name}": None if value != value else value for name, value in sorted(chosen.items())}
        tensors += [t.float() for t in (result.logprobs, result.values, result.advantages) if t is not None]
    left: dict[str, Any] = {"figures": figures, "tokens": digest(tensors)}
    for name, trainee in (("policy", learner.policy), ("critic", learner.critic)):
        if trainee is not None:
            weights = snapshot(trainee)
            left[name] = digest(weights[key] for key in sorted(weights))
            left[f"{name}_moments"] = digest(moments(trainee))
            left[f"{name}_size"] = sum(float(w.double().abs().sum()) for w in weights.values())
    return left


def record() -> dict[str, Any]:
    """Every case, and what it was computed on."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_micro_model(Path(scratch) / "model")
        cases = {name: steps(model, Path(scratch), settings) for name, settings in CASES.items()}
    return {"torch": torch.__version__.split("+")[0], "arithmetic": arithmetic(), "cases": cases}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(record(), indent=1) + "\n")
