"""What a Harbor verifier wrote: `reward.json` (names to numbers) or `reward.txt` (one number)."""

from __future__ import annotations

import json

from envs.core import EnvironmentFault

LARGEST_BYTES = 64 * 2**10
LARGEST = 1e300
"""Numbers beyond it count as infinite: whole numbers of JSON have no end."""


def read_reward(
    text: bytes | None, names: bytes | None, *, key: str, least: float, most: float
) -> tuple[float, dict[str, float]]:
    """The reward, and the other numbers of `reward.json` by name. `names` (reward.json) is asked first, as Harbor does.

    Raises `EnvironmentFault` for what a sound verifier never leaves: no file, an empty one, no number, or a reward that
    is not from `least` to `most`. None of these says anything of the policy.
    """
    if names is not None:
        found = _named(names)
        if key not in found:
            raise EnvironmentFault(f"reward.json holds no {key!r}; it has {', '.join(found) or 'nothing'}")
        value = found.pop(key)
    elif text is not None:
        value, found = _number(text), {}
    else:
        raise EnvironmentFault("the tests wrote neither /logs/verifier/reward.json nor reward.txt")
    if not least <= value <= most:
        raise EnvironmentFault(f"the tests wrote the reward {value:g}, which is not from {least:g} to {most:g}")
    return value, found


def _number(text: bytes) -> float:
    said = _decoded(text, "reward.txt").strip()
    try:
        value = float(said)
    except ValueError as error:
        raise EnvironmentFault(f"reward.txt holds no number but {said[:60]!r}") from error
    if not -LARGEST < value < LARGEST:
        raise EnvironmentFault(f"reward.txt holds {said[:60]!r}, which is not finite")
    return value


def _named(names: bytes) -> dict[str, float]:
    try:
        data = json.loads(_decoded(names, "reward.json"))
    except (ValueError, RecursionError) as error:
        raise EnvironmentFault(f"reward.json is no JSON: {error}") from error
    if isinstance(data, int | float):
        data = {"reward": data}
    if not isinstance(data, dict):
        raise EnvironmentFault(f"reward.json must hold names and numbers, not {type(data).__name__}")
    found = {}
    for name, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
            raise EnvironmentFault(f"reward.json: {name} is {str(value)[:60]}, not a finite number")
        found[name] = float(value)
    return found


def _decoded(data: bytes, name: str) -> str:
    if not data.strip():
        raise EnvironmentFault(f"{name} is empty")
    if len(data) > LARGEST_BYTES:
        raise EnvironmentFault(f"{name} has {len(data)} bytes, and a reward fits in {LARGEST_BYTES}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EnvironmentFault(f"{name} is not UTF-8") from error
