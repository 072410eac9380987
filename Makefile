# The commands of this project. `make` alone lists them. Everything that is needed beyond Rust, Python and make is installed here, from
# the package registries, into .venv and target.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find core reshard manager python/src -name '*.rs' -o -name Cargo.toml)

.PHONY: help
help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.PHONY: tools
tools:
	@command -v cargo >/dev/null || { echo "missing: a Rust toolchain (cargo). Install it from https://rustup.rs, then run make again."; exit 1; }
	@[ -n "$(PYTHON)" ] || { echo "missing: Python 3.11 or newer. Install it, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "missing: Python's venv module ($(PYTHON) has none; on Debian: apt install python3-venv)"; exit 1; }

$(BIN)/python: | tools
	$(PYTHON) -m venv $(VENV)

$(VENV)/.tools: python/requirements-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r python/requirements-dev.txt
	@touch $@

# The extension is built optimised: tests of a checkpoint manager at debug speed would test something that nobody runs.
$(VENV)/.stepwell: $(RUST_SOURCES) python/pyproject.toml $(VENV)/.tools
	VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/maturin develop --release --quiet --manifest-path python/Cargo.toml
	@touch $@

.PHONY: build
build: $(VENV)/.stepwell ## build the Python package into .venv

.PHONY: demo
demo: build ## train, save, kill -9 in the middle of a save, resume, compare
	$(BIN)/python tests/demo/kill_and_resume.py

.PHONY: test
test: lint test-rust test-python ## everything that must hold before a change lands

.PHONY: lint
lint: $(VENV)/.tools ## formatting and lints
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	$(BIN)/ruff check --config python/pyproject.toml python tests docs
	$(BIN)/ruff format --check --config python/pyproject.toml python tests docs

.PHONY: test-rust
test-rust: | tools ## the Rust tests
	cargo test --workspace --quiet

.PHONY: test-python
test-python: build ## the Python tests
	$(BIN)/mypy --config-file python/pyproject.toml
	$(BIN)/python -m mypy.stubtest stepwell._core --mypy-config-file python/pyproject.toml
	$(BIN)/python -m pytest -rs tests/python
	$(BIN)/python -m pytest -rs tests/frameworks

.PHONY: test-long
test-long: build ## hours: longer sweeps of the same proofs, and the licences of all dependencies
	STEPWELL_LONG=1 cargo test --workspace --release
	STEPWELL_LONG=1 $(BIN)/python -m pytest tests/python
	STEPWELL_LONG=1 $(BIN)/python -m pytest tests/frameworks
	command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny check

.PHONY: bench
bench: bench-disk bench-peers ## measure against the raw disk and the peers (about 70 minutes; ARGS="--quick" for a look)

.PHONY: bench-disk
bench-disk: build bench-tools ## numpy arrays against the raw disk and safetensors (about 30 minutes)
	$(BIN)/python tests/bench/run.py $(ARGS)

.PHONY: bench-peers
bench-peers: build bench-tools ## tensors and JAX arrays against Orbax, DCP, torch.save, safetensors, torchsnapshot (about 40 minutes)
	$(BIN)/python tests/bench/peers.py $(ARGS)

.PHONY: bench-scale
bench-scale: build bench-tools ## what must stay small: many leaves, many steps, saves of JAX arrays, the import (about 10 minutes)
	$(BIN)/python tests/bench/scale.py $(ARGS)

.PHONY: bench-tools
bench-tools: build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/bench/requirements.txt

.PHONY: clean
clean: ## remove what was built
	rm -rf target $(VENV)
