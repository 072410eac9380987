#!/usr/bin/env bash
# Builds the wheel for aarch64 and tries it under emulation: `aarch64.sh SOURCES FOLDER`. The wheel is then in FOLDER/wheel, and FOLDER/tried
# exists if its tests have passed. Needs maturin, zig and pip of the release's environment. A missing tool is reported as SKIPPED.
set -euo pipefail
sources=$1 work=$2
target=aarch64-unknown-linux-gnu
tests=()
for name in round_trip restore checkpoint scalars safetensors npz layouts nested_state; do tests+=("tests/python/test_$name.py"); done

skip() {
    echo "SKIPPED: $1"
    exit 0
}

mkdir -p "$work"
rustup target add "$target" >"$work/log" 2>&1 || skip "the wheel for aarch64 (rustup has no target $target: $(tail -1 "$work/log"))"
RUSTFLAGS="--remap-path-prefix=$sources=stepwell --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo" CARGO_TARGET_DIR=$work/target \
    maturin build --quiet --release --strip --locked --zig --target "$target" --compatibility manylinux2014 \
    --out "$work/wheel" --manifest-path "$sources/python/Cargo.toml"
wheel=$(ls "$work"/wheel/*.whl)
abi3audit --strict --summary "$wheel"

# An interpreter of Debian, in a folder of its own.
command -v qemu-aarch64 >/dev/null || skip "tests of the wheel for aarch64 (install qemu-user)"
command -v apt-get >/dev/null || skip "tests of the wheel for aarch64 (there is no apt-get to get an interpreter)"
mkdir -p "$work"/apt/{lists,cache/archives}/partial "$work/packages" "$work/system"
touch "$work/apt/status"
apt=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$work/apt" -o Dir::State::Lists="$work/apt/lists"
    -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt/cache" -o APT::Sandbox::User="$(id -un)")
apt-get "${apt[@]}" -qq update || skip "tests of the wheel for aarch64 (apt-get has no packages for it)"
only=(--recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances)
names=$(apt-cache "${apt[@]}" depends "${only[@]}" python3 libstdc++6 | grep '^[a-z0-9]' | sort -u)
# shellcheck disable=SC2086
(cd "$work/packages" && apt-get "${apt[@]}" -qq download $names)
for package in "$work"/packages/*.deb; do dpkg -x "$package" "$work/system"; done
python=$(ls "$work"/system/usr/bin/python3.[0-9]*[0-9])
version=${python##*python}

platforms=(--platform manylinux2014_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64)
python3 -m pip install --quiet --disable-pip-version-check --target "$work/site" --only-binary=:all: --implementation cp \
    --python-version "$version" "${platforms[@]}" "$wheel" pytest hypothesis safetensors msgpack
cd "$sources"
# Tests of memory start another interpreter, which the emulator does not.
env PYTHONPATH="$work/site" PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1 \
    qemu-aarch64 -L "$work/system" "$python" -m pytest -q -p no:cacheprovider -k 'not memory' "${tests[@]}"
touch "$work/tried"
