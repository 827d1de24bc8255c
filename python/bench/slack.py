"""What a worker sees of a killed leader, by how much slack it has.

Four workers of one job train steps of a fixed time (they sleep instead of computing), each a pull and a push to all eight
shards, and a tick. In the middle of each run the node that leads the most shards is killed with SIGKILL. An iteration is the time from
one tick's return to the next one's. The same staleness is used in two ways:

- gate: all of it lets workers be ahead of each other (`job(staleness=s)`); pulls, pushes and ticks are waited for in each step;
- flight: one step of it does that; the rest is halved: pulls that far ahead (`Prefetch(depth=)`), and pushes and ticks
  that far behind (`worker(steps_in_flight=)`).

Run it with the wheel and the release binaries of `make build`: `.venv/bin/python python/bench/slack.py`. Three servers on this
machine, fsync; workers are threads of one process, with connections of their own. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import tempfile
import threading
import time
from typing import NamedTuple, Optional

import numpy as np

os.environ.setdefault("EVERSHARD_BIN", str(pathlib.Path(__file__).resolve().parents[2] / "bin" / "evershard"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import evershard as es  # noqa: E402
from evershard.torch import Embedding, EmbeddingGroup, Prefetch  # noqa: E402
from workload import wait_caught_up  # noqa: E402

WORKERS, SHARDS, DIM, IDS, BATCH = 4, 8, 16, 100_000, 256
#: The first steps connect, and make rows.
WARM_UP = 10


class Slack(NamedTuple):
    """How a staleness is used; None for any number of steps."""

    gate: Optional[int]
    in_flight: int
    ahead: int

    @classmethod
    def halved(cls, staleness: Optional[int], of_any: int) -> "Slack":
        """A gate of 1, and the rest for flight; without a bound, as much as is told."""
        if staleness is None:
            return cls(None, of_any, of_any)
        return cls(1, (staleness - 1) // 2, staleness - 1 - (staleness - 1) // 2)


class Run(NamedTuple):
    """Iterations in milliseconds, and the longest time that a pull took."""

    iterations: np.ndarray
    gap_ms: float


def run(cluster: es.LocalCluster, name: str, slack: Slack, args: argparse.Namespace) -> Run:
    """One job with one kill; the node is back when this returns."""
    ticks: list[list[float]] = [[] for _ in range(WORKERS)]
    gaps, problems = [], []
    together = threading.Barrier(WORKERS)

    def work(rank: int) -> None:
        random = np.random.default_rng(rank)
        with es.connect(",".join(cluster.endpoints), timeout=60) as client:
            table = client.create_table(name, dim=DIM, optimizer=es.Adagrad(lr=0.1))
            group = EmbeddingGroup({"row": Embedding(table=table)})
            job = client.job(name, workers=WORKERS, staleness=slack.gate, lease=30.0)
            with job.worker(rank, steps_in_flight=slack.in_flight) as worker:
                group.worker = worker
                batches = ({"row": random.integers(0, IDS, BATCH)} for _ in range(args.steps))
                together.wait()
                with Prefetch(group, batches, depth=slack.ahead) as ready:
                    for batch in ready:
                        rows = group(batch)["row"]
                        time.sleep(args.step_ms / 1e3)
                        rows.sum().backward()
                        worker.tick()
                        ticks[rank].append(time.monotonic())
                        if len(ticks[rank]) == WARM_UP:
                            client.stats(reset_gap=True)
            gaps.append(client.stats()["longest_gap_us"] / 1e3)

    def watched(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            problems.append(error)
            together.abort()

    threads = [threading.Thread(target=watched, args=(rank,), daemon=True) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    while len(ticks[0]) < args.steps // 2 and not problems:
        time.sleep(0.01)
    led = collections.Counter(shard["leader"] for shard in cluster.routing()["shards"])
    node = led.most_common(1)[0][0]
    cluster.kill_node(node)
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    cluster.start_node(node)
    wait_caught_up(cluster)
    return Run(np.concatenate([np.diff(of[WARM_UP:]) for of in ticks]) * 1e3, max(gaps))


def main() -> None:
    """Prints a line for each staleness and way of using it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: None if text == "any" else int(text)  # noqa: E731
    parser.add_argument("--staleness", type=words, nargs="+", default=[0, 2, 5, 10, 20, 30, None], metavar="N|any")
    parser.add_argument("--ways", nargs="+", default=["gate", "flight"], choices=["gate", "flight"])
    parser.add_argument("--step-ms", type=float, default=50.0, help="what a step computes")
    parser.add_argument("--steps", type=int, default=100, help="of each worker in a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs, each with one kill, for each line")
    parser.add_argument("--of-any", type=int, default=20, help="steps in flight and batches ahead where there is no bound")
    args = parser.parse_args()
    print("staleness     way  gate  in flight  ahead  pull max ms  p50 ms  p99 ms  longest of each run, ms", flush=True)
    with tempfile.TemporaryDirectory(prefix="evershard-bench-") as folder, es.local(3, SHARDS, folder) as cluster:
        for staleness in args.staleness:
            for way in args.ways:
                if staleness == 0 and way == "flight":
                    continue  # In step nothing may be ahead of anything.
                slack = Slack(staleness, 0, 0) if way == "gate" else Slack.halved(staleness, args.of_any)
                runs = [run(cluster, f"{way}-{staleness}-{number}", slack, args) for number in range(args.repeats)]
                p50, p99 = np.percentile(np.concatenate([one.iterations for one in runs]), [50, 99])
                longest = " ".join(f"{one.iterations.max():.0f}" for one in runs)
                name, gate = ("any" if of is None else str(of) for of in (staleness, slack.gate))
                print(
                    f"{name:>9}{way:>8}{gate:>6}{slack.in_flight:>11}{slack.ahead:>7}{max(one.gap_ms for one in runs):>13.0f}"
                    f"{p50:>8.0f}{p99:>8.0f}  {longest}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
