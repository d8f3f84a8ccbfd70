"""Registers this project's environments the moment Gymnasium is imported, and costs next to nothing until then.

Gymnasium 1.x finds no plugins by itself. The wheel therefore has this file at the top level, with a `.pth` file that
imports it at interpreter start; `import envs` uses it too. It imports only `sys`, which is there already. With
`SAO_NO_GYMNASIUM_HOOK=1` in the environment the `.pth` file does nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` is not worth its import time at interpreter start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

ENVIRONMENTS = {
    "sao/PythonTIR-v0": "envs.python_tir.env:PythonTIR",
    "sao/SWEBench-v0": "envs.swe_bench.env:SWEBench",
    "sao/StyleShift-v0": "envs.style_shift.env:StyleShift",
    "sao/Chains-v0": "envs.chains.env:Chains",
}
"""Every environment: Gymnasium id to the `module:class` of its asynchronous core."""

_TARGET = "gymnasium.envs.registration"


def register(registration: ModuleType) -> None:
    """Register what is missing from `registration.registry` (the module `gymnasium.envs.registration`)."""
    for env_id in ENVIRONMENTS:
        if env_id not in registration.registry:
            registration.register(id=env_id, entry_point="_sao_gymnasium_hook:make", kwargs={"core": env_id})


def make(core: str, render_mode: str | None = None, **kwargs: Any) -> Any:
    """What Gymnasium calls for an id: `envs.facade.TextEnv` around the core of that id.

    Another package called `envs` may come first on `sys.path`. Its modules are left alone; ours are looked for behind
    them, so that the ids resolve unless both have a module of the same name. Raises `ImportError`, which names it.
    """
    try:
        facade = _facade()
    except (ImportError, AttributeError) as error:
        other = _other_envs()
        if other is None:
            raise
        raise ImportError(
            f"another package called `envs` ({other}) hides the one of sao-agents ({_home()}), and {core} cannot be "
            f"made beside it ({error}): rename it, or put it later on sys.path"
        ) from error
    return facade(core, render_mode=render_mode, **kwargs)


def _facade() -> Any:
    import importlib

    other = _other_envs()
    if other is not None:
        path = getattr(sys.modules["envs"], "__path__", None)
        if path is None:
            raise ImportError("it is a module, not a package")
        if _home() not in path:
            path.append(_home())
    facade = importlib.import_module("envs.facade")
    for name in ("envs.facade", "envs.core", "envs.making"):
        found = sys.modules[name].__file__ or ""
        if not found.startswith(_home()):
            raise ImportError(f"it has a module {name} of its own")
    return facade.TextEnv


def _home() -> str:
    """Our own `envs` folder: beside this file, in a wheel as in a checkout."""
    import os

    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "envs")


def _other_envs() -> str | None:
    """Where the package `envs` that Python finds lies, if it is not ours."""
    import importlib
    import os

    package = importlib.import_module("envs")
    where = getattr(package, "__file__", None) or next(iter(getattr(package, "__path__", ())), "")
    folder = where if os.path.isdir(where) else os.path.dirname(where)
    return None if os.path.realpath(folder) == os.path.realpath(_home()) else where


def _register_or_warn(registration: ModuleType) -> None:
    # Someone who imports Gymnasium for another purpose must not be stopped by a plugin of theirs that fails.
    try:
        register(registration)
    except Exception as error:
        import warnings

        warnings.warn(f"the sao/ environments could not be registered with Gymnasium: {error!r}", stacklevel=2)


def _call_after(loader: Any, then: Callable[[ModuleType], None]) -> None:
    """Make `loader` call `then(module)` once it has executed a module."""
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        execute(module)
        then(module)

    try:  # noqa: SIM105 (contextlib would be imported at interpreter start)
        loader.exec_module = exec_module
    except AttributeError:  # a loader without a __dict__: the module loads all the same, and `import envs` registers
        pass


class _Finder:
    """Waits on `sys.meta_path` for one module, lets the other finders find it, and steps away."""

    sao_gymnasium_hook = True

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TARGET:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is None:
                continue
            _call_after(spec.loader, _register_or_warn)
            return spec
        return None


def install() -> None:
    """Register now if Gymnasium is imported already, else when it will be. Calling it again changes nothing."""
    registration = sys.modules.get(_TARGET)
    if registration is not None and hasattr(registration, "register"):
        _register_or_warn(registration)
    elif not any(getattr(finder, "sao_gymnasium_hook", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
