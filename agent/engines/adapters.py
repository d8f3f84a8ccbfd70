"""A LoRA adapter in peft's form: a folder that is published in place of whole weights, to engines that hold its base.

    adapter_config.json          rank, layers, and the folder of the base model
    adapter_model.safetensors

Every engine knows the adapter by the one name `NAME`, from its start, and uses it for every request.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agent.engines.base import EngineFault

NAME = "policy"
_CONFIG = "adapter_config.json"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's


class _Config(msgspec.Struct):
    base_model_name_or_path: str
    r: int


def base_of(folder: Path) -> Path | None:
    """The folder of the model that the adapter in `folder` is for; None where `folder` holds whole weights.

    Raises `EngineFault` where its configuration can't be read.
    """
    return Path(_read(folder).base_model_name_or_path) if (folder / _CONFIG).exists() else None


def address(folder: Path) -> str:
    """Where an engine finds `folder`, which may run in another one."""
    return str(folder.absolute())


def room_for(folder: Path) -> int:
    """The least `--max-lora-rank` of vLLM that takes the adapter in `folder`."""
    rank = _read(folder).r
    if rank > _RANKS[-1]:
        raise EngineFault(f"the adapter {folder} has rank {rank}, and vLLM serves {_RANKS[-1]} at most")
    return min(room for room in _RANKS if room >= rank)


def _read(folder: Path) -> _Config:
    try:
        return msgspec.json.decode((folder / _CONFIG).read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError) as error:
        raise EngineFault(f"cannot read the adapter in {folder}: {error}") from error
