# `make demo` and `make test` need nothing but Python 3.11 or newer.
PYTHON ?= python3
PYTHONS ?= $(PYTHON)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo quick test test-ci test-slow test-product test-gpu lint api docs package extras benchmarks clean

demo: $(VENV)/demo
	$(BIN)/python examples/demo.py

# What a change of schedules, sharding or the passes over programs breaks, and a small row of every
# engine.
QUICK := tests/house tests/schedules tests/sharding tests/autodiff tests/mpmd/test_passes.py \
	tests/harness/test_engines.py

quick: $(VENV)/dev
	$(BIN)/pytest -n 2 --dist worksteal -m "not ci and not slow and not product" $(QUICK)

test: $(VENV)/dev $(VENV)/browser
	$(BIN)/pytest -n 2 --dist worksteal -m "not ci and not slow and not product"

# Kills, restarts, several processes, and whole runs of every model: what a change must pass besides.
test-ci: $(VENV)/dev
	$(BIN)/pytest -n 2 --dist worksteal -m "ci and not slow and not product"

test-slow: $(VENV)/dev
	$(BIN)/pytest -n 2 --dist worksteal -m slow

test-product: $(VENV)/dev
	$(BIN)/pytest -n 2 --dist worksteal -m product

test-gpu: $(VENV)/gpu  # on a machine with an NVIDIA GPU and its driver
	JAX_PLATFORMS=cuda $(BIN)/pytest tests/gpu

lint: $(VENV)/dev
	$(BIN)/ruff check jaxpipe tests examples benchmarks
	$(BIN)/ruff format --check jaxpipe tests examples benchmarks
	$(BIN)/pyright

api:  # docs/api.md, from the sources
	$(PYTHON) docs/_api.py

docs: $(VENV)/docs  # the site, into site/; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

package:  # wheel and sdist into build/package/dist, and the wheel tried in an empty environment
	PYTHON=$(PYTHON) .ci/package build/package

# What `pip install` would take for every extra, for interpreters such as PYTHONS="python3.11 python3.13".
extras:
	.ci/extras "$$(ls build/package/dist/*.whl)" $(PYTHONS)

# docs/benchmarks.md, from the scripts in benchmarks/; NAMES="bubbles memory" runs some of them. The
# TPU's compiler is asked if libtpu is installed, and torch compared with if that is.
benchmarks: $(VENV)/dev
	$(BIN)/python benchmarks/page.py $(NAMES)

# Stamps: an environment is installed again when pyproject.toml is newer.
$(VENV)/demo: pyproject.toml | $(VENV)/made
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable ".[train]"
	touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/made
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable ".[dev]"
	touch $@

$(VENV)/gpu: pyproject.toml | $(VENV)/made
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable ".[dev,cuda]"
	touch $@

$(VENV)/docs: pyproject.toml | $(VENV)/made
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable ".[docs]"
	touch $@

$(VENV)/browser: .ci/browser | $(VENV)/made
	.ci/browser $@
	touch $@

$(VENV)/made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxpipe needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

clean:
	rm -rf .venv .venv-oldest runs site build
