.DEFAULT_GOAL := help
.PHONY: help install slurm format lint types unit test test-slurm test-full check demo docs bench bench-comm bench-handoff bench-ablation bench-controller campaign clean
PIN := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PIN)
VENV ?= .venv$(if $(filter-out $(PIN),$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
PYTHON ?= python3
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
JOBS := tests/e2e
MATRIX := tests/integration/comm/wrappers tests/integration/comm/parity tests/integration/controller
APART := $(JOBS) $(MATRIX) tests/slurm $(CHECKED)
SLURM := slurmctld slurmd slurm-client munge iproute2

# run the tests in $(1) beside those in $(2); show what the first said after the others
beside = @$(PYTEST) $(1) -m 'not full' > .beside.log 2>&1 & first=$$!; \
	  $(PYTEST) $(2) -m 'not full'; second=$$?; \
	  wait $$first; first=$$?; cat .beside.log; rm -f .beside.log; exit $$((first | second))

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  TORCH=...  with unit, test or bench: another torch than $(PIN), in an environment of its own'

install: $(VENV)/.stamp ## Make .venv with tmover, torch and the tools
$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is missing or older than 3.10; name another with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { [ "$$(id -u)" = 0 ] && \
	  apt-get update -qq && apt-get install -y -qq python3-venv; } || \
	  { echo "error: $(PYTHON) cannot make environments; as root: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install -q -c $(VENV)/constraints.txt setuptools wheel
	$(BIN)/pip install -q -c $(VENV)/constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

slurm: ## Install the Slurm that the tests start, if it is missing (as root)
	@PATH=$$PATH:/usr/sbin:/sbin; for tool in slurmctld slurmd scontrol munged ip; do \
	  command -v $$tool >/dev/null || missing="$$missing $$tool"; done; [ -z "$$missing" ] || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SLURM); } || \
	  { echo "error:$$missing not found; as root: apt-get install --no-install-recommends $(SLURM)" >&2; exit 2; }

format: install ## Rewrite the code to style
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

lint: install ## Check style, layers and complexity
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/lint-imports

types: install ## Check types
	$(BIN)/mypy

unit: install ## Run the unit tests (no job, no controller)
	$(PYTEST) tests/unit --doctest-modules src --timeout 60 -m 'not full'

test: install slurm ## Run every test that fits in twenty minutes on two cores
	$(call beside,$(JOBS),tests $(APART:%=--ignore %))
	$(call beside,$(MATRIX) tests/slurm --ignore tests/slurm/jobs,tests/slurm/jobs)

test-slurm: install slurm ## Run the tests on a real Slurm, which they start and stop
	$(call beside,tests/slurm --ignore tests/slurm/jobs,tests/slurm/jobs)

test-full: install slurm ## Run all tests
	$(PYTEST) tests

check: lint types unit ## Everything but the long tests

demo: install ## Watch a job survive a move and the loss of rank 0 (under 4 minutes)
	$(BIN)/tmover demo

docs: install ## Regenerate docs/cli.md and the diagram of phases
	PYTHONPATH=tests $(BIN)/python -m documents

bench: bench-comm bench-handoff ## Measure the parts: the communicator, then the hand-off of state

bench-handoff: install ## Measure the hand-off of state beside a raw copy, and what copies cost
	OMP_NUM_THREADS=1 $(BIN)/python bench/handoff.py

bench-ablation: install ## Measure what each part of a move is worth, and a joiner's first step
	OMP_NUM_THREADS=1 $(BIN)/python bench/ablation.py --moves $(or $(MOVES),10)

bench-controller: install ## Measure the controller under 8,192 agents (AGENTS=)
	$(BIN)/python bench/controller.py --agents $(or $(AGENTS),8192)

bench-comm: install ## Measure the communicator beside gloo (about 15 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python bench/comm.py

campaign: install ## Do harm to jobs, compare each with its twin (FAULTS=100, SEED=)
	OMP_NUM_THREADS=1 $(BIN)/python bench/campaign.py --faults $(or $(FAULTS),100) $(SEED:%=--seed %)

clean: ## Remove what the other targets made
	rm -rf .venv .venv-* build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
