#!/bin/bash
# Changes the code of planning, commits and retention, one change at a time, and runs the tests of
# its crate. Prints how many viable changes the tests have noticed. Fails below 95 %.
#
#     tests/mutants/run.sh            # all of them: hours
#     tests/mutants/run.sh 0/12       # every twelfth
set -euo pipefail
cd "$(dirname "$0")/../.."

shard=${1:-0/1}
out=target/mutants
least=95
tests/cargo_tool.sh cargo-mutants

# The exit status of cargo-mutants tells of missed changes; the share below decides.
run() {
    local name=$1
    shift
    mkdir -p "$out/$name"
    nice -n 19 cargo mutants --no-shuffle --jobs 1 --timeout 300 --colors never --output "$out/$name" \
        --shard "$shard" --sharding round-robin "$@" || [ $? -lt 4 ]
}
count() { cat "$out"/*/mutants.out/"$1".txt | wc -l; }

rm -rf "$out"
run reshard --package stepwell-reshard -- --lib
run manager --package stepwell-manager --file 'manager/src/commit/*.rs' --file 'manager/src/retention/*.rs'

# A change that ends no more is noticed, by its timeout.
caught=$(($(count caught) + $(count timeout)))
viable=$((caught + $(count missed)))
cat "$out"/*/mutants.out/missed.txt
[ "$viable" -gt 0 ] || { echo "mutants: no change could be tried"; exit 1; }
echo "mutants: $caught of $viable viable changes caught ($((100 * caught / viable)) %, at least $least %)"
[ $((100 * caught)) -ge $((least * viable)) ]
