# Everything a newcomer needs: `make demo`, `make test`, `make check`. Each sets up what it lacks in .venv.

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
NATIVE := $(wildcard csrc/cpu/*.cpp csrc/cpu/*.hpp csrc/cpu/isa/*.cpp csrc/cpu/isa/*.hpp csrc/cpu/partial/*.cpp csrc/cpu/partial/*.hpp) CMakeLists.txt pyproject.toml
# Tests run one process per core, so each uses one thread, and idle threads sleep instead of spinning.
export OMP_WAIT_POLICY := passive
# The suite starts hundreds of processes; where Python is told to keep no bytecode, each would compile all it imports anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: package site demo test test-slow test-ray test-arm test-kernels golden gpu-test gpu-bench test-long check asan format clean sim soak

demo: $(VENV)/.runtime  ## Generate stories with the model that ships in the package
	$(BIN)/quire generate quire-storyteller --chat --max-tokens 260 \
	  -p "Tell me a story about a brave knight." \
	  -p "Tell me a story about a clever fox." \
	  -p "Tell me a story about a little girl who lost her kite."

test: $(VENV)/.dev  ## The fast suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow" tests

test-slow: $(VENV)/.dev  ## The others: servers, benchmarks and examples in processes of their own, and whatever takes seconds
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m slow tests

test-ray: $(VENV)/.dev  ## On a Ray cluster of several node processes; installs Ray (80 MB, some 400 on disk)
	$(BIN)/python -m pip install --quiet -e '.[ray,serve]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/parallel/test_ray.py tests/ray

test-long: $(VENV)/.dev  ## The same with far more of what is drawn by chance, and all that can be crossed: some hours
	OMP_NUM_THREADS=1 QUIRE_FUZZ_SECONDS=600 QUIRE_SIM_SEEDS=20000 QUIRE_TIER_FAULTS=200 QUIRE_HYPOTHESIS_EXAMPLES=2500 QUIRE_TEST_KILLS=100 QUIRE_TEST_DAMAGED=100000 QUIRE_TEST_REQUESTS=10000 QUIRE_TEST_DIVISIONS=all QUIRE_TEST_CIRCUMSTANCES=all QUIRE_TEST_IMAGES=10000 \
	  $(BIN)/python -m pytest -q -n auto --dist worksteal --timeout 7200 tests/server/test_fuzz.py tests/server/test_fuzz_models.py tests/server/test_cross_talk.py tests/server/test_hostile_images.py tests/router/test_kills.py tests/faults tests/sim \
	  tests/core/kvcache/test_allocator_machine.py tests/engine/process tests/engine/test_processes.py tests/engine/test_exactness.py tests/engine/test_random_drafts.py tests/weights/gguf

test-kernels: $(VENV)/.dev  ## The GPU kernels and models on them: interpreted, and compiled for compute capabilities 8.0 and 9.0; needs no GPU
	OMP_NUM_THREADS=1 QUIRE_TEST_KERNELS=all $(BIN)/python -m pytest -q -n auto tests/kernels/triton tests/golden
	for capability in 80 90; do PYTHONPATH=tests/support:. $(BIN)/python tests/support/gpu_launches.py $$capability || exit 1; done

test-arm: $(VENV)/.dev  ## The kernels for Arm, cross-compiled and run on emulated processors: an hour or so; needs Debian 12
	sh tools/test-arm.sh $(abspath $(BIN))/python $(ARGS)

golden: $(VENV)/.dev  ## Record exact results of instruction sets that have none; ARGS=--replace where they are meant to change
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support:. $(BIN)/python -m tests.golden.record $(ARGS)

gpu-test: $(VENV)/.dev  ## On a GPU: the kernels' tests, the families' parity and the table of exactness
	bash tools/gpu-session.sh test $(BIN)/python

gpu-bench: $(VENV)/.dev  ## On a GPU: each kernel against the device's limits and torch's own, then whole steps; writes gpu-results/
	bash tools/gpu-session.sh bench $(BIN)/python

check: $(VENV)/.dev  ## Lint, formatting, types, and the links of the site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy quire benchmarks examples tools tests
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

site: $(VENV)/.dev  ## The documentation as a site, in build/site; fails at a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

package: $(VENV)/.python  ## Wheel and sdist in dist/, the wheel built from the sdist, both checked; tools/measure_install.py measures them
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tools/check_package.py dist/*

asan: $(VENV)/.dev  ## The native kernels' tests under the address and undefined-behaviour sanitizers
	OMP_NUM_THREADS=2 sh tools/sanitize.sh $(BIN)/python

format: $(VENV)/.dev  ## Rewrite what `make check` would complain about
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sim: $(VENV)/.dev  ## The simulator, longer than in the suite: make sim SEEDS=100000
	$(BIN)/quire simulate --seeds $(or $(SEEDS),10000)

soak: $(VENV)/.dev  ## A server under mixed load for long: make soak MINUTES=60; fails if anything grows or is not given back
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),60)

clean:  ## Remove what these targets made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Quire needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	PYTHON=$(BIN)/python sh tools/install-torch.sh
	@touch $@

$(VENV)/.runtime: $(VENV)/.python $(NATIVE)
	$(BIN)/python -m pip install --quiet -e '.[serve]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python tools/dev_requirements.py > $(VENV)/dev.txt
	$(BIN)/python -m pip install --quiet -r $(VENV)/dev.txt
	@touch $@
