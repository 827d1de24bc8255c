#!/usr/bin/env bash
# The fault tests for longer: EVERSHARD_KILLS kills (default 200) of shard leaders under pushing clients, then
# EVERSHARD_TEST_POWER_CUTS power cuts (default 30; only root can), then damage to every kind of file, the crash points and the
# all-nodes kill, as often as EVERSHARD_KILLS_ROUNDS says (default 3).
source "$(dirname "$0")/common.sh"

scripts/setup.sh test
use_rocksdb
export EVERSHARD_KILLS="${EVERSHARD_KILLS:-200}" EVERSHARD_TEST_POWER_CUTS="${EVERSHARD_TEST_POWER_CUTS:-30}"
# With the same features as `make test`, so that nothing is built twice.
run() {
    cargo nextest run --locked --profile chaos --workspace --exclude evershard-python --features evershard/failpoints "$@"
}
say "$EVERSHARD_KILLS kills under load; about $((EVERSHARD_KILLS * 3 / 60 + 1)) minutes"
run --test kill_leader
say "$EVERSHARD_TEST_POWER_CUTS power cuts on one node, and as many on all; about $((EVERSHARD_TEST_POWER_CUTS / 6 + 1)) minutes"
# Its output says when it was skipped, and why.
run --test power_cut --success-output final
for round in $(seq "${EVERSHARD_KILLS_ROUNDS:-3}"); do
    say "damage, crash points and the all-nodes kill, round $round"
    run --test damage --test failpoints --test all_killed --test snapshot_catch_up --test reply_dropped
    # As root also on file systems that are full or frozen.
    EVERSHARD_TEST_FREEZE=1 run --test disk_full --test disk_faults
done
