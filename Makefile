# `make help` lists the commands. Everything runs in .venv, which holds exactly what requirements/dev.lock names.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.coral-setup
EXTRAS := flows aws gcp gurobi report serve dev

# V=1 shows what pip does. PYTEST_FLAGS goes to pytest, e.g. PYTEST_FLAGS="-k lattice -x".
PIP_QUIET := $(if $(V),,-qq)
PYTEST_FLAGS ?=
COVERAGE_MIN := 90
# Two worker processes: the smallest machine we promise to be quick on has two cores.
WORKERS ?= 2
UNIT := not servers and not engine and not nightly and not gpu
# The engine's own environment. CORAL_ENGINE_PYTHON names another interpreter that has vLLM.
ENGINE_VENV ?= .venv-engine
TORCH_CPU := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/engine-cpu.lock)

##@ Use
.PHONY: demo
demo: setup  ## Set up, build the library of scenario `tiny` through Prefect and Ray, and print a plan
	$(BIN)/coral demo

.PHONY: serve-demo
serve-demo: setup $(if $(CORAL_ENGINE_PYTHON),,engine-cpu)  ## The whole loop on this machine with real engines and tiny models (Ctrl-C ends it; DEMO="--once --port 8001")
	@exec $(BIN)/coral serve-demo $(DEMO)

.PHONY: serve
serve: setup  ## Prefect with its web page and all deployments, here or on PREFECT_API_URL (Ctrl-C ends it; SERVE="--port 4201")
	@exec $(BIN)/coral flows serve $(SERVE)

.PHONY: setup
setup: $(STAMP)  ## Make .venv from the lock file (again only when lock or pyproject.toml changed)

$(STAMP): requirements/dev.lock pyproject.toml
	@is_311() { "$$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }; \
	if ! is_311 $(BIN)/python; then \
	  for python in $(PYTHON) python3.11 python3 python; do if is_311 "$$python"; then found=$$python; break; fi; done; \
	  if [ -z "$${found:-}" ]; then echo "Python 3.11 is needed and not on the PATH: install it, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	  echo "Making $(VENV) with $$("$$found" --version)"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@echo "Installing $$(grep -cE '^[^ #]+==' requirements/dev.lock) locked packages into $(VENV) (a minute or so; V=1 shows each)"
	@$(BIN)/python -m pip install $(PIP_QUIET) --disable-pip-version-check --require-hashes -r requirements/dev.lock
	@$(BIN)/python -m pip install $(PIP_QUIET) --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

.PHONY: engine-cpu
engine-cpu: setup  ## vLLM for the CPU in .venv-engine, from its lock file (again only when that changed; 3 GB)
	@cmp -s requirements/engine-cpu.lock $(ENGINE_VENV)/engine-cpu.lock || { \
	  $(BIN)/python -m venv --clear $(ENGINE_VENV) && \
	  if ! $(ENGINE_VENV)/bin/python -m pip install --dry-run -qq --disable-pip-version-check --no-deps '$(TORCH_CPU)'; then \
	    echo "pip finds no $(TORCH_CPU), torch's build for the CPU: name the folder or page that has its wheel in PIP_FIND_LINKS (see docs/engine.md)" >&2; \
	    exit 1; \
	  fi; \
	  echo "Installing $$(grep -cE '^[^ #]+==' requirements/engine-cpu.lock) locked packages into $(ENGINE_VENV) (three minutes or so; V=1 shows each)"; \
	  $(ENGINE_VENV)/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check --no-deps --require-hashes --compile -r requirements/engine-cpu.lock && \
	  cp requirements/engine-cpu.lock $(ENGINE_VENV)/engine-cpu.lock; }

##@ Check
.PHONY: test
test: setup lint type  ## Lint, types, then all tests but those that start servers, with the coverage bound
	$(BIN)/pytest -n $(WORKERS) -m "$(UNIT)" --cov --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE_MIN) $(PYTEST_FLAGS)

.PHONY: lint
lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: type
type: setup  ## mypy, strict
	$(BIN)/mypy

.PHONY: arch
arch: setup  ## Import contracts, names, file sizes, what may be committed
	$(BIN)/pytest -q tests/arch

.PHONY: servers
servers: setup  ## Tests that start Ray, Prefect or S3 servers, or ask the package registry
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "servers and not engine and not nightly and not gpu" $(PYTEST_FLAGS)

.PHONY: engine
engine: setup $(if $(CORAL_ENGINE_PYTHON),,engine-cpu)  ## Tests that start real vLLM on the CPU
	CORAL_ENGINE_PYTHON=$(or $(CORAL_ENGINE_PYTHON),$(abspath $(ENGINE_VENV))/bin/python) \
	  $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "engine and not nightly and not gpu" $(PYTEST_FLAGS)

.PHONY: nightly
nightly: setup  ## Everything but GPU tests, with many random examples: hours
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -m "not gpu" --timeout=7200 $(PYTEST_FLAGS)

.PHONY: infra-check
infra-check: setup  ## Security policy of infra/terraform, in an environment of its own (.venv-infra)
	@cmp -s requirements/infra.lock $(VENV)-infra/infra.lock || { \
	  $(BIN)/python -m venv --clear $(VENV)-infra && \
	  $(VENV)-infra/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check --require-hashes -r requirements/infra.lock && \
	  cp requirements/infra.lock $(VENV)-infra/infra.lock; }
	$(VENV)-infra/bin/checkov --config-file infra/terraform/.checkov.yaml

.PHONY: bench-rivals
bench-rivals: setup  ## Other gateways for `coral bench gateway`, in an environment of their own (.venv-bench)
	@cmp -s requirements/bench.lock $(VENV)-bench/bench.lock || { \
	  $(BIN)/python -m venv --clear $(VENV)-bench && \
	  $(VENV)-bench/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check --require-hashes -r requirements/bench.lock && \
	  cp requirements/bench.lock $(VENV)-bench/bench.lock; }

.PHONY: cov
cov: setup  ## Coverage of the quick tests as pages in htmlcov/
	$(BIN)/pytest -q -n $(WORKERS) -m "$(UNIT)" --cov --cov-report=html $(PYTEST_FLAGS)
	@echo "open htmlcov/index.html"

.PHONY: ci
ci:  ## What continuous integration runs, from nothing: set-up, all tests, the demo
	.ci/run

##@ Maintain
.PHONY: fix
fix: setup  ## Let ruff mend and format what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: lock
lock: setup  ## Write the lock files anew from pyproject.toml (UPGRADE=1 takes newer versions)
	$(BIN)/uv pip compile -q --no-header --generate-hashes --python-version 3.11 $(if $(UPGRADE),--upgrade) \
	  $(addprefix --extra ,$(EXTRAS)) pyproject.toml requirements/build.in -o requirements/dev.lock
	$(BIN)/uv pip compile -q --no-header --generate-hashes --python-version 3.11 $(if $(UPGRADE),--upgrade) \
	  -c requirements/dev.lock pyproject.toml -o requirements/base.lock
	$(BIN)/uv pip compile -q --no-header --generate-hashes --python-version 3.11 $(if $(UPGRADE),--upgrade) \
	  requirements/infra.in -o requirements/infra.lock
	$(BIN)/uv pip compile -q --no-header --generate-hashes --python-version 3.11 $(if $(UPGRADE),--upgrade) \
	  requirements/bench.in -o requirements/bench.lock
	$(BIN)/uv pip compile -q --no-header --generate-hashes --python-version 3.11 $(if $(UPGRADE),--upgrade) \
	  $(addprefix --find-links ,$(PIP_FIND_LINKS)) --no-emit-find-links --override requirements/engine-cpu.override \
	  requirements/engine-cpu.in -o requirements/engine-cpu.lock

.PHONY: build
build: setup  ## Build the wheel into dist/
	$(BIN)/python -m pip wheel $(PIP_QUIET) --disable-pip-version-check --no-build-isolation --no-deps -w dist .

.PHONY: clean
clean:  ## Remove caches and build results; .venv and .coral (the demo's store) stay
	rm -rf dist build htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)*' -prune -exec rm -rf {} +

.PHONY: help
help:  ## This list
	@awk 'BEGIN { FS = ":.*##" } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*##/ { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
