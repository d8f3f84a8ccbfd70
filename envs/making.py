"""`make_core`: the asynchronous core of an environment, ours or anybody's, by its name."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from _sao_gymnasium_hook import ENVIRONMENTS
from envs.core import AsyncEnv

GROUP = "sao.environments"
"""The entry-point group in which a package can name its environments: `my_game = "my_package.game:Game"`."""


def make_core(env_id: str, **kwargs: Any) -> AsyncEnv:
    """Make the asynchronous core of an environment, e.g. `make_core("sao/PythonTIR-v0", max_turns=8)`.

    `env_id` is one of ours; `package.module:Class`; a name from the entry-point group `sao.environments`; or any id
    that Gymnasium knows. A class may be an `AsyncEnv` or a `gymnasium.Env` of text: see `envs.gymnasium_core` for how
    the latter is run (its `seeds` are an argument here too).

    Raises `ValueError` for a name that leads nowhere, and `envs.arguments.ArgumentError` (a `ValueError` and a
    `TypeError`) for an argument that one of ours does not take or cannot use. It must be used from one event loop, and
    closed with `await core.aclose()`.
    """
    name = env_id.removeprefix("envs:")
    if name in ENVIRONMENTS:
        core: AsyncEnv = _imported(ENVIRONMENTS[name])(**kwargs)
        return core
    seeds = kwargs.pop("seeds", None)
    return _as_core(_made(name, kwargs), seeds)


def _made(name: str, kwargs: dict[str, Any]) -> Any:
    named = {point.name: point.value for point in entry_points(group=GROUP)}
    target = named.get(name, name)
    module, colon, attribute = target.partition(":")
    if colon and "/" not in target and attribute.isidentifier() and all(map(str.isidentifier, module.split("."))):
        return _imported(target)(**kwargs)
    import gymnasium  # not for ours, which work without it

    try:
        return gymnasium.make(name, disable_env_checker=True, **kwargs)
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.NamespaceNotFound, ModuleNotFoundError) as error:
        known = sorted([*ENVIRONMENTS, *named])
        raise ValueError(
            f"unknown environment {name!r}; known: {', '.join(known)}, every id that is registered with Gymnasium, and "
            f"package.module:Class ({error})"
        ) from error


def _imported(target: str) -> Any:
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"no environment {target}: {error}. Its module must be importable where this process runs: installed, or "
            "in the working folder"
        ) from error


def _as_core(made: Any, seeds: dict[str, int] | None) -> AsyncEnv:
    if not isinstance(made, AsyncEnv):
        import gymnasium

        from envs.gymnasium_core import GymnasiumCore

        if not isinstance(made, gymnasium.Env):
            raise ValueError(f"an environment is an envs.core.AsyncEnv or a gymnasium.Env, not {type(made).__name__}")
        core = getattr(made.unwrapped, "core", None)  # one of ours, or built as ours are: `envs.facade.TextEnv`
        if not isinstance(core, AsyncEnv):
            return GymnasiumCore(made, seeds)
        made = core
    if seeds is not None:
        raise ValueError(f"seeds={seeds} name the tasks of a gymnasium.Env; {type(made).__name__} has its own")
    core_made: AsyncEnv = made
    return core_made
