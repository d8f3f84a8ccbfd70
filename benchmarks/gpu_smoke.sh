#!/bin/sh
# What to run first on a machine with a CUDA GPU: the learner's maths, a bf16 step, memory and speed, within 6 minutes.
#   sh benchmarks/gpu_smoke.sh                          # PYTHON=... names an interpreter that has PyTorch
#   sh benchmarks/gpu_smoke.sh --device cpu --tiny      # the same path in small, without a GPU
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null 2>&1 || python=python3
cd "$root"
if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "gpu_smoke: $python has no PyTorch, so nothing was measured; set PYTHON to an interpreter that has it"
  exit 0
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec timeout -k 10 360 "$python" benchmarks/gpu_smoke.py "$@"
