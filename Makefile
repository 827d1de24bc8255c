# Evershard, by two commands: `make demo` and `make test`. Everything else is in scripts/, one short script a target.
#
# Nothing is installed outside the system's package manager, .venv and one cache folder ($EVERSHARD_CACHE, default
# ~/.cache/evershard), which serves every checkout on this machine; but `make test` adds cargo-nextest to cargo's own
# tools where it is missing.

SHELL := /usr/bin/env bash
.DEFAULT_GOAL := help
.PHONY: help setup build test quick demo lint bench bench-storage chaos fuzz clean clean-cache

help:
	@scripts/help.sh

setup:
	@scripts/setup.sh test demo

build:
	@scripts/build.sh

test:
	@scripts/test.sh

quick:
	@scripts/quick.sh

demo:
	@scripts/demo.sh

lint:
	@scripts/lint.sh

bench:
	@scripts/bench.sh
	@scripts/bench_storage.sh

bench-storage:
	@scripts/bench_storage.sh

chaos:
	@scripts/chaos.sh

fuzz:
	@MINUTES="$(MINUTES)" ONLY="$(ONLY)" scripts/fuzz.sh

clean:
	@scripts/clean.sh

clean-cache:
	@scripts/clean.sh --cache
