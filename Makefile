# make help lists the targets. PYTHON chooses the interpreter that .venv is made with.

PYTHON ?= python3
MODEL ?= smollm2-135m
RESULTS ?= build/bench
# Arguments for the target's main command: make test ARGS="-k pool", make serve ARGS="--port 9000"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE := CMakeLists.txt $(shell find native -path native/tests -prune -o -type f \( -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt \) -print)
# The versions that pyproject.toml names are the only ones.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)",$$/\1/p' pyproject.toml)
BUILD_TOOLS := $(shell sed -n 's/^ *"\(\(scikit-build-core\|nanobind\|cmake\|ninja\)>=[^"]*\)",$$/"\1"/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test native-test sanitize valgrind neon-test lint format bench docs-figures reports clean

help:  ## List the targets
	@awk -F ':.*## +' '/^[a-z-]+:.*##/ { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## Make .venv with everything in it; quick when nothing has changed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Ropeway needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone: pip takes the build that the configured index prefers, and nothing else decides about it.
$(VENV)/.tools: pyproject.toml | $(BIN)/python
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet $(BUILD_TOOLS)
	@touch $@

$(VENV)/.installed: $(VENV)/.tools $(NATIVE)
	$(PIP) install --quiet --no-build-isolation --editable '.[dev]'
	@$(BIN)/python -c 'import ropeway.devices.cpu._native' 2>/dev/null || \
	    echo 'The native kernels were LEFT OUT, for want of a C++20 compiler or the headers of Python. --device reference' \
	    'works, --device cpu does not. See docs/install.md; then: touch CMakeLists.txt && make setup'
	@touch $@

demo: setup  ## Fetch the embedded model, serve it, answer eight chats at once
	$(BIN)/python examples/demo.py $(MODEL)

serve: setup  ## Serve MODEL (default: the embedded one) on 127.0.0.1:8000
	$(BIN)/ropeway serve $(MODEL) $(ARGS)

bench: setup  ## Measure MODEL and the host's own cost; figures go to RESULTS as JSON
	@mkdir -p $(RESULTS)
	$(BIN)/ropeway bench overhead --json $(RESULTS)/overhead.json
	$(BIN)/ropeway bench latency $(MODEL) --json $(RESULTS)/latency.json
	$(BIN)/ropeway bench throughput $(MODEL) --json $(RESULTS)/throughput.json

# The first ones are of one process each and share the cores; servers and ranks have them to themselves. ARGS may
# select nothing of a part (5).
NONE_TOO = $(if $(ARGS),|| [ $$? -eq 5 ])
test: lint  ## Set up, lint, check types, run all tests
	$(BIN)/python -m pytest -n 2 tests/contract tests/model tests/property tests/unit $(ARGS) $(NONE_TOO)
	$(BIN)/python -m pytest tests/e2e tests/server $(ARGS) $(NONE_TOO)

# Of the kernels alone, from C++: no Python, no .venv. Debian packages that are missing are named, and the target skipped.
native-test:  ## Test the kernels on every instruction set that this machine has
	native/tests/run.sh plain $(ARGS)

sanitize:  ## The same under the address, undefined-behaviour and thread sanitizers
	native/tests/run.sh address $(ARGS)
	native/tests/run.sh thread $(ARGS)

valgrind:  ## The same under valgrind, the portable kernels
	native/tests/run.sh valgrind $(ARGS)

neon-test:  ## The same, cross-compiled for 64-bit Arm, in an emulator
	native/tests/run.sh neon $(ARGS)

lint: setup  ## Lint, check the format and the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## Format the code and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs-figures: setup  ## Draw the pictures of docs/ anew
	$(BIN)/python -m benchmarks.overlap_figure
	$(BIN)/python -m benchmarks.async_figure
	$(BIN)/python -m benchmarks.screens

# Needs nothing but the standard library, so nothing is set up for it.
reports:  ## List public bug reports of other engines that no test guards against
	@$(PYTHON) -m tools.reports $(ARGS)

clean:  ## Remove .venv, builds and caches (not downloaded models)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/ropeway/devices/cpu/_native*.so
