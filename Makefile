# Each target makes its own virtual environment where there is none.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test verify paper uci bench docs clean

# Silences an announcement of mkdocs-material, which is not about this project.
export NO_MKDOCS_2_WARNING = 1

demo: $(VENV)/.demo
	$(BIN)/measureflow demo --out build/demo --force

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/pytest -n 2 --dist loadgroup
	$(BIN)/mkdocs build --strict --quiet --site-dir build/docs

# Long statistical runs; writes docs/verification.md.
verify: $(VENV)/.dev
	$(BIN)/python -m verification

# Every figure and claim of the paper; writes docs/paper.md. MEASUREFLOW_DATA names the UCI folder.
paper: $(VENV)/.dev
	$(BIN)/measureflow reproduce all --out build/paper --force
	$(BIN)/measureflow reproduce uci --out build/paper --force
	$(BIN)/python -m verification.paper_page build/paper

# The nine UCI sets with every method: minutes on a GPU, hours on a CPU; writes docs/uci.md.
uci: $(VENV)/.dev
	$(BIN)/measureflow uci --out build/uci --force
	$(BIN)/python -m verification.uci_page build/uci

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/overhead.py

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

clean:
	rm -rf $(VENV) build
