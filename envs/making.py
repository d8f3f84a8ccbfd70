"""`make_core`: the asynchronous core of an environment, ours or anybody's, by its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from _sao_gymnasium_hook import ENVIRONMENTS
from envs.core import AsyncEnv

GROUP = "sao.environments"
"""The entry-point group in which a package can name its environments: `my_game = "my_package.game:Game"`."""


def make_core(env_id: str, **kwargs: Any) -> AsyncEnv:
    """Make the asynchronous core of an environment, e.g. `make_core("sao/PythonTIR-v0", max_turns=8)`.

    `env_id` is one of ours; `package.module:Class`; a name from the entry-point group `sao.environments`; or any id
    that Gymnasium knows (`package:Id-v0` imports the package that registers it). A class may be an `AsyncEnv` or a
    `gymnasium.Env` of text: see `envs.gymnasium_core` for how the latter is run (its `seeds` are an argument here too).

    Two arguments are not the environment's own. `model`: the language model that it asks, a mapping with `url` and
    `name` (`envs.asking.endpoint.ModelEndpoint`) or an object that has `chat` (`envs.core.Model`). `tools`: a mapping
    with `mcp`, servers whose tools it has beside its own (`envs.mcp_tools.settings.ToolSettings`). Anything else under
    these names is handed to the environment.

    Raises `ValueError` for a name that leads nowhere, and `envs.arguments.ArgumentError` (a `ValueError` and a
    `TypeError`) for an argument that one of ours does not take or cannot use. It must be used from one event loop, and
    closed with `await core.aclose()`.
    """
    name = env_id.removeprefix("envs:")
    model, tools = _taken(kwargs, "model", _is_model), _taken(kwargs, "tools", _are_tools)
    if name in ENVIRONMENTS:
        core: AsyncEnv = _imported(ENVIRONMENTS[name])(**kwargs)
    else:
        seeds = kwargs.pop("seeds", None)
        core = _as_core(_made(name, kwargs), seeds)
    if model is not None:
        from envs.asking.model import AskingCore

        core = AskingCore(core, model)
    if tools is not None:
        from envs.mcp_tools.core import WithMCPTools

        core = WithMCPTools(core, tools)
    return core


def _taken(kwargs: dict[str, Any], key: str, is_ours: Callable[[Any], bool]) -> Any:
    return kwargs.pop(key) if key in kwargs and is_ours(kwargs[key]) else None


def _is_model(value: Any) -> bool:
    return (isinstance(value, Mapping) and "url" in value) or hasattr(value, "chat") or hasattr(value, "key_env")


def _are_tools(value: Any) -> bool:
    return (isinstance(value, Mapping) and "mcp" in value) or hasattr(value, "mcp")


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
