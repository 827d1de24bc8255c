"""Figures of Evershard as a Python worker sees them: `make bench`.

A table of 1 M rows x 64 float32 under Adagrad, batches of 4096 ids drawn from Zipf 1.05 (repeats as they come, popularity
shuffled over the ids), normal gradients. Worker processes go through the installed wheel, over real sockets, to
`bin/evershard` processes on this machine: one node (R = 1) and three (R = 3), with durability fsync and memory.

Each figure is the median of several runs; rates count 4096 rows a batch. The gap is what a worker that pulls and pushes in a
loop sees when the leader of a shard is killed with SIGKILL: the longest time one of its operations took.

Nothing is asserted: figures depend on the machine, which docs/performance.md names with those quoted there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import evershard as es
from evershard.local import find_binary

DIM = 64
BATCH = 4096
ZIPF = 1.05
DISTINCT_BATCHES = 32
SEED = 20261201
WARM_UP_BATCHES = 8


def zipf_batches(rank: int, rows: int) -> np.ndarray:
    """int64[DISTINCT_BATCHES, BATCH]: Zipf ranks, mapped to ids by one shuffle that all workers share."""
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF
    cumulated = np.cumsum(weights)
    drawn = np.random.default_rng([SEED, rank]).random((DISTINCT_BATCHES, BATCH)) * cumulated[-1]
    ranks = np.minimum(np.searchsorted(cumulated, drawn), rows - 1)
    return np.random.default_rng(SEED).permutation(rows)[ranks]


def run_worker(endpoints: str, rank: int, rows: int, jobs, results, barrier) -> None:
    """One worker process: takes (case, seconds) until None, answers (batches, seconds it took, seconds of each)."""
    with es.connect(endpoints, timeout=60) as cluster:
        table = cluster.table("bench")
        batches = zipf_batches(rank, rows)
        gradients = np.random.default_rng([SEED, rank, 1]).normal(0, 0.01, (BATCH, DIM)).astype(np.float32)
        out = np.empty((BATCH, DIM), dtype=np.float32)

        def once(case: str, ids: np.ndarray) -> None:
            if case in ("pull", "step"):
                table.pull(ids, out=out)
            if case in ("push", "step"):
                table.push(ids, gradients)

        for case, seconds in iter(jobs.get, None):
            for ids in batches[:WARM_UP_BATCHES]:
                once(case, ids)
            barrier.wait()
            took, begin, at = [], time.perf_counter(), 0
            while (now := time.perf_counter()) - begin < seconds:
                once(case, batches[at % DISTINCT_BATCHES])
                took.append(time.perf_counter() - now)
                at += 1
            results.put((at, time.perf_counter() - begin, took))


def fill(cluster: es.Cluster, rows: int) -> es.Table:
    """Makes every row exist, as training long before would have."""
    table = cluster.create_table("bench", dim=DIM, optimizer=es.Adagrad(lr=0.01), initializer=es.Normal(std=0.01))
    for first in range(0, rows, 16384):
        ids = np.arange(first, min(rows, first + 16384))
        table.assign(ids, np.full((len(ids), DIM), 0.01, dtype=np.float32))
    return table


def measure(endpoints: str, args: argparse.Namespace, workers: int, report) -> None:
    """All cases for this many workers: medians of args.repeats runs."""
    context = multiprocessing.get_context("spawn")
    jobs = [context.SimpleQueue() for _ in range(workers)]
    results, barrier = context.SimpleQueue(), context.Barrier(workers)
    processes = [
        context.Process(target=run_worker, args=(endpoints, rank, args.rows, jobs[rank], results, barrier), daemon=True)
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        for case in args.cases:
            rates, latencies = [], []
            for _ in range(args.repeats):
                for queue in jobs:
                    queue.put((case, args.seconds))
                answers = [results.get() for _ in processes]
                rates.append(sum(batches * BATCH / seconds for batches, seconds, _ in answers))
                latencies += [value for _, _, took in answers for value in took]
            report(
                case,
                workers,
                rows_per_second=statistics.median(rates),
                p50_ms=1e3 * float(np.percentile(latencies, 50)),
                p99_ms=1e3 * float(np.percentile(latencies, 99)),
            )
    finally:
        for queue in jobs:
            queue.put(None)
        for process in processes:
            process.join(timeout=30)


def wait_caught_up(cluster) -> None:
    """Returns when every replica has applied what its leader has committed: the next kill is then the only failure."""
    ctl = pathlib.Path(find_binary()).with_name("evershardctl")
    command = [str(ctl), "--endpoints", ",".join(cluster.endpoints), "status", "--no-digest", "--output", "json"]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        shards = json.loads(done.stdout)["shards"] if done.returncode == 0 else []
        # Some entries are always under way while the worker pushes.
        behind = [
            shard["id"]
            for shard in shards
            if shard["leader"] is None
            or any((r["applied"] or -1) + 64 < max(o["committed"] or 0 for o in shard["replicas"]) for r in shard["replicas"])
        ]
        if shards and not behind:
            return
        time.sleep(0.2)
    raise RuntimeError("a killed node did not catch up within 60 s")


def measure_gaps(cluster, kills: int, rows: int) -> list:
    """Kills a shard's leader again and again under a worker; the longest operation around each kill, in milliseconds."""
    ended, problems = threading.Event(), []

    def work() -> None:
        try:
            with es.connect(",".join(cluster.endpoints), timeout=60) as client:
                table = client.table("bench")
                batches = zipf_batches(0, rows)
                gradients = np.zeros((BATCH, DIM), dtype=np.float32)
                at = 0
                while not ended.is_set():
                    since = time.perf_counter()
                    table.pull(batches[at % DISTINCT_BATCHES])
                    table.push(batches[at % DISTINCT_BATCHES], gradients)
                    took.append((since, time.perf_counter() - since))
                    at += 1
        except es.EvershardError as error:
            problems.append(error)

    took: list = []
    worker = threading.Thread(target=work)
    worker.start()
    gaps = []
    try:
        for _ in range(kills):
            wait_caught_up(cluster)
            time.sleep(1.0 + random.random())
            leaders = [shard["leader"] for shard in cluster.routing()["shards"] if shard["leader"]]
            node = random.choice(leaders)
            killed = time.perf_counter()
            cluster.kill_node(node)
            time.sleep(2.5)
            if problems:
                raise problems[0]
            gaps.append(1e3 * max(length for begin, length in list(took) if begin + length >= killed))
            cluster.start_node(node)
            wait_caught_up(cluster)
            took.clear()
    finally:
        ended.set()
        worker.join()
    return gaps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--replicas", type=numbers, default=[1, 3], help="clusters of this many nodes")
    parser.add_argument("--durability", type=words, default=["fsync", "memory"])
    parser.add_argument("--workers", type=numbers, default=[1, 4], help="worker processes")
    parser.add_argument("--cases", type=words, default=["pull", "push", "step"])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one run")
    parser.add_argument("--repeats", type=int, default=3, help="runs a figure; the median is shown")
    parser.add_argument("--kills", type=int, default=12, help="leaders killed for the gap, at R = 3 and fsync; 0: none")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    args = parser.parse_args()

    figures = []
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}; {args.rows} rows x {DIM}, {args.shards} shards")
    print(f"{'R':>2} {'durability':<10} {'case':<5} {'workers':>7} {'rows/s':>12} {'p50 ms':>8} {'p99 ms':>8}")
    for replicas in args.replicas:
        for durability in args.durability:

            def report(case: str, workers: int, **values: float) -> None:
                figures.append({"replicas": replicas, "durability": durability, "case": case, "workers": workers, **values})
                rate, p50, p99 = values["rows_per_second"], values["p50_ms"], values["p99_ms"]
                print(f"{replicas:>2} {durability:<10} {case:<5} {workers:>7} {rate:>12,.0f} {p50:>8.2f} {p99:>8.2f}", flush=True)

            with tempfile.TemporaryDirectory(prefix="evershard-bench-") as directory:
                with es.local(nodes=replicas, shards=args.shards, durability=durability, dir=directory) as cluster:
                    fill(cluster, args.rows)
                    time.sleep(3)  # The flush of what was just written ends.
                    for workers in args.workers:
                        measure(",".join(cluster.endpoints), args, workers, report)
                    if args.kills and replicas >= 3 and durability == "fsync":
                        gaps = measure_gaps(cluster, args.kills, args.rows)
                        p50, longest = statistics.median(gaps), max(gaps)
                        figures.append({"case": "gap", "replicas": replicas, "durability": durability, "gaps_ms": gaps})
                        print(f"{replicas:>2} {durability:<10} gap of a worker over {len(gaps)} kills: p50 {p50:.0f} ms, max {longest:.0f} ms")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
