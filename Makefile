PYTHON ?= python3
BIN := .venv/bin
# A worker a core, each with one thread: many small tensors gain nothing from more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.PHONY: demo test test-all lint

demo: .venv/installed  ## the whole pipeline on the small backbone that ships with the project
	$(BIN)/python -m ssd_train +model=tiny

test: .venv/installed  ## every kind of behaviour, in minutes: before every commit
	$(PYTEST) -m "not slow"

test-all: .venv/installed  ## every test
	$(PYTEST)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
