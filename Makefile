.DEFAULT_GOAL := help
.PHONY: help demo test test-tpu test-all lint format lock clean

BIN := .venv/bin
READY := .venv/.ready
PTXAS := .ptxas
LIBTPU := .libtpu
PYTEST_ARGS ?=
LOCK_ARGS ?=

# pyright asks a package index whether it is the newest; the lock has decided that already.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Trust what the machine trusts: behind an intercepting proxy uv's own certificates are not enough.
export UV_SYSTEM_CERTS ?= true

# Without cached bytecode every process that imports JAX starts more than a second later.
unexport PYTHONDONTWRITEBYTECODE

help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## set up, then run the demonstration
	@$(BIN)/detjax demo

# One more than the cores that CI has: some tests wait for servers and other processes.
PYTEST = DETJAX_PTXAS=$(PTXAS) $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder
# What XLA makes of an operation, at full optimization, is what these tests are about.
OF_THE_COMPILER := tests/models tests/ops tests/portable
# The others are about what happens around compiled programs, and most of their time is XLA's.
QUICK_COMPILER := XLA_FLAGS=--xla_backend_optimization_level=0
# Where what was asked for is all elsewhere, pytest's exit code is 5.
IF_ANY := || [ $$? -eq 5 ]

test: lint $(PTXAS)/.ready ## set up, lint, then run the tests (PYTEST_ARGS="-k matmul" picks some)
	$(PYTEST) $(OF_THE_COMPILER) $(PYTEST_ARGS) $(IF_ANY)
	$(QUICK_COMPILER) $(PYTEST) tests --ignore tests/pallas/tpu $(addprefix --ignore ,$(OF_THE_COMPILER)) $(PYTEST_ARGS) $(IF_ANY)

test-tpu: $(LIBTPU)/.ready ## the kernels for TPUs, in the interpreter and compiled for chips that are not there
	PYTHONPATH=$(LIBTPU) JAX_PLATFORMS=cpu $(QUICK_COMPILER) $(PYTEST) --dist load tests/pallas/tpu $(PYTEST_ARGS)

test-all: ## every case of every test: of costly ones, the others run only some
	$(MAKE) test test-tpu PYTEST_ARGS="--all-cases $(PYTEST_ARGS)"

lint: $(READY) ## check style, formatting, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

COMPILE := --universal --python-version 3.12 --generate-hashes --no-header --no-emit-index-url --quiet

lock: ## resolve both locks anew (LOCK_ARGS=--upgrade takes newer releases)
	@uv=$$(tools/find-uv.sh) && \
	"$$uv" pip compile pyproject.toml --extra test $(COMPILE) $(LOCK_ARGS) --output-file requirements.lock && \
	"$$uv" pip compile --group ptxas --no-deps $(COMPILE) $(LOCK_ARGS) --output-file requirements-ptxas.lock && \
	"$$uv" pip compile --group libtpu --no-deps $(COMPILE) $(LOCK_ARGS) --output-file requirements-libtpu.lock

clean: ## remove everything that was made here
	rm -rf .venv $(PTXAS) $(LIBTPU) .tools dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml requirements.lock tools/make-venv.sh
	@tools/make-venv.sh
	@touch $@

# Beside the environment rather than in it, where JAX would look for a GPU in every process.
$(PTXAS)/.ready: $(READY) requirements-ptxas.lock
	@rm -rf $(PTXAS)
	@uv=$$(tools/find-uv.sh) && "$$uv" pip install --quiet --python $(BIN)/python --target $(PTXAS) \
	  --no-deps --require-hashes --requirements requirements-ptxas.lock
	@touch $@

# Likewise: where libtpu is importable, every process looks for TPUs.
$(LIBTPU)/.ready: $(READY) requirements-libtpu.lock
	@rm -rf $(LIBTPU)
	@uv=$$(tools/find-uv.sh) && "$$uv" pip install --quiet --python $(BIN)/python --target $(LIBTPU) \
	  --no-deps --require-hashes --requirements requirements-libtpu.lock
	@touch $@
