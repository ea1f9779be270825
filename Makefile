# Everything starts from a fresh clone: each target makes the virtual environment if need be.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread a process: tests and demo run several processes at once.
export OMP_NUM_THREADS ?= 1

.NOTPARALLEL:
.PHONY: help venv check test test-slow demo format clean

help:
	@echo "make venv       create $(VENV) with torch and all that is needed"
	@echo "make check      ruff, format, mypy, import contracts"
	@echo "make test       check, then the tests"
	@echo "make test-slow  the long sweeps and the slow cases"
	@echo "make demo       train on four gloo ranks and compare with one process"
	@echo "make format     rewrite the code in ruff's format"

venv: $(STAMP)

# torch first, as pinned: without a pin pip may choose another build
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".[dev]"
	touch $@

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-slow: venv
	$(BIN)/python -m pytest -m slow -n $(WORKERS)

demo: venv
	$(BIN)/python examples/demo.py

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
