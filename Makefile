# make demo | test | test-all | lint | fetch | clean.    PYTHON=python3.12 names another Python.
# Every path is relative and without a space, so the checkout itself may lie anywhere.
SHELL := /bin/sh
PYTHON ?= python3
CACHE ?= kitty-pro
PROMPT ?= Name three things that cats like.
export CACHE PROMPT
# Processes that run tests: most of a test's time is compilation, on one core.
WORKERS ?= 2
VENV := .venv
RUN := $(VENV)/bin/python
MODEL := .cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet

.PHONY: demo test test-all lint fetch clean
.DELETE_ON_ERROR:

# Compiled programs are kept in .cache, so that a second demo starts sooner.
demo: $(VENV)/.installed
	$(RUN) scripts/fetch_demo.py --what smollm2
	JAX_COMPILATION_CACHE_DIR="$${JAX_COMPILATION_CACHE_DIR:-.cache/xla}" \
	  $(RUN) scripts/generate.py --model "$(MODEL)" --chat --prompt "$$PROMPT" --cache "$$CACHE" \
	  --capacity 4096

# `make test` leaves out what is marked slow: a second look at what the others cover, on more caches or longer texts.
test: lint
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

# Here programs are compiled as a user's are, with LLVM's optimizer (see tests/conftest.py).
test-all: lint
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(RUN) -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# What the tests on a real model and real text read; without it they are skipped.
fetch: $(VENV)/.installed
	$(RUN) scripts/fetch_demo.py --what smollm2
	$(RUN) scripts/fetch_demo.py --what essays

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
	find kitty_jax models pallas_kernels scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A working environment that is already there is kept, if its Python will do.
$(VENV)/.created: scripts/check_python.py
	@if [ -x $(RUN) ]; then $(RUN) scripts/check_python.py; else \
	  command -v "$(PYTHON)" >/dev/null || \
	    { echo "kitty-jax needs Python 3.12 or newer, but there is no \"$(PYTHON)\": name one with PYTHON=..." >&2; exit 1; }; \
	  "$(PYTHON)" scripts/check_python.py && "$(PYTHON)" -m venv --clear $(VENV); fi
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.created
	@echo "installing kitty-jax into $(VENV) (some minutes the first time)"
	$(PIP) --editable .
	$(RUN) scripts/check_dependencies.py kitty-jax
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	$(RUN) scripts/check_dependencies.py "kitty-jax[dev]"
	@touch $@
