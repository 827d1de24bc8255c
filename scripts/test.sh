#!/usr/bin/env bash
# Everything that must hold: Rust tests (with crash points compiled in), doc tests, Python tests against the release binaries.
source "$(dirname "$0")/common.sh"

scripts/setup.sh test
scripts/build.sh test
use_rocksdb

if first_time debug; then
    say "first build of the tests on this machine: 12-15 minutes on 2 cores"
fi
say "Rust tests (cluster tests start real processes, one cluster at a time)"
# The Python module cannot be linked into a test binary: it takes its symbols from the interpreter.
cargo nextest run --locked --workspace --exclude evershard-python --features evershard/failpoints

say "doc tests"
cargo test --locked --doc --workspace --exclude evershard-python --features evershard/failpoints --quiet

if compgen -G 'python/tests/test_*.py' > /dev/null; then
    say "Python tests"
    EVERSHARD_BIN="$PWD/bin/evershard" "$VENV/bin/python" -m pytest -q python/tests
fi
