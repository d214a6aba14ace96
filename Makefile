# Sets up a .venv in this checkout and works in it. Safe to run again.
#
#   make prune   train a small language model, prune it while it is sharded over 2 processes
#   make test    lint, then run all tests
#   make test TORCH=2.15.0   the same with that torch, in a .venv-torch2.15.0 of its own
#   make bench   measure time, memory and communication, and compare them with bounds
#   make clean   delete the .venvs and everything that was made

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?=
VENV := .venv$(TORCH:%=-torch%)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NPROC ?= 2
# Two workers: most tests run processes of their own.
PYTEST_ARGS ?= -n 2

.PHONY: help prune test lint bench clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

$(READY): pyproject.toml constraints.txt
	@echo "== installing into $(VENV), with the versions in constraints.txt$(TORCH:%= but torch %)"
	$(PYTHON) -m venv $(VENV)
	sed '$(TORCH:%=s/^torch==.*/torch==%/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[lint,test]'
	@touch $@

prune: $(READY)
	@echo "== training, pruning and fine-tuning on $(NPROC) processes; results in runs/"
	PYTHON="$(abspath $(BIN))/python" NPROC=$(NPROC) sh launch/prune_tiny_llama.sh $(ARGS)

lint: $(READY)
	@echo "== linting"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	@echo "== testing"
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(READY)
	@echo "== measuring"
	$(BIN)/python tests/benchmarks/bench.py $(ARGS)

clean:
	rm -rf .venv .venv-torch* runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
