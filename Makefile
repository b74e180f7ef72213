# `make` alone lists the targets. Every target does the set-up it needs by itself.
VENV := .venv
PYTHON_BIN := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
MODELS := build/cpu-models

# Folders count as sources too: their times change when a file is removed.
sources = $(shell find $(1) -name __pycache__ -prune -o \( -type d -o -name '*.py' \) -print 2>/dev/null)
ENV_SOURCES := env/cpu.lock env/build $(shell find env/shims -type f 2>/dev/null)
OUR_SOURCES := pyproject.toml README.md $(call sources,vllm_omni vllm_omni_health)
EXAMPLE_SOURCES := examples/cpu/pyproject.toml examples/cpu/omni_tiny_models.pth $(call sources,examples/cpu/omni_tiny_models)

PYTEST := $(PYTHON_BIN) -m pytest
PIP_INSTALL := $(PYTHON_BIN) -m pip --disable-pip-version-check -q install --no-deps --no-build-isolation

.DEFAULT_GOAL := help
.PHONY: help env install models lint format test test-all demo bench clean

help: ## this list
	@echo 'make TARGET, where TARGET is one of'
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMPS)/env install ## build .venv: vLLM and vllm-omni on CPU, and this project in it

install: $(STAMPS)/install $(STAMPS)/install-examples ## reinstall our packages into .venv if a source file changed

models: $(STAMPS)/models ## make the tiny models in build/cpu-models

$(STAMPS)/env: $(ENV_SOURCES)
	@env/build $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Upstream's vllm_omni has an __init__.py, so our files have to lie beside it in
# site-packages: an editable install would hide one half behind the other.
$(STAMPS)/install: $(STAMPS)/env $(OUR_SOURCES)
	@echo 'installing vllm-omni-health'
	@$(PIP_INSTALL) .
	@touch $@

$(STAMPS)/install-examples: $(STAMPS)/env $(EXAMPLE_SOURCES)
	@echo 'installing omni-tiny-models'
	@$(PIP_INSTALL) ./examples/cpu
	@touch $@

$(STAMPS)/models: $(STAMPS)/install-examples
	@$(PYTHON_BIN) -m omni_tiny_models.build $(MODELS)
	@touch $@

lint: $(STAMPS)/env ## ruff and mypy
	$(PYTHON_BIN) -m ruff check
	$(PYTHON_BIN) -m ruff format --check
	$(PYTHON_BIN) -m mypy

format: $(STAMPS)/env ## let ruff format and fix what it can
	$(PYTHON_BIN) -m ruff check --fix
	$(PYTHON_BIN) -m ruff format

test: env models ## all tests but the slow ones
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: env models ## every test
	$(PYTEST) $(ARGS)

demo: env models ## serve two stages, kill one under load, and watch
	$(PYTHON_BIN) examples/demo.py $(ARGS)

bench: env models ## upstream alone and with this layer, side by side
	$(PYTHON_BIN) -m bench $(ARGS)

clean: ## remove what make made: .venv, build, dist, caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
