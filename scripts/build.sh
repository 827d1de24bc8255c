#!/usr/bin/env bash
# Release binaries to bin/, the Python wheel into .venv.
source "$(dirname "$0")/common.sh"

scripts/setup.sh "${1:-build}"
if first_time release; then
    say "first build on this machine: RocksDB (12-18 minutes on 2 cores, once) and all dependencies (10-15 minutes); later builds take seconds"
fi
use_rocksdb

say "building the binaries (release)"
cargo build --release --locked -p evershard -p evershardctl -p evershard-bench
mkdir -p bin
for binary in evershard evershardctl evershard-bench; do
    # A running cluster keeps the file it started from: replace, never overwrite.
    if ! cmp -s "$CARGO_TARGET_DIR/release/$binary" "bin/$binary"; then
        cp "$CARGO_TARGET_DIR/release/$binary" "bin/.$binary.new"
        mv "bin/.$binary.new" "bin/$binary"
    fi
done

say "building the Python wheel"
wheels="$CARGO_TARGET_DIR/wheels/$(pwd | cksum | cut -d' ' -f1)"
mkdir -p "$wheels"
rm -f "$wheels"/*.whl
"$VENV/bin/maturin" build --release --locked --quiet --interpreter "$VENV/bin/python" --manifest-path python/Cargo.toml -o "$wheels"
wheel="$(ls "$wheels"/*.whl)"
digest="$(sha256sum "$wheel" | cut -d' ' -f1)"
if [ "$(cat "$VENV/.evershard-wheel" 2> /dev/null || true)" != "$digest" ]; then
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "$wheel"
    echo "$digest" > "$VENV/.evershard-wheel"
fi
say "bin/evershard, bin/evershardctl, bin/evershard-bench; the wheel is in $VENV"
