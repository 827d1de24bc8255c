#!/usr/bin/env bash
# The fuzz tests of every format (docs/formats.md) for MINUTES minutes (default 10), with a fresh seed each round.
# ONLY=part-of-a-name runs some of them.
source "$(dirname "$0")/common.sh"

minutes="${MINUTES:-10}" # also when it is empty
[[ "$minutes" =~ ^[0-9]+$ ]] || fail "MINUTES is a whole number of minutes, not '$minutes'"
only="${ONLY:-}"
[[ "$only" =~ ^[a-z0-9_]*$ ]] || fail "ONLY is a part of a test's name, not '$only'"

scripts/setup.sh test
use_rocksdb
cargo_args=(--locked --workspace --exclude evershard-python --features evershard/failpoints --lib --test log)
filter="test(/fuzz_/) and test(/$only/)"
export PROPTEST_CASES="${PROPTEST_CASES:-20000}"
# A failure is printed with its seed; no files are left in the checkout.
export PROPTEST_DISABLE_FAILURE_PERSISTENCE=true
say "fuzz tests for $minutes minutes, $PROPTEST_CASES cases a round"
cargo nextest run "${cargo_args[@]}" --no-run
deadline=$(($(date +%s) + minutes * 60))
rounds=0
while [ "$rounds" -eq 0 ] || [ "$(date +%s)" -lt "$deadline" ]; do
    seed="${PROPTEST_RNG_SEED:-$(od -An -N7 -tu8 /dev/urandom | tr -d ' ')}"
    if ! PROPTEST_RNG_SEED="$seed" cargo nextest run "${cargo_args[@]}" --profile fuzz -E "$filter"; then
        printf 'evershard: to see the failure again (the test above names its smallest input):\n' >&2
        printf '  PROPTEST_RNG_SEED=%s PROPTEST_CASES=%s MINUTES=0 ONLY=%s scripts/fuzz.sh\n' "$seed" "$PROPTEST_CASES" "${only:-fuzz_}" >&2
        exit 1
    fi
    rounds=$((rounds + 1))
done
say "$rounds rounds of $PROPTEST_CASES cases a test: no decoder failed"
