"""Gymnasium environments for language-model agents. An action is text, an observation is text.

    import gymnasium
    env = gymnasium.make("sao/PythonTIR-v0", problems=[{"problem": "What is 6 * 7?", "answer": "42"}])
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(r"It is \\boxed{42}.")

Importing this package registers the environments with Gymnasium, now or when Gymnasium is imported; nothing heavy
is loaded before an environment is made. `make_core` makes the asynchronous core without Gymnasium in front.
"""

from __future__ import annotations

from _sao_gymnasium_hook import ENVIRONMENTS, install
from envs.core import AsyncEnv, EnvironmentFault
from envs.making import make_core

__all__ = ["ENVIRONMENTS", "AsyncEnv", "EnvironmentFault", "make_core"]

install()
