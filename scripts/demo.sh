#!/usr/bin/env bash
# The main job: several PyTorch workers train a recommender on a 3-node cluster while leaders are killed.
source "$(dirname "$0")/common.sh"

scripts/setup.sh demo
scripts/build.sh demo
say "the demo (under 5 minutes; its report goes to demo/report.json and demo/report.png)"
exec "$VENV/bin/python" demo/run.py "$@"
