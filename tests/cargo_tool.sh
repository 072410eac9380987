#!/usr/bin/env bash
# Installs a tool of cargo, unless it is there: `cargo_tool.sh NAME`. It need not be fast: building it with optimisations takes minutes.
set -euo pipefail
command -v "$1" >/dev/null || CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off cargo install --quiet --locked "$1"
