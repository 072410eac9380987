#!/usr/bin/env bash
# Runs the tests of the engine under a sanitizer: `run.sh address` or `run.sh miri`. A missing tool is reported as SKIPPED, with the reason.
set -euo pipefail
cd "$(dirname "$0")/../.."
base="${CARGO_TARGET_DIR:-$PWD/target}"

skip() {
    echo "SKIPPED: $1 ($2)"
    # A required subject must not be absent.
    [[ ",${STEPWELL_REQUIRE:-}," != *,sanitizers,* ]]
    exit 0
}

case "${1:-}" in
address)
    # The flag is for nightly compilers; this lets a stable one take it.
    export RUSTC_BOOTSTRAP=1
    host=$(rustc -vV | sed -n 's/^host: //p')
    probe=$(mktemp -d)
    trap 'rm -rf "$probe"' EXIT
    echo 'fn main() {}' >"$probe/main.rs"
    if ! rustc --target "$host" -Zsanitizer=address -o "$probe/main" "$probe/main.rs" >"$probe/log" 2>&1; then
        skip "the tests under AddressSanitizer" "this compiler has none for $host: $(tail -1 "$probe/log")"
    fi
    # Leaks are not asked for: what a disk that hangs still holds is leaked on purpose, and tests make disks that hang.
    ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR="$base/asan" \
        cargo test --target "$host" -p stepwell-core -p stepwell-manager --lib
    ;;
miri)
    rustup +nightly --version >/dev/null 2>&1 || rustup toolchain list 2>/dev/null | grep -q nightly ||
        skip "the tests under Miri" "there is no nightly toolchain: rustup toolchain install nightly"
    cargo +nightly miri --version >/dev/null 2>&1 || rustup component add miri rust-src --toolchain nightly >/dev/null 2>&1 ||
        skip "the tests under Miri" "the component cannot be had: rustup component add miri rust-src --toolchain nightly"
    # Real files and io_uring are not for Miri; what maps memory, copies through raw pointers and shares slots between threads is. It runs a
    # thousand times as slowly: few cases of each property, and no test that looks at every byte of a huge page.
    export PROPTEST_CASES="${PROPTEST_CASES:-4}"
    MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-env-forward=PROPTEST_CASES ${MIRIFLAGS:-}" CARGO_TARGET_DIR="$base/miri" \
        cargo +nightly miri test -p stepwell-core --lib -- sys::host_source staging::
    ;;
*)
    echo "run.sh address | miri" >&2
    exit 2
    ;;
esac
