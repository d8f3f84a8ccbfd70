# make train     install, then train the tiny recipe to 90 % (a few minutes on two cores)
# make test      lint, types and the whole test suite
# make vllm      an environment of its own for the vLLM server (.venv-vllm)
# make           only install
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/tir_tiny.yaml
ARGS ?=

export OMP_NUM_THREADS ?= 1

.PHONY: install vllm train test lint clean

install: .make/install .make/bubblewrap

.make/install: pyproject.toml constraints.txt hatch_build.py
	@mkdir -p .make
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Isolation for model-written code. Where it cannot be installed, say how; the program then refuses by itself.
.make/bubblewrap:
	@mkdir -p .make
	@command -v bwrap >/dev/null || sh sandboxes/install_bubblewrap.sh
	@touch $@

vllm: .make/vllm

.make/vllm: agent/engines/vllm_env.sh
	@mkdir -p .make
	PYTHON=$(PYTHON) sh agent/engines/vllm_env.sh .venv-vllm
	@touch $@

train: install
	$(BIN)/python -m learner.train $(RECIPE) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

clean:
	rm -rf $(VENV) .make .mypy_cache .pytest_cache .ruff_cache
