#!/bin/sh
# Make an environment of its own for OpenHands' tools: they need Python 3.12, and their pins are not the project's.
#   sh envs/swe_bench/openhands_env.sh [FOLDER]     default .venv-openhands; PYTHON312=/path/to/python3.12 (or newer)
# It holds OpenHands' whole distribution, what SWE-bench's environment needs, and pytest; no torch.
set -eu
ENV=${1:-.venv-openhands}
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON312=${PYTHON312:-$(command -v python3.12 || command -v python3.13 || command -v python3 || true)}
pip() { "$ENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

if [ -z "$PYTHON312" ] || ! "$PYTHON312" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
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
"$ENV/bin/python" -c 'from envs.swe_bench.openhands_library import load; load()
from importlib.metadata import version
print("OpenHands", version("openhands-ai"), "with openhands-tools", version("openhands-tools"), "is ready")'
