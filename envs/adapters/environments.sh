#!/bin/sh
# Make environments of their own for libraries whose pins are not the project's, nor each other's.
#   sh envs/adapters/environments.sh        PYTHON=/path/to/python3.11 (or newer)
# .venv-verifiers: the runtime of recipes/suites/verifiers.yaml, and the tests that play its tasks.
# .venv-openenv: only for tests, which hold our side of OpenEnv's protocol against the library's.
set -eu
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}

for library in verifiers openenv; do
  ENV="$ROOT/.venv-$library"
  "$PYTHON" -m venv "$ENV"
  # Every version is pinned: without that, pip searches for minutes.
  "$ENV/bin/python" -m pip --disable-pip-version-check --quiet install \
    --constraint "$ROOT/constraints-$library.txt" --editable "$ROOT[$library]"
  # What Python compiles is there for the next imports, which take seconds without it.
  "$ENV/bin/python" -c "import importlib.metadata, sys; __import__({'verifiers': 'verifiers.v1', 'openenv': 'openenv.core'}[sys.argv[1]]); \
print(sys.argv[1], importlib.metadata.version(sys.argv[1]), 'is ready')" "$library"
done

# .venv-clients: LangChain and LiteLLM, which talk to the server in tests. They need nothing of ours.
ENV="$ROOT/.venv-clients"
"$PYTHON" -m venv "$ENV"
"$ENV/bin/python" -m pip --disable-pip-version-check --quiet install \
  --constraint "$ROOT/constraints-clients.txt" langchain-openai litellm
"$ENV/bin/python" -c "import litellm, langchain_openai; print('LangChain and LiteLLM are ready')"
