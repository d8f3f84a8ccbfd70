"""The adapter that a server starts from: one that changes nothing, so that every version is an adapter of one base.

Engines take adapters only if they have had one from their start, and a rollback to the start is then a publication like
any other. It is written without torch: shapes are read from the headers of the base's files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agent.serve.config import ServeError, ServeRecipe

_QUERY = re.compile(r"(?P<module>.*\.(?P<name>q_proj|qkv_proj|q_b_proj))\.weight")
_PREFIX = "base_model.model."  # of every name in peft's files


def starting_weights(recipe: ServeRecipe, model: Path) -> Path:
    """What version 0 serves: `model`, or, where the recipe publishes adapters, an adapter of `model` that adds nothing.

    The latter is made once, in the server's own folder. Raises `ServeError`.
    """
    adapter = recipe.model.policy_adapter
    if adapter is None or adapter.publish != "adapter":
        return model
    target = recipe.folder / "start_adapter"
    if not (target / "adapter_config.json").is_file():
        write_empty_adapter(model, target, rank=adapter.rank, alpha=adapter.alpha)
    return target


def write_empty_adapter(base: Path, target: Path, *, rank: int, alpha: float) -> None:
    """Write the folder `target` in peft's form: a LoRA of zeros on the query projections of the model in `base`.

    Raises `ServeError` where `base` has none that are known here, or cannot be read.
    """
    tensors: dict[str, np.ndarray] = {}
    names: set[str] = set()
    try:
        for file in sorted(base.glob("*.safetensors")):
            with safe_open(file, framework="numpy") as weights:
                for key in weights.keys():  # noqa: SIM118  (not a mapping)
                    found = _QUERY.fullmatch(key)
                    if found is None or len(shape := weights.get_slice(key).get_shape()) != 2:
                        continue
                    names.add(found["name"])
                    module = _PREFIX + found["module"]
                    tensors[f"{module}.lora_A.weight"] = np.zeros((rank, shape[1]), np.float32)
                    tensors[f"{module}.lora_B.weight"] = np.zeros((shape[0], rank), np.float32)
    except (OSError, SafetensorError) as error:
        raise ServeError(f"cannot read the weights in {base}: {error}") from error
    if not tensors:
        raise ServeError(
            f"{base}: no query projections are found in its *.safetensors, so no adapter can be served from the start; "
            "write model.policy_adapter.publish=merged"
        )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(names),
        "inference_mode": True,
    }
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
    (scratch / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
