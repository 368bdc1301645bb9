# Each target makes its own virtual environment where there is none.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test verify bench docs clean

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
