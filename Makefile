# Every target makes the virtual environment it needs and works in a fresh clone.
#   PYTHON=python3.12   the interpreter to build .venv from (3.10 or newer; default python3)
#   TORCH=...           the torch to install where that interpreter has none: a requirement, a path or a URL
#   ARGS="..."          more arguments for pytest, the demo or the benchmark
#   JOBS=2              test processes

PYTHON ?= python3
TORCH ?=
VENV ?= .venv
JOBS ?= 2
ARGS ?=

export PYTHON TORCH VENV
PY := $(VENV)/bin/python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-gpu fuzz bench lint format check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
		|| grep -hE '^[a-z-]+:.*## ' Makefile
	@sed -n 's/^#   /  /p' Makefile

demo: ## train a small model on real text, then generate with it
	@bash tools/venv.sh demo,cpu
	$(PY) -m cula demo $(ARGS)

test: ## run the test suite (no GPU needed)
	@bash tools/venv.sh test
	$(PY) -m pytest -q -n $(JOBS) $(ARGS)

test-gpu: ## run the tests that need a GPU
	@bash tools/venv.sh test
	@$(PY) -c "import sys, torch; torch.cuda.is_available() or sys.exit('make test-gpu: torch finds no CUDA device here')"
	$(PY) -m pytest -q -m gpu $(ARGS)

fuzz: ## run the property tests with many more examples, and the tests that take minutes
	@bash tools/venv.sh test
	HYPOTHESIS_PROFILE=fuzz $(PY) -m pytest -q -n $(JOBS) -m "(hypothesis or long) and not gpu" $(ARGS)

bench: ## time the implementations this machine can run (a GPU: ARGS="--device cuda")
	@bash tools/venv.sh demo,cpu
	$(PY) -m cula bench $(ARGS)

lint: ## ruff check, ruff format --check, whitespace errors
	@bash tools/venv.sh lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	bash tools/check_whitespace.sh

format: ## let ruff rewrite the files
	@bash tools/venv.sh lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

check: lint test ## what CI runs

clean: ## remove environments, builds and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis cula-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
