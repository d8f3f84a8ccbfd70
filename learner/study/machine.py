"""Which machine a run was made on, in words, and a length of time as people write it."""

from __future__ import annotations

import os
import re

import psutil

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def machine() -> str:
    """`2 cores, 24 GiB, no GPU`."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU"
    return f"{os.cpu_count() or 1} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {named}"


def seconds(text: str) -> float:
    """`30m`, `2h`, `90s` or `90` in seconds; `ValueError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is no length of time; write 30m, 2h or 90s")
    return float(found[1]) * _UNITS[found[2]]
