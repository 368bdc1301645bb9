# Each target makes its own virtual environment where there is none.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
BENCH = build/bench-env
RIVALS = build/tables-env

.PHONY: demo test verify paper beyond uci tables bench docs clean

# Silences an announcement of mkdocs-material, which is not about this project.
export NO_MKDOCS_2_WARNING = 1

demo: $(VENV)/.demo
	$(BIN)/measureflow demo --out build/demo --force

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/pytest -n 2 --dist loadgroup --no-loadscope-reorder
	$(BIN)/mkdocs build --strict --quiet --site-dir build/docs

# Long statistical runs; writes docs/verification.md.
verify: $(VENV)/.dev
	$(BIN)/python -m verification
	$(BIN)/pytest -m slow

# Every figure and claim of the paper; writes docs/paper.md. MEASUREFLOW_DATA names the UCI folder.
paper: $(VENV)/.dev
	$(BIN)/measureflow reproduce all --out build/paper --force
	$(BIN)/measureflow reproduce uci --out build/paper --force
	$(BIN)/python -m verification.paper_page build/paper

# What other papers claim; writes docs/beyond.md. MEASUREFLOW_DATA names the UCI folder.
beyond: $(VENV)/.dev
	$(BIN)/measureflow reproduce beyond --out build/beyond --force
	$(BIN)/measureflow reproduce predictively-oriented-uci --out build/beyond --force
	$(BIN)/measureflow reproduce shifted-splits --out build/beyond --force
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

$(VENV)/.demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.demo

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

clean:
	rm -rf $(VENV) build
