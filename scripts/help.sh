#!/usr/bin/env bash
# Prints what `make` can do here, and where it puts things.
set -euo pipefail
cat <<TEXT
Evershard: a parameter server for distributed ML training that does not lose anything.

  make demo     train a recommender on a 3-node cluster while leaders are killed, and prove that nothing was lost
  make test     everything that must hold: unit, cluster, crash and Python tests

  make build    release binaries in bin/, the Python wheel installed in .venv
  make quick    the tests that need no cluster (a minute or two)
  make lint     formatting and clippy, warnings are errors
  make bench    pull, push and step with 1 and 4 workers, R = 1 and 3, fsync and memory; then the next one
  make bench-storage  throughput against memory budget, restart time against table size, snapshots, memory a row, bytes written
  make chaos    200 kills (EVERSHARD_KILLS=n), 30 power cuts (as root), damage of every file, full and hung disks, crash points
  make fuzz     every decoder against damaged bytes for MINUTES=10 minutes (ONLY=name for some of them)
  make clean    remove bin/, .venv and what the demo left
  make clean-cache  also remove the build cache (RocksDB is then built again: 12-18 minutes on 2 cores)

Each installs what it misses (Debian, Ubuntu and the like; others are told what to install).
The first run builds RocksDB and all dependencies: 30-60 minutes on 2 cores. After that 'make demo' takes 2 minutes,
'make test' 10.
Builds go to \${EVERSHARD_CACHE:-~/.cache/evershard}, shared by every checkout on this machine.

After 'make build':
  bin/evershard dev --nodes 3 --shards 8 --dir /tmp/es    a whole cluster on this machine
  bin/evershardctl status                                 what it looks like
  .venv/bin/python examples/quickstart.py                 a cluster of its own, from Python, with a kill -9 in the middle
TEXT
