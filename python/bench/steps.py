"""What a step of a job costs: workers that pull, push and tick, with steps that are summed, in step, and without a bound.

Run it with the wheel and the release binaries of `make build`: `.venv/bin/python python/bench/steps.py`. A cluster of three
servers and eight shards on this machine, fsync; workers are threads of one process. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
import threading
import time

import numpy as np

os.environ.setdefault("EVERSHARD_BIN", str(pathlib.Path(__file__).resolve().parents[2] / "bin" / "evershard"))

import evershard as es  # noqa: E402

DIM, IDS = 64, 100_000
MODES = [("summed", 0, "sum"), ("in step", 0, "apart"), ("no bound", None, "apart")]


def run(cluster: es.Cluster, mode: str, staleness, aggregate: str, args, batch: int) -> None:
    """One job; prints a line."""
    name = f"{mode}-{batch}"
    table = cluster.create_table(name, dim=DIM, optimizer=es.Adagrad(lr=0.1))
    job = cluster.job(name, workers=args.workers, staleness=staleness, aggregate=aggregate)
    ticks: list[float] = []

    def work(rank: int) -> None:
        random = np.random.default_rng(rank)
        with job.worker(rank) as worker:
            for _ in range(args.steps):
                ids = random.integers(0, IDS, batch).astype(np.uint64)
                rows = worker.pull(table, ids)
                worker.push_async(table, ids, np.full_like(rows, 0.01))
                began = time.monotonic()
                worker.tick(b"")
                if rank == 0:
                    ticks.append((time.monotonic() - began) * 1e3)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(args.workers)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    p50, p99 = np.percentile(ticks, [50, 99])
    print(f"{batch:>6} {mode:>9} {args.steps / seconds:>8.1f} {p50:>12.1f} {p99:>12.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 4096])
    args = parser.parse_args()
    print(f"{'ids':>6} {'mode':>9} {'steps/s':>8} {'tick p50 ms':>12} {'tick p99 ms':>12}")
    with tempfile.TemporaryDirectory(prefix="evershard-bench-") as folder, es.local(3, 8, folder) as cluster:
        for batch in args.batch:
            for mode, staleness, aggregate in MODES:
                run(cluster, mode, staleness, aggregate, args, batch)


if __name__ == "__main__":
    main()
