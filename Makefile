# What a clone needs to be tried, tested and released. It takes Python 3.11 or newer, a C++ compiler
# and make; the rest is fetched into .venv.
#
#   make demo     set up, build, run the example
#   make test     set up, build, test whatever this machine can run
#   make dev      .venv-dev with an editable install: `import baracuda` rebuilds what has changed
#   make wheel    dist/: the source distribution and the wheel for PYTHON
#   make lint     every linter, at the versions of requirements/lint.txt
#   make format   rewrite what the linters can put right themselves
#   make clean    remove everything that these made
#
#   PYTHON=python3.12      which Python; .venv keeps the one it was made with
#   CUDA=1, CUDA=0         with or without the kernels; by default with them where there is an nvcc or
#                          a GPU. CUDA=1 fetches NVIDIA's compiler where there is no nvcc.
#   ARCHITECTURES=80;90    CUDA architectures; by default this machine's GPU, or 90

PYTHON ?= python3
VENV ?= .venv
CUDA ?=
ARCHITECTURES ?=
JOBS ?= $(shell nproc)

comma := ,
bin := $(VENV)/bin
cuda := $(if $(CUDA),$(if $(filter 0 OFF off,$(CUDA)),OFF,ON),AUTO)
# Warnings are errors in CI.
werror := $(if $(CI),ON,OFF)
settings := -C cmake.define.BARACUDA_CUDA=$(cuda) -C cmake.define.BARACUDA_WERROR=$(werror) \
  -C 'cmake.define.CMAKE_CUDA_ARCHITECTURES=$(ARCHITECTURES)'
# The short form is only in pip 23.1 and later.
pip_settings := $(patsubst -C,--config-settings,$(settings))
sources := CMakeLists.txt LICENSE NOTICE README.md pyproject.toml $(shell find build_backend cmake csrc src -type f ! -name '*.pyc')
# cuda-python is of use only where there is a GPU.
extras := test$(if $(wildcard /dev/nvidia0)$(shell command -v nvidia-smi),$(comma)cuda)

export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test dev editable wheel lint format clean install sanitize embed
.DELETE_ON_ERROR:

demo: install
	$(bin)/python examples/kv_cache.py

test: $(VENV)/test-requires sanitize embed
	$(bin)/python -m pytest $(PYTEST_ARGS)

# The C API on the CPU, under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/build-requires
	$(bin)/cmake -S . -B build/sanitize -G Ninja --log-level=WARNING \
	  -DPython_EXECUTABLE="$(abspath $(bin)/python)" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DBARACUDA_CUDA=OFF -DBARACUDA_SANITIZE=ON -DBARACUDA_TESTS=ON -DBARACUDA_WERROR=$(werror)
	$(bin)/cmake --build build/sanitize
	$(bin)/ctest --test-dir build/sanitize --output-on-failure --no-tests=error

# The installed package from a C program.
embed: install
	scripts/check_embedding.sh $(bin)/python

install: $(VENV)/installed

$(VENV)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "baracuda needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Changes whenever the settings do, so that the next build takes them up.
$(VENV)/settings: $(VENV)/python FORCE
	@echo "$(settings)" | cmp -s - $@ || echo "$(settings)" >$@

$(VENV)/build-requires: $(VENV)/settings pyproject.toml build_backend/baracuda_build.py
	$(bin)/python scripts/install_build_requires.py $(settings)
	@touch $@

# Not isolated, so that the build directory is reused and only what changed is compiled.
$(VENV)/installed: $(VENV)/build-requires $(sources)
	@mkdir -p build
	@echo "building baracuda (log: build/install.log)"
	@$(bin)/python -m pip install -v --no-build-isolation . $(pip_settings) >build/install.log 2>&1 || \
	  { cat build/install.log; exit 1; }
	@sed -n 's/^ *-- \(baracuda: .*\)/\1/p' build/install.log
	@touch $@

$(VENV)/test-requires: $(VENV)/installed
	$(bin)/python -m pip install --quiet 'baracuda[$(extras)]'
	@touch $@

# Its build directory is its own: scikit-build-core starts afresh where the environment has changed.
dev:
	$(MAKE) VENV=.venv-dev editable

editable: $(VENV)/build-requires
	$(bin)/python -m pip install --no-build-isolation -e '.[$(extras)]' $(pip_settings) \
	  --config-settings build-dir=build/dev --config-settings editable.rebuild=true \
	  --config-settings editable.verbose=false

wheel: $(VENV)/python
	$(bin)/python -m pip install --quiet build
	rm -rf dist
	$(bin)/python -m build $(settings)

lint:
	PYTHON="$(PYTHON)" scripts/lint.sh

format:
	PYTHON="$(PYTHON)" scripts/lint.sh --fix ruff format clang-format cmake

clean:
	rm -rf .venv .venv-dev build dist

FORCE:
