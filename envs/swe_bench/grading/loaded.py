"""What Python may load from outside the work tree, before and after the repository was set up. No I/O.

Setting up runs code of the patch (`setup.py`, a build backend), which may write anywhere in the container. `LISTING` is
a shell function that lists, sorted, all that decides what Python loads; `foreign` says which of the differences are not
the repository's own install.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from envs.swe_bench.grading.protected import ALWAYS, CONFIGURATION

_LISTING = r"""
__sao_loaded() {
  if ! command -p find / -maxdepth 0 -printf '' 2>/dev/null; then echo "? no find"; return; fi
  { command -p find / -xdev \( -path /proc -o -path /sys -o -path SCRATCH -o -path WORKDIR \) -prune -o \
      \( -type f -o -type l \) \
      \( -path '*/site-packages/*' -o -path '*/dist-packages/*' -o -path '*/lib*/python[0-9]*' \) \
      \( -name '*.py' -o -name '*.py[cod]' -o -name '*.so' -o -name '*.so.*' -o -name '*.egg-link' -o -name '*.egg' \
         -o -name '*.zip' \) -printf 'F\t%p\t%s %T@ %C@ %l\n'
    command -p find / -xdev \( -path /proc -o -path /sys -o -path SCRATCH -o -path WORKDIR \) -prune -o \
      -name '*.pth' -exec awk '{ print "P\t" FILENAME "\t" $0 }' {} +
    command -p find / -xdev \( -path /proc -o -path /sys -o -path SCRATCH \) -prune -o \
      -name entry_points.txt -exec awk '/^[ \t]*\[/ { on = /pytest11/ } on { print "E\t" FILENAME "\t" $0 }' {} +
    command -p find ABOVE -maxdepth 1 -type f \( NAMES \) -printf 'A\t%p\t%s %T@ %C@\n'
    command -p find WORKDIR -name .git -prune -o \( -type f -o -type l \) \( ALWAYS \) -printf 'W\t%p\t%s %T@ %l\n'
    command -p find WORKDIR -name .git -prune -o -type f \( CONFIGURATION \) -printf 'C\t%p\t\n'
  } 2>/dev/null | LC_ALL=C command -p sort
}
"""
NO_LISTING = "? no find"

# What old setuptools writes around the paths of an easy-install.pth.
_EASY_INSTALL = re.compile(
    r"import sys; (sys\.__plen = len\(sys\.path\)|new ?= ?sys\.path\[sys\.__plen:\]; .*__egginsert.*)"
)
_FINDER = re.compile(r"import (__editable___\w+_finder); ?\1\.install\(\)")


def listing(workdir: str, scratch: str) -> str:
    """The shell function `__sao_loaded`, which prints one line for each thing that decides what Python loads."""

    def names(all_names: Iterable[str]) -> str:
        return " -o ".join(f"-name {shlex.quote(name)}" for name in sorted(all_names))

    values = {
        "SCRATCH": shlex.quote(scratch),
        "WORKDIR": shlex.quote(workdir),
        "ABOVE": " ".join(shlex.quote(str(folder)) for folder in PurePosixPath(workdir).parents),
        "NAMES": names(ALWAYS | CONFIGURATION),
        "ALWAYS": names(ALWAYS - {"entry_points.txt"}) + " -o -name '*.pth'",
        "CONFIGURATION": names(CONFIGURATION),
    }
    return re.sub(r"\b(" + "|".join(values) + r")\b", lambda found: values[found[1]], _LISTING)


def own_names(repo: str, base_files: Collection[str]) -> frozenset[str]:
    """Normalised names under which the repository may be installed: its own, and those of its packages."""
    names = {repo.rsplit("/", 1)[-1]}
    for path in base_files:
        parts = PurePosixPath(path).parts
        if parts[0] in ("src", "lib") and len(parts) > 1:
            parts = parts[1:]
        if path.endswith(".py"):
            names.add(parts[0].removesuffix(".py"))
    return frozenset(_normal(name) for name in names)


def foreign(
    differences: Iterable[str], *, workdir: str, own: Collection[str], test_files: Collection[str]
) -> list[str]:
    """The paths of those `differences` (lines of two listings) that the repository's own install does not explain."""
    found: dict[str, None] = {}
    for line in differences:
        kind, _, rest = line.partition("\t")
        path, _, told = rest.partition("\t")
        if kind == "F" and _is_own(path, own):
            continue
        if kind == "P" and _is_own_path(told.strip(), workdir, own):
            continue
        if kind in ("W", "C") and path.removeprefix(f"{workdir}/") in test_files:
            continue
        found[path or line] = None
    return list(found)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _is_own(path: str, own: Collection[str]) -> bool:
    """Whether a file below a site-packages folder is of the repository's distribution, by its first name there."""
    inside = re.split(r"/(?:site|dist)-packages/", path)
    if len(inside) < 2:
        return False
    parts = [part for part in inside[-1].split("/") if part != "__pycache__"]
    first = parts[0]
    editable = re.match(r"__editable___?_?(\w+?)_\d", first)
    if editable:
        return _normal(editable[1]) in own
    if first.endswith((".dist-info", ".egg-info", ".egg-link", ".egg")):
        first = re.sub(r"\.(dist-info|egg-info|egg-link|egg)$", "", first).split("-")[0]
    return _normal(first.split(".")[0] if len(parts) == 1 else first) in own


def _is_own_path(line: str, workdir: str, own: Collection[str]) -> bool:
    """Whether a line of a .pth file leads to the repository, or is what setuptools writes beside such lines."""
    if not line or line.startswith("#") or _EASY_INSTALL.fullmatch(line):
        return True
    if finder := _FINDER.fullmatch(line):
        return _is_own(f"/site-packages/{finder[1]}.py", own)
    if line.startswith("import"):
        return False
    if re.match(r"\./[^/]+\.egg$", line):
        return _is_own(f"/site-packages/{line[2:]}", own)
    pure = PurePosixPath(line)
    return ".." not in pure.parts and (pure == PurePosixPath(workdir) or PurePosixPath(workdir) in pure.parents)
