#!/usr/bin/env bash
# Builds librocksdb.a once per machine into a cache outside the checkout and prints the folder that holds it.
#
# RocksDB is 343 C++ files (12-18 minutes on two cores). Cargo would build it again for every clean target
# folder; with ROCKSDB_LIB_DIR pointing here it is only linked. The folder's name carries the version and the
# flags, so another version or another instruction set never picks up a stale archive.
set -euo pipefail

ROCKSDB_SYS_VERSION="0.19.0"      # librocksdb-sys, as pinned by Cargo.lock: RocksDB 11.8.1
TARGET_CPU="haswell"              # as in .cargo/config.toml
CACHE="${EVERSHARD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/evershard}"
COMPILER="$(${CXX:-g++} -dumpfullversion 2>/dev/null || echo none)"
DIR="$CACHE/rocksdb-$ROCKSDB_SYS_VERSION-lz4-O3-$TARGET_CPU-$(uname -m)-cxx$COMPILER"

if [ -f "$DIR/librocksdb.a" ]; then
    echo "$DIR"
    exit 0
fi

mkdir -p "$CACHE"
exec 9>"$CACHE/rocksdb.lock"
if ! flock -n 9; then
    echo "evershard: another process builds RocksDB already; waiting for it" >&2
    flock 9
fi
if [ -f "$DIR/librocksdb.a" ]; then
    echo "$DIR"
    exit 0
fi

echo "evershard: building RocksDB once for this machine into $DIR (12-18 minutes on 2 cores)" >&2
WORK="$CACHE/rocksdb-build"
rm -rf "$WORK/package"
mkdir -p "$WORK/package/src"
cat > "$WORK/package/Cargo.toml" <<TOML
[package]
name = "rocksdb-cache"
version = "0.0.0"
edition = "2021"

[workspace]

[dependencies]
librocksdb-sys = { version = "=$ROCKSDB_SYS_VERSION", default-features = false, features = ["lz4", "bindgen-runtime"] }

[profile.dev.package.librocksdb-sys]
opt-level = 3
debug = false
TOML
: > "$WORK/package/src/lib.rs"

started=$(date +%s)
unset ROCKSDB_LIB_DIR ROCKSDB_STATIC
(
    cd "$WORK/package"
    CARGO_TARGET_DIR="$WORK/target" CARGO_ENCODED_RUSTFLAGS= RUSTFLAGS="-C target-cpu=$TARGET_CPU" \
        env -u CARGO_ENCODED_RUSTFLAGS cargo build --quiet
) >&2 &
builder=$!
while kill -0 "$builder" 2>/dev/null; do
    sleep 5
    # The folder appears only after the downloads, and temporary files vanish under `find`: neither ends the build.
    objects=$({ find "$WORK/target" -path '*librocksdb-sys*/out/*' -name '*.o' 2>/dev/null || true; } | wc -l)
    [ $(( ($(date +%s) - started) % 60 )) -lt 5 ] &&
        echo "evershard: RocksDB: $objects of about 345 files, $(( $(date +%s) - started )) s" >&2
done
wait "$builder"

archive=$(find "$WORK/target" -path '*librocksdb-sys*/out/librocksdb.a' | head -1)
[ -n "$archive" ] || { echo "evershard: the build left no librocksdb.a" >&2; exit 1; }
mkdir -p "$DIR"
cp "$archive" "$DIR/.librocksdb.a.part"
mv "$DIR/.librocksdb.a.part" "$DIR/librocksdb.a"
rm -rf "$WORK"
echo "evershard: RocksDB built in $(( $(date +%s) - started )) s" >&2
echo "$DIR"
