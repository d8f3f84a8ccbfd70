# make             the three environments: the project's, vLLM's and OpenHands'
# make install     only the project's (.venv)
# make train       install, then train the tiny recipe to 90 % (a few minutes on two cores); RECIPE=... for another
# make serve       install, then serve a tiny model that a person can teach in minutes, at the link that it prints
# make vllm        an environment of its own for the vLLM server (.venv-vllm)
# make openhands   an environment of its own for OpenHands' tools (.venv-openhands, Python 3.12)
# make suites      environments of their own for other libraries: verifiers, OpenEnv, LangChain with LiteLLM (.venv-verifiers,
#                  .venv-openenv, .venv-clients)
# make sandboxes   a Docker engine that answers, and the demo repositories' images
# make browser     a Chromium for the page's tests
# make docs        the pages and the API reference as a site, in site/ (.venv-docs)
# make test        lint, types and the default test suite; make test-vllm, test-openhands, test-suites and test-slow for the others
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/tir_tiny.yaml
ARGS ?=

export OMP_NUM_THREADS ?= 1

.PHONY: all install vllm openhands suites sandboxes browser docs train serve lint test test-vllm test-openhands test-suites test-slow clean

all: install vllm openhands

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
	@command -v bwrap >/dev/null && ldconfig -p 2>/dev/null | grep -q libseccomp || sh sandboxes/install_bubblewrap.sh
	@touch $@

vllm: .make/vllm

.make/vllm: agent/engines/vllm/environment.sh
	@mkdir -p .make
	PYTHON=$(PYTHON) sh agent/engines/vllm/environment.sh .venv-vllm
	@touch $@

openhands: .make/openhands

.make/openhands: envs/swe_bench/scaffolds/openhands/environment.sh constraints-openhands.txt pyproject.toml
	@mkdir -p .make
	sh envs/swe_bench/scaffolds/openhands/environment.sh .venv-openhands
	@touch $@

# Other projects' libraries, for tasks in their formats.
suites: .make/suites

.make/suites: envs/adapters/environments.sh constraints-verifiers.txt constraints-openenv.txt constraints-clients.txt pyproject.toml
	@mkdir -p .make
	PYTHON=$(PYTHON) sh envs/adapters/environments.sh
	@touch $@

# An engine may have gone since the last time, so this one asks again.
sandboxes: install
	sh sandboxes/docker/install.sh
	$(BIN)/python -m sandboxes.docker.host_image
	$(BIN)/python -m envs.swe_bench.demo build

browser:
	sh agent/serve/install_chromium.sh

# Strictly: what a link points at is there. No `--quiet`, with which nothing would fail. Sources are read, not imported.
# The variable silences an advertisement for Material's successor.
docs: .make/docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.make/docs: pyproject.toml constraints.txt
	@mkdir -p .make
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["docs"], sep="\n")' >.make/docs.txt
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r .make/docs.txt
	@touch $@

train: install
	$(BIN)/python -m learner.train $(RECIPE) $(ARGS)

serve: install
	@test -e runs/serve_tiny/sft/config.json || $(BIN)/python -m learner.sft recipes/serve_tiny.yaml
	$(BIN)/python -m agent.serve recipes/serve_tiny.yaml --learn $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint sandboxes browser
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m 'not slow and not vllm and not openhands and not suites' $(ARGS)

test-vllm: install vllm
	SAO_REQUIRE_VLLM=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m 'vllm and not slow' tests/engines tests/learner tests/serve $(ARGS)

test-openhands: sandboxes openhands
	SAO_REQUIRE_OPENHANDS=1 .venv-openhands/bin/python -m pytest -m openhands tests/openhands $(ARGS)

# Minutes each, by hand: whole runs that are killed, resumed and compared.
test-slow: sandboxes browser
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'slow and not vllm and not openhands and not suites' $(ARGS)

test-suites: install suites
	SAO_REQUIRE_SUITES=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m suites tests/suites $(ARGS)

clean:
	rm -rf $(VENV) .venv-vllm .venv-openhands .venv-verifiers .venv-openenv .venv-clients .venv-docs .make site .mypy_cache .pytest_cache .ruff_cache
