# `make demo` and `make test` need nothing but Python 3.11 or newer.
PYTHON ?= python3
PYTHONS ?= $(PYTHON)
BIN := .venv/bin

.PHONY: demo quick test test-ci test-slow test-product lint api docs package extras benchmarks clean

demo: .venv/demo
	$(BIN)/python examples/demo.py

# What a change of schedules, sharding or the passes over programs breaks, and a small row of every
# engine.
QUICK := tests/house tests/schedules tests/sharding tests/autodiff tests/mpmd/test_passes.py \
	tests/harness/test_engines.py

quick: .venv/dev
	$(BIN)/pytest -n 2 --dist worksteal -m "not ci and not slow and not product" $(QUICK)

test: .venv/dev .venv/browser
	$(BIN)/pytest -n 2 --dist worksteal -m "not ci and not slow and not product"

# Kills, restarts, several processes, and whole runs of every model: what a change must pass besides.
test-ci: .venv/dev
	$(BIN)/pytest -n 2 --dist worksteal -m "ci and not slow and not product"

test-slow: .venv/dev
	$(BIN)/pytest -n 2 --dist worksteal -m slow

test-product: .venv/dev
	$(BIN)/pytest -n 2 --dist worksteal -m product

lint: .venv/dev
	$(BIN)/ruff check jaxpipe tests examples benchmarks
	$(BIN)/ruff format --check jaxpipe tests examples benchmarks
	$(BIN)/pyright

api:  # docs/api.md, from the sources
	$(PYTHON) docs/_api.py

docs: .venv/docs  # the site, into site/; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

package:  # wheel and sdist into build/package/dist, and the wheel tried in an empty environment
	PYTHON=$(PYTHON) .ci/package build/package

# What `pip install` would take for every extra, for interpreters such as PYTHONS="python3.11 python3.13".
extras:
	.ci/extras "$$(ls build/package/dist/*.whl)" $(PYTHONS)

# docs/benchmarks.md, from the scripts in benchmarks/; NAMES="bubbles memory" runs some of them. The
# TPU's compiler is asked if libtpu is installed, and torch compared with if that is.
benchmarks: .venv/dev
	$(BIN)/python benchmarks/page.py $(NAMES)

# Stamps: an environment is installed again when pyproject.toml is newer.
.venv/demo: pyproject.toml | .venv/made
	$(BIN)/pip install --quiet --editable ".[train]"
	touch $@

.venv/dev: pyproject.toml | .venv/made
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

.venv/docs: pyproject.toml | .venv/made
	$(BIN)/pip install --quiet --editable ".[docs]"
	touch $@

.venv/browser: .ci/browser | .venv/made
	.ci/browser $@
	touch $@

.venv/made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxpipe needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	touch $@

clean:
	rm -rf .venv runs site build
