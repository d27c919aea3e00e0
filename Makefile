PYTHON ?= python3
BIN := .venv/bin
MODEL := .cache/demo-model
TESTS := tests/kernels tests/deploy tests/plugin tests/dashboards tests/service tests/e2e
QUICK := $(BIN)/pytest -m "not long and not gpu"

export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

# pytest ends with status 5 when no test is selected. That is said, and is no failure.
or_none = || { status=$$?; [ $$status -eq 5 ] || exit $$status; echo "There are no $(1) tests in this version."; }

.PHONY: help setup tools model demo serve observe test test-long test-gpu sanitize check bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup:  ## create .venv with everything (PYTHON=python3.12 picks another interpreter)
	@$(PYTHON) deploy/setup_env.py

model: setup  ## build the demo model
	@$(BIN)/python -m deploy.demo_model $(MODEL)

demo: model  ## serve the demo model, talk to it, print what was counted, stop
	@$(BIN)/python -m service demo deploy/serve/cpu-demo.yaml

serve: model  ## serve the demo model until Ctrl-C
	@$(BIN)/python -m service serve deploy/serve/cpu-demo.yaml

tools: setup  ## get Prometheus and Alertmanager where there are none
	@$(BIN)/python deploy/setup_tools.py

observe: tools model  ## show the boards of the demo under load on a local page
	@$(BIN)/python -m dashboards observe

test: tools  ## tests that need no GPU and no patience
	TRITON_INTERPRET=1 $(QUICK) tests/kernels
	$(QUICK) tests/deploy tests/plugin
	$(QUICK) tests/dashboards
	$(QUICK) tests/service tests/e2e

test-long: tools  ## fuzz of engine schedules, and seeded faults that a test must catch
	$(BIN)/python tests/long.py

test-gpu: setup  ## the tests that need a GPU
	@$(BIN)/pytest -m gpu $(TESTS) $(call or_none,GPU)

sanitize: setup  ## every kernel once under compute-sanitizer's memcheck and racecheck
	@$(BIN)/python tests/sanitize.py

check: setup  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m dashboards check

bench: setup  ## check and time the kernels on this machine
	$(BIN)/deltalog bench kernels

clean:  ## remove what these targets made
	rm -rf .venv .cache .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache build dist
