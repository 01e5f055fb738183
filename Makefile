# Needs git, make and Python 3.11 or newer; everything else is installed into .venv and .venv-oldest.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
OLD := .venv-oldest
BIN := $(VENV)/bin

# The oldest supported transformers, and the newest huggingface_hub that it accepts.
OLDEST_PINS ?= transformers==5.16.0 huggingface_hub==1.33.0
OLDEST_TESTS ?= tests/test_cache_models.py tests/test_integration.py tests/test_bad_input.py tests/test_readme.py \
	tests/test_baselines_cache.py tests/test_baselines_groups.py tests/test_baselines_together.py \
	tests/test_diagnose_capture.py tests/test_diagnose_multimodal.py tests/test_families.py tests/test_media.py \
	tests/test_refused.py tests/test_fork.py tests/test_prefix.py tests/test_offload.py tests/test_tensor_parallel.py

export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit("oscar-kv needs Python 3.11 or newer: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
# One torch thread per test worker.
XDIST = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo test lint types contracts unit oldest slow gpu sanitize kernels format clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.stamp ## set up .venv and run the demo
	$(BIN)/oscar-kv demo

test: lint types contracts unit oldest ## set up both environments and run every check that needs no GPU

lint: $(VENV)/.stamp ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.stamp ## mypy, strict
	$(BIN)/mypy

contracts: $(VENV)/.stamp ## import-linter: which module may import which
	$(BIN)/lint-imports --no-logo

unit: $(VENV)/.stamp ## the tests, without gpu, vllm and slow
	$(XDIST) $(BIN)/python -m pytest -n $(JOBS)

oldest: $(OLD)/.stamp ## the cache tests on the oldest supported transformers
	$(XDIST) $(OLD)/bin/python -m pytest $(OLDEST_TESTS) -q -n $(JOBS)

slow: $(VENV)/.stamp ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu and not vllm"

gpu: ## the GPU tests, with the current Python and no environment of its own
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

sanitize: ## every kernel on small shapes under compute-sanitizer, with the current Python
	for tool in memcheck racecheck; do \
		PYTHONPATH=src compute-sanitizer --tool $$tool --error-exitcode 1 --report-api-errors no \
			$(PYTHON) -m pytest -m gpu -q -p no:cacheprovider tests/test_kernels_small.py || exit 1; \
	done

kernels: $(VENV)/.stamp ## registers and shared memory of every kernel on every architecture (needs no GPU)
	$(BIN)/python -m oscar_kv.kernels.compile

format: $(VENV)/.stamp ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove both environments and all caches
	rm -rf $(VENV) $(OLD) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

$(OLD)/.stamp: pyproject.toml constraints.txt Makefile
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(OLD)
	grep -vE '^(transformers|huggingface_hub)==' constraints.txt > $(OLD)/constraints.txt
	printf '%s\n' $(OLDEST_PINS) >> $(OLD)/constraints.txt
	$(OLD)/bin/python -m pip install -q -c $(OLD)/constraints.txt -e '.[dev]'
	@touch $@
