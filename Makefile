# Each sets up .venv and builds first. make demo: a small transformer, then LTX-2 in its short form.
# make ltx2: LTX-2 in full, about 10 minutes. make test: every test.
PYTHON ?= python3
# The PyTorch to build against, as pip's words; more of them may stand here (a CPU wheel is enough).
TORCH ?= torch==2.13.0
# The PyTorch of `make test-2.14` and `make test-2.15`.
TORCH_2.14 ?= torch==2.14.1
TORCH_2.15 ?= torch==2.15.0
# What `make matrix` runs: PyTorch:CPython, a name on the PATH or a path.
MATRIX ?= 2.13.0:python3.11 2.14.1:python3.11 2.14.0:python3.12 2.15.0:python3.13 2.13.0:python3.14
VENV := .venv

# PyTorch's Inductor cannot link against a torch whose path has a space in it, so then the virtual
# environment lies in the user's cache.
empty :=
ifneq (,$(findstring $(empty) $(empty),$(CURDIR)))
VENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hotop/venv-$(firstword $(shell printf %s "$(CURDIR)" | cksum))
endif

PY := $(VENV)/bin/python
SOURCES := $(shell find csrc cmake -type f) CMakeLists.txt pyproject.toml

.PHONY: demo ltx2 test lint format bench fuzz sanitize build test-2.14 test-2.15 matrix clean
.DELETE_ON_ERROR:

demo: build
	$(PY) -m hotop demo
	$(PY) -m hotop ltx2 --quick

ltx2: build
	$(PY) -m hotop ltx2 --tuner

# A file's tests stay together, in one process per core.
test: build lint
	$(PY) -m pytest tests -n auto --maxprocesses 8 --dist loadfile

build: $(VENV)/.built

$(VENV)/.tools: tools/check_machine.py Makefile
	$(PYTHON) tools/check_machine.py
	@echo "hotop: setting up $(VENV) with $(TORCH)"
	mkdir -p $(dir $(VENV))
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check $(TORCH) scikit-build-core cmake ninja
	touch $@

# Without isolation: the core must be built against the torch in .venv, in a folder of its own.
$(VENV)/.built: $(VENV)/.tools $(SOURCES)
	@echo "hotop: building the C++ core (about a minute)"
	$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation \
	    -C build-dir='build/$(notdir $(VENV))-{wheel_tag}' $(TORCH) -e '.[dev]'
	touch $@

lint: build
	$(PY) -m ruff check src tests tools
	$(PY) -m ruff format --check src tests tools
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(wildcard csrc/*/*.cpp csrc/*/*.h)

format: build
	$(PY) -m ruff check --fix src tests tools
	$(PY) -m ruff format src tests tools
	$(VENV)/bin/clang-format -i $(wildcard csrc/*/*.cpp csrc/*/*.h)

# A million random calls against torch.library.custom_op, an hour on two cores.
fuzz: build
	$(PY) -m tools.fuzz --calls 1000000

# Tests on builds of their own: AddressSanitizer and UBSan, ThreadSanitizer, valgrind's memcheck.
sanitize: build
	$(PY) tools/sanitize.py

bench: build
	$(PY) -m hotop bench

# The suite on another PyTorch, in a virtual environment of its own. Never part of `make test`: on
# Linux pip may bring a CUDA build of several GB.
test-2.14 test-2.15: test-%:
	PIP_CONFIG_FILE=/dev/null $(MAKE) VENV=$(VENV)-$* TORCH="$(TORCH_$*)" build
	$(VENV)-$*/bin/python -m pytest tests -n auto --maxprocesses 8 --dist loadfile

# Every pair: build, suite, 100,000 fuzzed calls, every ATen overload; hours. A pair that fails does
# not stop the others.
matrix:
	$(PYTHON) tools/matrix.py --venv $(VENV) $(MATRIX)

clean:
	rm -rf build $(VENV) $(VENV)-*
