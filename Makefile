# `make demo` runs a demonstration and `make test` the tests. Each command creates .venv if needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On two cores, two torch processes with two threads each are ten times slower than with one thread each. Python writes
# compiled files even if the environment forbids it, because every suite and every process of a test reads them.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test test-long test-slow test-gpu test-kernels test-paper test-flower check bench clean docs fuzz load lock paper wheel

# Every command installs the versions of one lock file. `make test LOCK= VENV=.venv-newest` installs the newest ones instead.
LOCK ?= constraints.txt
PIP_OPTIONS ?=
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) $(addprefix --constraint ,$(LOCK))

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) -e ".[train,report]"
	touch $@

$(VENV)/.dev: pyproject.toml console/pyproject.toml verifier/pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) -e ".[dev]" -e verifier -e console
	touch $(VENV)/.runtime $@

$(VENV)/.flower: pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) -e ".[dev,flower]" -e paper -e verifier -e console
	touch $(VENV)/.runtime $(VENV)/.dev $@

$(VENV)/.paper: pyproject.toml paper/pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) -e ".[train,report]" -e paper
	touch $(VENV)/.runtime $@

$(VENV)/.kernels: pyproject.toml kernels/pyproject.toml verifier/pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) -e ".[dev]" -e verifier -e console -e kernels
	touch $(VENV)/.runtime $(VENV)/.dev $@

$(VENV)/.docs: pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) -e ".[dev,docs]" -e verifier -e console
	touch $(VENV)/.runtime $(VENV)/.dev $@

demo: $(VENV)/.runtime   ## a demonstration on embedded data, in less than a minute
	$(BIN)/sifu demo

# Tests that need Flower run only with `make test-flower`, whether or not Flower is installed here.
test: $(VENV)/.dev       ## all quick tests, in minutes
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/engines/flower $(TESTS)

test-long: $(VENV)/.dev  ## long tests: whole runs, second verifier, browser, kills, properties with all examples
	$(TEST_ENV) SIFU_EXAMPLES=all $(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/engines/flower -m "(long or hypothesis) and not slow and not flower"

test-slow: $(VENV)/.dev  ## the long statistical and crash suites
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

GPU_TESTS := tests/engines/gpu tests/engines/sim/test_heads_on_device.py \
	$(addprefix tests/data/,test_feature_maps.py test_transformer_features.py)
test-gpu: $(VENV)/.dev   ## the tests of GPU code, on the GPU of this machine
	$(TEST_ENV) SIFU_TEST_GPU=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(GPU_TESTS)

test-kernels: $(VENV)/.kernels  ## the tests of kernels/, whose GPU kernels run in an interpreter
	$(TEST_ENV) $(BIN)/python -m pytest kernels/tests -n 2 --dist worksteal -m "not slow"

test-paper: $(VENV)/.dev $(VENV)/.paper  ## the tests of the paper's experiments
	$(TEST_ENV) $(BIN)/python -m pytest paper/tests -n 2 --dist worksteal

paper: $(VENV)/.paper    ## install the paper's experiments and run a small one, whose numbers mean nothing
	$(BIN)/sifu-bench run sequential --scale smoke --datasets digits --out build/bench-sequential

# Three files at a time on two cores, because the processes wait for each other half of the time. Files that take longest come first,
# in the order given: by default xdist begins with the files of most tests, and would end with the longest one alone.
FLOWER := tests/engines/flower
LONGEST := $(addprefix $(FLOWER)/test_flower_,deployment.py exact_groups.py exact_ways.py)
OTHERS := $(filter-out $(LONGEST),$(wildcard $(FLOWER)/test_*.py))
test-flower: $(VENV)/.flower  ## tests that need Flower, with real SuperLink and SuperNode processes on loopback
	$(TEST_ENV) FLWR_TELEMETRY_ENABLED=0 $(BIN)/python -m pytest $(LONGEST) $(OTHERS) -m "not slow" -n 3 --dist loadfile --no-loadscope-reorder

FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.dev       ## every fuzz target in turn, each for FUZZ_SECONDS (default: ten minutes)
	$(TEST_ENV) $(BIN)/python tests/faults/fuzzing.py all $(FUZZ_SECONDS)

LOAD ?=
load: $(VENV)/.paper   ## many clients, rounds and requests; LOAD=--full: 100,000, 10,000 and 1,000; prints figures as JSON
	$(BIN)/python benchmarks/load.py $(LOAD)

check: $(VENV)/.dev      ## style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs      ## the site with the API reference, in build/site; a warning or a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Versions are resolved for every platform and for Python 3.11.5 and later (which torch needs with CUDA). Existing files keep their versions;
# `make lock UPGRADE=--upgrade` resolves the newest. The public index is named, so that no other index appears in the files.
UPGRADE ?=
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11.5 --default-index https://pypi.org/simple $(UPGRADE)
CONSOLE := $(addprefix --extra ,onnx parquet report train)
USERS := $(CONSOLE) $(addprefix --extra ,flower pretrained transformers)
HASHED := --generate-hashes --no-emit-package torch --no-emit-package sifu-unlearning --config-file requirements/cpu-torch.toml --constraint constraints.txt
lock: | $(BIN)/python    ## write constraints.txt (every extra) and requirements/*.txt (hashed, for users) from pyproject.toml
	$(BIN)/pip install --quiet "uv>=0.12"
	$(COMPILE) --all-extras --no-emit-package sifu-unlearning --custom-compile-command "make lock" --output-file constraints.txt pyproject.toml paper/pyproject.toml verifier/pyproject.toml kernels/pyproject.toml console/pyproject.toml
	$(COMPILE) $(HASHED) $(CONSOLE) --custom-compile-command "make lock" --output-file requirements/console.txt pyproject.toml console/pyproject.toml
	$(COMPILE) $(HASHED) $(USERS) --custom-compile-command "make lock" --output-file requirements/all.txt pyproject.toml console/pyproject.toml

wheel: $(VENV)/.dev      ## sdists and wheels of the library, the console and the verifier in dist, each wheel built from its sdist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m build --no-isolation --outdir dist verifier
	$(BIN)/python -m build --no-isolation --outdir dist console

bench: $(VENV)/.paper  ## sifu and its peers on the same work (with pip, about half an hour); SIFU_DATA names a folder of real data
	$(BIN)/python benchmarks/compare.py --install
	$(BIN)/python benchmarks/compare.py --report

clean:
	rm -rf $(VENV) .bench build dist *.egg-info src/*.egg-info paper/src/*.egg-info kernels/src/*.egg-info console/src/*.egg-info verifier/src/*.egg-info verifier/build console/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
