PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint

demo: .venv/installed  ## the whole pipeline on the small backbone that ships with the project
	$(BIN)/python -m ssd_train +model=tiny

test: .venv/installed  ## every test, the slow ones too
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
