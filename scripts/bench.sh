#!/usr/bin/env bash
# Figures on this machine; nothing is asserted. See docs/performance.md for what they are compared with.
source "$(dirname "$0")/common.sh"

scripts/setup.sh bench
scripts/build.sh bench
exec "$VENV/bin/python" python/bench/workload.py "$@"
