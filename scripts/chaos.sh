#!/usr/bin/env bash
# The kill tests for longer: EVERSHARD_KILLS kills (default 200) of shard leaders under pushing clients, then the
# crash points and the all-nodes kill, as often as EVERSHARD_KILLS_ROUNDS says (default 3).
source "$(dirname "$0")/common.sh"

scripts/setup.sh test
use_rocksdb
export EVERSHARD_KILLS="${EVERSHARD_KILLS:-200}"
say "$EVERSHARD_KILLS kills under load; about $((EVERSHARD_KILLS * 3 / 60 + 1)) minutes"
cargo nextest run --locked --profile chaos --features failpoints -p evershard --test kill_leader
for round in $(seq "${EVERSHARD_KILLS_ROUNDS:-3}"); do
    say "crash points and the all-nodes kill, round $round"
    cargo nextest run --locked --profile chaos --features failpoints -p evershard \
        --test failpoints --test all_killed --test snapshot_catch_up --test reply_dropped
    # As root also on file systems that are full or frozen.
    EVERSHARD_TEST_FREEZE=1 cargo nextest run --locked --profile chaos --features failpoints -p evershard \
        --test disk_full --test disk_faults
done
