#!/bin/sh
# Make an environment of its own for OpenHands' tools: they need Python 3.12, and their pins are not the project's.
#   sh envs/swe_bench/scaffolds/openhands/environment.sh [FOLDER]     default .venv-openhands; PYTHON312=/path/to/python3.12 (or newer)
# It holds OpenHands' whole distribution, what SWE-bench's environment needs, and pytest; no torch.
set -eu
ENV=${1:-.venv-openhands}
ROOT=$(cd "$(dirname "$0")/../../../.." && pwd)
pip() { "$ENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

# A name on the PATH may be a version manager's, which answers only for the versions that are switched on: pyenv's own
# folders are looked through as well.
if [ -z "${PYTHON312:-}" ]; then
  pyenv=$(command -v pyenv >/dev/null && pyenv root || true)
  for candidate in python3.12 python3.13 python3 ${pyenv:+"$pyenv"/versions/3.12.*/bin/python "$pyenv"/versions/3.13.*/bin/python}; do
    if new_enough "$candidate"; then PYTHON312=$candidate; break; fi
  done
fi
if ! new_enough "${PYTHON312:-}"; then
  echo "OpenHands needs Python 3.12 or newer: install it (on Debian and Ubuntu: the package python3.12, or pyenv)," >&2
  echo "or name one: PYTHON312=/path/to/python3.12" >&2
  exit 1
fi
"$PYTHON312" -m venv "$ENV"
# Every version is pinned: without that, pip searches for minutes.
pip install --constraint "$ROOT/constraints-openhands.txt" --editable "$ROOT[openhands-ai,swe-bench]" \
  pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
if pip show torch >/dev/null 2>&1; then
  echo "torch has come with OpenHands' libraries; constraints-openhands.txt no longer fits them" >&2
  exit 1
fi
# The first import takes half a minute; with it, what Python compiles is there for the next ones.
"$ENV/bin/python" -c 'from envs.swe_bench.scaffolds.openhands.library import load; load()
from importlib.metadata import version
print("OpenHands", version("openhands-ai"), "with openhands-tools", version("openhands-tools"), "is ready")'
