#!/usr/bin/env bash
# Formatting and clippy over everything, warnings are errors. cargo-deny too, where it is installed.
source "$(dirname "$0")/common.sh"

scripts/setup.sh build
use_rocksdb
cargo fmt --all --check
cargo clippy --locked --workspace --all-targets --features evershard/failpoints -- -D warnings
if command -v cargo-deny > /dev/null; then
    cargo deny --offline check bans licenses sources
else
    say "cargo-deny is not installed: deny.toml was not checked (cargo install cargo-deny --locked)"
fi
