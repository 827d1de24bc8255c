#!/usr/bin/env bash
# The tests that start no cluster: what you run between two edits.
source "$(dirname "$0")/common.sh"

scripts/setup.sh test
use_rocksdb
cargo nextest run --locked --workspace --exclude evershard-python --features evershard/failpoints \
    -E 'not (package(evershard) and kind(test)) or binary(/^(tidy|formats)$/)' "$@"
