"""Gymnasium environments for language-model agents. An action is text, an observation is text.

    import gymnasium
    env = gymnasium.make("sao/PythonTIR-v0", problems=[{"problem": "What is 6 * 7?", "answer": "42"}])
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(r"It is \\boxed{42}.")

Importing this package registers the environments with Gymnasium, now or when Gymnasium is imported; nothing heavy
is loaded before an environment is made. `make_core` makes the asynchronous core without Gymnasium in front.
"""

from __future__ import annotations

import importlib
from typing import Any

from _sao_gymnasium_hook import ENVIRONMENTS, install
from envs.core import AsyncEnv, EnvironmentFault

__all__ = ["ENVIRONMENTS", "AsyncEnv", "EnvironmentFault", "make_core"]

install()


def make_core(env_id: str, **kwargs: Any) -> AsyncEnv:
    """Make the asynchronous core of a registered environment, e.g. `make_core("sao/PythonTIR-v0", max_turns=8)`.

    Raises `ValueError` for an unknown id and `TypeError` for an argument that the environment does not take. It
    must be used from one event loop, and closed with `await core.aclose()`.
    """
    target = ENVIRONMENTS.get(env_id.removeprefix("envs:"))
    if target is None:
        raise ValueError(f"unknown environment {env_id!r}; known: {', '.join(sorted(ENVIRONMENTS))}")
    module, _, name = target.partition(":")
    core: AsyncEnv = getattr(importlib.import_module(module), name)(**kwargs)
    return core
