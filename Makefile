# Each target makes its own virtual environment where there is none.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
BENCH = build/bench-env
RIVALS = build/tables-env
OLDEST = build/oldest-env

.PHONY: demo test torch verify oldest dist paper beyond uci tables bench docs chromium clean

# Silences an announcement of mkdocs-material, which is not about this project.
export NO_MKDOCS_2_WARNING = 1

demo: $(VENV)/.demo
	$(BIN)/measureflow demo --out build/demo --force

# The tests build the documentation, too, into build/docs; with Chromium they look at every page.
test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/pytest -n 2 --dist loadgroup --no-loadscope-reorder

# PyTorch's modules beside PyTorch itself, which `make test` leaves out: with CUDA it takes gigabytes. Where pip finds
# a build for the CPU, that is enough.
torch: $(VENV)/.torch
	$(BIN)/pytest tests/networks/test_torch.py

# Long statistical runs; writes docs/verification.md.
verify: $(VENV)/.dev
	$(BIN)/python -m verification
	$(BIN)/pytest -m slow
	$(MAKE) oldest

# What every part of the library needs of others, with the oldest versions that pyproject.toml allows; the newest typer's
# click warns the oldest typer of its end.
oldest: $(OLDEST)/.done
	$(OLDEST)/bin/pytest -W ignore::DeprecationWarning tests/saving tests/spaces tests/flows/test_entropies.py \
	  tests/prediction/test_predictive.py tests/tables/test_frames.py tests/commands

# A wheel and an sdist in dist/; tests/test_dist.py installs such a wheel. See RELEASING.md.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/pytest tests/test_dist.py -m 'slow or not slow'

# Every figure and claim of the paper; writes docs/paper.md. MEASUREFLOW_DATA names the UCI folder.
paper: $(VENV)/.dev
	$(BIN)/measureflow reproduce all --out build/paper --force
	$(BIN)/measureflow reproduce uci --out build/paper --force
	$(BIN)/python -m verification.paper_page build/paper

# What other papers claim; writes docs/beyond.md. MEASUREFLOW_DATA names the UCI folder; runs on its sets resume.
beyond: $(VENV)/.dev
	$(BIN)/measureflow reproduce beyond --out build/beyond --force
	$(BIN)/measureflow reproduce predictively-oriented-uci --out build/beyond
	$(BIN)/measureflow reproduce shifted-splits --out build/beyond
	$(BIN)/python -m verification.paper_page --beyond build/beyond

# The nine UCI sets with every method: minutes on a GPU, hours on a CPU; writes docs/uci.md.
uci: $(VENV)/.dev
	$(BIN)/measureflow uci --out build/uci --force
	$(BIN)/python -m verification.uci_page build/uci

# Ours beside rivals on many tables: hours on a CPU; it resumes. The rivals are installed for this only, into an
# environment of its own. MEASUREFLOW_TABLES and MEASUREFLOW_DATA name the data; writes docs/tables.md.
tables: $(RIVALS)/.done
	$(RIVALS)/bin/measureflow tables --out build/tables
	$(RIVALS)/bin/python -m verification.tables_page build/tables

# Speed against bare JAX and against other libraries, which are installed for this only, into an environment of
# its own; writes build/bench and docs/benchmarks.md.
bench: $(BENCH)/.done
	$(BENCH)/bin/python -m benchmarks --out build/bench
	$(BENCH)/bin/python -m benchmarks.page build/bench

docs: $(VENV)/.dev
	$(BIN)/mkdocs serve

# For the tests of pages; without it they are skipped.
chromium:
	command -v chromium || command -v chromium-browser || command -v google-chrome \
		|| sudo apt-get install --yes chromium || brew install --cask chromium

$(VENV)/.demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.demo

$(VENV)/.torch: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable '.[torch]'
	touch $@

$(BENCH)/.done: pyproject.toml
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --editable .
	$(BENCH)/bin/python -m benchmarks.install
	touch $@

$(RIVALS)/.done: pyproject.toml
	test -x $(RIVALS)/bin/python || $(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/python -m pip install --quiet --editable .
	$(RIVALS)/bin/python -m benchmarks.install rivals
	touch $@

$(OLDEST)/.done: pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(PYTHON) verification/oldest.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt --editable '.[tables]' \
	  beartype hypothesis polars pytest pytest-xdist scoringrules skops
	touch $@

clean:
	rm -rf $(VENV) build dist
