#!/usr/bin/env bash
# Runs the fuzz targets: `run.sh SECONDS [TARGET…]`, each for so long, as many at a time as there are cores. `run.sh corpus` writes the seeds anew and
# adds the smallest inputs of what was found that reach something new. A missing tool is reported as SKIPPED, with the reason.
set -euo pipefail
cd "$(dirname "$0")/../.."
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target/fuzz}"

# What a number in a file asks for shows at once: inputs are of some KiB, and nothing that they say is worth an allocation of more than this.
LIMITS=(-malloc_limit_mb=64 -rss_limit_mb=1536 -timeout=10 -max_len=65536)
# Bytes and files of corpus that are kept in the repository, for each target.
KEPT=150000
FILES=150
TARGETS=(manifest index footer object message step damage state glob pickle zip safetensors npy msgpack ocdbt)
CORPUS=tests/fuzz/corpus
FOUND="$CARGO_TARGET_DIR/found"

skip() {
    echo "SKIPPED: the fuzzers ($1)"
    # A required subject must not be absent.
    [[ ",${STEPWELL_REQUIRE:-}," != *,fuzz,* ]]
    exit 0
}

# Tools first: what is missing on this machine is no failure of the project, and what fails to compile is.
command -v "${CXX:-c++}" >/dev/null || skip "libFuzzer is built with a C++ compiler, and there is none: install g++ or clang"
HOST=$(rustc -vV | sed -n 's/^host: //p')
# The flags of sanitizers and coverage are for nightly compilers; this lets a stable one take them.
export RUSTC_BOOTSTRAP=1
probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
echo 'fn main() {}' >"$probe/main.rs"
if ! rustc --target "$HOST" -Zsanitizer=address -o "$probe/main" "$probe/main.rs" >"$probe/log" 2>&1; then
    skip "this compiler has no address sanitizer for $HOST: $(tail -1 "$probe/log")"
fi

BIN="$CARGO_TARGET_DIR/$HOST/release"

# What `cargo fuzz` passes to the compiler: coverage for libFuzzer, and the address sanitizer.
build() {
    local flags=(--cfg fuzzing -Zsanitizer=address -Cdebug-assertions -Cpasses=sancov-module)
    for flag in level=4 inline-8bit-counters pc-table trace-compares; do
        flags+=("-Cllvm-args=-sanitizer-coverage-$flag")
    done
    RUSTFLAGS="${flags[*]}" CARGO_PROFILE_RELEASE_LTO=off cargo build --manifest-path tests/fuzz/Cargo.toml --release --target "$HOST" \
        "${@/#/--bin=}" >"$probe/log" 2>&1 || {
        cat "$probe/log"
        exit 1
    }
}

# One target for some seconds; a line of a table, or what it found.
one() {
    local target=$1 seconds=$2 log="$FOUND/$1.log"
    mkdir -p "$FOUND/$target" "$FOUND/crashes/$target" "$CORPUS/$target"
    local status=0
    "$BIN/$target" "${LIMITS[@]}" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix="$FOUND/crashes/$target/" \
        "$FOUND/$target" "$CORPUS/$target" >"$log" 2>&1 || status=$?
    local executions speed memory
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    speed=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
    memory=$(sed -n 's/^stat::peak_rss_mb: *//p' "$log")
    printf '%-12s %12s executions %8s/s %6s MiB   %s\n' "$target" "${executions:-?}" "${speed:-?}" "${memory:-?}" \
        "$([ $status = 0 ] && echo 'nothing found' || echo 'FOUND SOMETHING')"
    if [ $status != 0 ]; then
        grep -m1 -A3 'panicked at\|ERROR: ' "$log" || tail -20 "$log"
        echo "the input: $(grep -o "$FOUND/crashes/[^ ]*" "$log" | tail -1); all of it: $log"
        return 1
    fi
}

if [ "${1:-}" = corpus ]; then
    build seeds "${TARGETS[@]}"
    fresh=$(mktemp -d "$CARGO_TARGET_DIR/corpus.XXXXXX")
    "$BIN/seeds" "$fresh/seeds"
    for target in "${TARGETS[@]}"; do
        mkdir -p "$fresh/merged" "$fresh/seeds/$target" "$FOUND/$target" "$CORPUS/$target"
        "$BIN/$target" "${LIMITS[@]}" -merge=1 "$fresh/merged" "$fresh/seeds/$target" "$CORPUS/$target" "$FOUND/$target" >"$fresh/log" 2>&1
        # What was a finding once stays, whatever it reaches by now.
        find "$CORPUS/$target" -type f ! -name 'found-*' -delete
        cp "$fresh/seeds/$target"/* "$CORPUS/$target/"
        files=0
        bytes=$(du -sb --apparent-size "$CORPUS/$target" | cut -f1)
        while read -r size name; do
            bytes=$((bytes + size))
            files=$((files + 1))
            [ "$bytes" -le "$KEPT" ] && [ "$files" -le "$FILES" ] || break
            cp -n "$fresh/merged/$name" "$CORPUS/$target/"
        done < <(find "$fresh/merged" -type f -printf '%s %f\n' | sort -n)
        rm -rf "$fresh/merged"
        printf '%-12s %6s inputs %8s bytes\n' "$target" "$(find "$CORPUS/$target" -type f | wc -l)" "$bytes"
    done
    rm -rf "$fresh"
    exit 0
fi

seconds=${1:-60}
shift || true
# libFuzzer takes 0 for no limit.
[ "$seconds" -gt 0 ] || { echo "$seconds seconds for each target: pass at least 1" >&2; exit 2; }
[ $# -gt 0 ] || set -- "${TARGETS[@]}"
build "$@"
mkdir -p "$FOUND"
echo "each for $seconds s, beginning with $(find "$CORPUS" -type f | wc -l) inputs:"
failed=0
running=0
for target in "$@"; do
    if [ "$running" -ge "$(nproc)" ]; then
        wait -n || failed=1
        running=$((running - 1))
    fi
    one "$target" "$seconds" &
    running=$((running + 1))
done
while [ "$running" -gt 0 ]; do
    wait -n || failed=1
    running=$((running - 1))
done
exit "$failed"
