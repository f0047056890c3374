# Every target works on a fresh clone: it first creates `.venv` with the tested versions.
# The tested Python where there is one; `make PYTHON=...` takes another.
PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
BIN := .venv/bin
STAMP := .venv/.installed

# make train ARGS="--env RepeatFirstEasy --seed 1"   make train MEMORY=lstm
MEMORY ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-learning lint format bench docs clean

help:
	@echo "make train          train PPO with linear attention on POPGym's RepeatPreviousEasy"
	@echo "make test           all quick tests (at most 12 minutes on two cores)"
	@echo "make test-slow      the tests that take minutes each"
	@echo "make test-learning  the tests that train until a return is reached"
	@echo "make lint           ruff and pyright;  make format: apply ruff's fixes"
	@echo "make bench          all benchmarks, tables on the screen"
	@echo "make docs           build the site into site/"
	@echo "make clean          remove .venv, caches and built files"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/python -m examples.train_popgym $(if $(MEMORY),--memory $(MEMORY)) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 1800 $(ARGS)

test-learning: $(STAMP)
	$(BIN)/python -m pytest -m learning --timeout 7200 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks kernels $(ARGS)
	$(BIN)/python -m benchmarks memories $(ARGS)
	$(BIN)/python -m benchmarks connectors $(ARGS)
	$(BIN)/python -m benchmarks compile $(ARGS)
	$(BIN)/python -m benchmarks learning $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site build dist .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
