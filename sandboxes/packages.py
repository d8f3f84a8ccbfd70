"""Which of the caller's packages code in a sandbox may import: those named here, and those a caller adds by name.

An environment's answers lie in its packages: data sets, generators that tell the answer for a seed, the graders
themselves. So nothing is shown because it is installed; what is shown is what mathematics needs.
"""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from sandboxes.base import SandboxFault

MATHEMATICS = (
    *("sympy", "mpmath", "gmpy2", "numpy", "scipy", "pandas", "networkx", "python-flint", "z3-solver"),
    # matplotlib, and what it and pandas are made of.
    *("matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "packaging", "pillow", "pyparsing"),
    *("python-dateutil", "six", "pytz", "tzdata"),
    # For code that looks at what it uses of its own sandbox.
    "psutil",
)
"""Names of distributions. One that is not installed is not missed."""

NOT_CODE = (".dist-info", ".egg-info", ".pth", "__pycache__")


def package_folders() -> list[str]:
    """Return the folders in which packages are installed for the caller, in the order in which it looks there."""
    names = ("site-packages", "dist-packages")
    return [path for path in sys.path if os.path.basename(path) in names and os.path.isdir(path)]


@functools.cache
def shown_packages(added: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the paths of the files and folders that make up the packages shown inside.

    `added` are names of distributions, or of modules that lie in a package folder; `SandboxFault` if one is not there.
    """
    paths = [path for name in MATHEMATICS for path in _distribution(name)]
    for name in added:
        found = _distribution(name) or _module(name)
        if not found:
            raise SandboxFault(f"the package {name!r} cannot be shown in a sandbox: it is not installed here")
        paths += found
    return tuple(dict.fromkeys(paths))


def check_packages(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names to add, all of them installed; raises `ValueError` that names the key `packages`."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"packages must be a list of names, got {names!r}")
    try:
        shown_packages(tuple(names))
    except SandboxFault as error:
        raise ValueError(f"packages: {error}") from error
    return tuple(names)


def _distribution(name: str) -> list[str]:
    """What a distribution has installed at the top of its folder; nothing if it is not there."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return []
    folder = os.path.abspath(str(distribution.locate_file("")))
    record = distribution.read_text("RECORD")
    # Packages of a Linux distribution have no such list, but they tell their modules.
    lines = record.splitlines() if record else (distribution.read_text("top_level.txt") or name).split()
    tops = {line.partition("/")[0].partition(",")[0].strip('"') for line in lines}
    paths = [os.path.join(folder, top) for top in sorted(tops) if top not in ("", "..") and not top.endswith(NOT_CODE)]
    found = [path for path in paths if os.path.exists(path)]
    return found if record else found or [path for top in sorted(tops) for path in _module(top)]


def _module(name: str) -> list[str]:
    """A module by its import name, in the first package folder that has it."""
    for folder in package_folders():
        place = os.path.join(folder, name)
        found = [
            path for path in (place, f"{place}.py", *glob.glob(f"{glob.escape(place)}.*.so")) if os.path.exists(path)
        ]
        if name.isidentifier() and found:
            return found
    return []
