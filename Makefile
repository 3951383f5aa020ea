# `make run` does the main job, `make test` passes the tests; both set up .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test test-fast test-all docs check lint format bench release-check clean
.DEFAULT_GOAL := run

run: $(READY)
	$(BIN)/ldpfl run

# One thread a worker: two workers of two threads each would be ten times slower than one. Two workers more than cores: many tests wait.
# Compiled files are kept even where the environment says otherwise: the tests start many processes, and rewrite many assertions.
TEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadgroup -n $$(($$($(BIN)/python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())') + 2))

# Everything but further settings, longer draws, larger sizes, and details that take seconds to check.
test: $(READY)
	$(TEST) -m 'not thorough'

test-all: $(READY)
	$(TEST)

# Everything but deployments, processes that are killed, long statistics, and what else takes a third of a second.
test-fast: $(READY)
	$(TEST) -m 'not slow and not thorough'

# A site in build/site.
docs: $(READY)
	$(BIN)/python -c 'import mkdocs' 2>/dev/null || PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --editable ./verify --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check: lint test

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY)
	$(BIN)/python benchmarks/mechanism.py
	$(BIN)/python benchmarks/noise.py
	$(BIN)/python benchmarks/local_training.py
	$(BIN)/python benchmarks/accounting.py
	$(BIN)/python benchmarks/starting.py
	$(BIN)/python benchmarks/harmony.py
	$(BIN)/python benchmarks/ladp.py
	$(BIN)/python benchmarks/sealing.py
	$(BIN)/python benchmarks/relay.py
	@echo "beside Flower's own simulation (needs ray): $(BIN)/pip install 'flwr[simulation]<1.42' && $(BIN)/python benchmarks/flower.py"

# Both packages as users get them, in empty environments in build/release: some minutes. docs/releases.md says what is checked.
release-check: $(READY)
	$(BIN)/python .ci/release_check.py

$(READY): pyproject.toml verify/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/it")'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet torch==2.13.0
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --editable ./verify --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
