#!/usr/bin/env bash
# Removes what builds left in the checkout; with --cache also the build cache of this machine.
source "$(dirname "$0")/common.sh"

rm -rf bin "$VENV" demo/cluster demo/data demo/report.json demo/report.png
find . -name __pycache__ -not -path './.git/*' -type d -prune -exec rm -rf {} +
if [ "${1:-}" = --cache ]; then
    say "removing $EVERSHARD_CACHE"
    rm -rf "$EVERSHARD_CACHE"
else
    say "the build cache stays in $EVERSHARD_CACHE ('make clean-cache' removes it)"
fi
