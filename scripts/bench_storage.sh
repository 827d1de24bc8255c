#!/usr/bin/env bash
# Figures of the durable core on this machine: throughput against memory budget, restart time, memory a row, bytes written.
source "$(dirname "$0")/common.sh"

scripts/setup.sh bench
scripts/build.sh bench
exec python3 python/bench/storage.py "$@"
