# Every target works on a fresh clone: it first creates `.venv` with the tested versions.
# The tested Python where there is one. `PYTHON=python3.13` takes another, `RAY=2.58.1` another Ray and
# `TORCH=2.14.1` another torch, each in an environment of its own: `.venv-py3.13`, `.venv-ray2.58.1`.
DEFAULT := $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
PYTHON ?= $(DEFAULT)
RAY ?=
TORCH ?=
# pyenv only runs versions that are selected: select all that are installed.
SELECT := PYENV_VERSION=$(shell pyenv versions --bare 2>/dev/null | sort -rV | paste -sd:)
INTERPRETER := $(shell $(SELECT) $(PYTHON) -c 'import sys; print(sys.executable)')
version = $(shell $(INTERPRETER) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv$(if $(filter-out $(DEFAULT),$(PYTHON)),-py$(version))$(if $(RAY),-ray$(RAY))$(if $(TORCH),-torch$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# make train ARGS="--env RepeatFirstEasy --seed 1"   make train MEMORY=gru
MEMORY ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test test-ray test-slow test-learning test-site gpu lint format bench docs dist clean

help:
	@echo "make train          train PPO with linear attention on POPGym's RepeatPreviousEasy"
	@echo "make test           all quick tests (at most 12 minutes on two cores)"
	@echo "make test-ray       the quick tests that start Ray;  make test-ray RAY=2.58.1: with that Ray"
	@echo "make test-slow      the tests that take minutes each"
	@echo "make test-learning  the tests that train until a return is reached"
	@echo "make test-site      the built site in the system's Chromium, and the page of \`watch\`"
	@echo "make gpu            the tests that need a GPU, then the benchmarks there (eight minutes)"
	@echo "make lint           ruff and pyright;  make format: apply ruff's fixes"
	@echo "make bench          all benchmarks, tables on the screen"
	@echo "make docs           build the site into site/"
	@echo "make dist           build wheel and source distribution into dist/"
	@echo "make clean          remove the environments, caches and built files"
	@echo
	@echo "PYTHON=python3.13, RAY=2.58.1 and TORCH=2.14.1 choose other versions, in environments of their own"

$(STAMP): pyproject.toml constraints.txt
	$(INTERPRETER) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(INTERPRETER) -m venv $(VENV)
	sed '$(if $(RAY),s/^ray==.*/ray==$(RAY)/;)$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/python -m examples.train_popgym $(if $(MEMORY),--memory $(MEMORY)) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

test-ray: $(STAMP)
	$(BIN)/python -m pytest -m 'ray and not slow and not learning' --numprocesses 2 --dist loadfile $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 1800 $(ARGS)

test-learning: $(STAMP)
	$(BIN)/python -m pytest -m learning --timeout 7200 $(ARGS)

test-site: docs
	$(BIN)/python -m pytest -m site tests/docs tests/rlmodules/tools $(ARGS)

# Short rounds: eight minutes for all of it. Without a GPU it stops at the first line.
CUDA := --device cuda --seconds 0.5
CASES := cards-64-default cards-64-default-compiled
gpu: $(STAMP)
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make gpu needs a GPU: torch finds no CUDA device")'
	$(BIN)/python -m pytest -m gpu $(ARGS)
	$(BIN)/python -m benchmarks kernels $(CUDA) --json benchmarks/results/kernels-cuda.json
	$(BIN)/python -m benchmarks memories $(CUDA) --json benchmarks/results/memories-cuda.json
	$(BIN)/python -m benchmarks memories $(CUDA) --bf16 --json benchmarks/results/memories-cuda-bf16.json
	$(BIN)/python -m benchmarks iteration $(CUDA) --only $(CASES) --json benchmarks/results/iteration-cuda.json
	$(BIN)/python -m benchmarks iteration $(CUDA) --only $(CASES) --bf16 --json benchmarks/results/iteration-cuda-bf16.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks kernels $(ARGS)
	$(BIN)/python -m benchmarks memories $(ARGS)
	$(BIN)/python -m benchmarks connectors $(ARGS)
	$(BIN)/python -m benchmarks iteration $(ARGS)
	$(BIN)/python -m benchmarks footprint $(ARGS)
	$(BIN)/python -m benchmarks compile $(ARGS)
	$(BIN)/python -m benchmarks scaling $(ARGS)
	$(BIN)/python -m benchmarks learning $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(STAMP)
	$(BIN)/python -m build $(ARGS)

clean:
	rm -rf .venv .venv-* site build dist .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
