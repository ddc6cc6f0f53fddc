.PHONY: setup demo test lint types format docs clean

PYTHON ?= python3.11
BIN = .venv/bin

# torch first and by itself: a CPU build satisfies the pin wherever one is to be found.
.venv/ready: pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25,<27"
	$(BIN)/python -m pip install --quiet "torch==2.13.0" $(TORCH_INDEX)
	$(BIN)/python -m pip install --quiet --editable ".[demo,dev]"
	touch $@

setup: .venv/ready
	$(BIN)/python -m jobs.models

demo: setup
	$(BIN)/python -m jobs demo

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/python -m jobs.configuration > docs/configuration.md

clean:
	rm -rf .venv outputs *.egg-info
