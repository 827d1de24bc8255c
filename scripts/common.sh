# Sourced by the other scripts: where builds go, and how we talk. Changes to the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EVERSHARD_CACHE="${EVERSHARD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/evershard}"
export EVERSHARD_CACHE
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$EVERSHARD_CACHE/target}"
# The wheel is for the system's Python, which has python3-torch; a Python earlier on PATH may not.
SYSTEM_PYTHON="${PYTHON:-/usr/bin/python3}"
VENV=".venv"

say() { printf '\033[1mevershard:\033[0m %s\n' "$*" >&2; }
fail() { printf 'evershard: %s\n' "$*" >&2; exit 1; }

# RocksDB is built once per machine; cargo only links it. Call before the first cargo command.
use_rocksdb() {
    ROCKSDB_LIB_DIR="$(scripts/rocksdb.sh)"
    export ROCKSDB_LIB_DIR ROCKSDB_STATIC=1
}

# True when the profile in this folder (release, debug) was never built to its end on this machine.
first_time() { [ ! -x "$CARGO_TARGET_DIR/$1/evershard" ]; }
