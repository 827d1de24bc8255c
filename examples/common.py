"""What the examples share: a cluster, worker processes, figures.

Not here: models.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import queue
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Optional

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
if (ROOT / "bin" / "evershard").exists():
    os.environ.setdefault("EVERSHARD_BIN", str(ROOT / "bin" / "evershard"))
# The data of the demo, which some examples train on as well.
sys.path.insert(0, str(ROOT / "demo"))

import evershard as es  # noqa: E402


def arguments(document: str) -> argparse.ArgumentParser:
    """A parser that knows which cluster."""
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument("--endpoints", help="an existing cluster (http://host:port,...); by default one is started here")
    parser.add_argument("--nodes", type=int, default=3, help="servers of the cluster that is started here")
    return parser


@contextlib.contextmanager
def cluster_of(options: argparse.Namespace) -> Iterator[es.Cluster]:
    """The cluster that was asked for; one that was started here ends with the block."""
    if options.endpoints:
        with es.connect(options.endpoints) as cluster:
            yield cluster
    else:
        print(f"Starting {options.nodes} servers on this machine", flush=True)
        with es.local(options.nodes, 8) as cluster:
            yield cluster


def run_name(prefix: str) -> str:
    """A name for the tables and the job of this run: on a cluster that lives on, the next run begins anew."""
    return f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: how often a positive scores above a negative (ties count half)."""
    _, rank_of, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    positive = labels > 0.5
    many, few = positive.sum(), (~positive).sum()
    if many == 0 or few == 0:
        return float("nan")
    return float((ranks[rank_of.reshape(-1)][positive].sum() - many * (many + 1) / 2) / (many * few))


class Report:
    """Figures as a table, a line at a time: columns are (heading, format)."""

    def __init__(self, **columns: str):
        self._columns = columns
        self._widths = {name: max(len(self._heading(name)), 9) for name in columns}
        print("  ".join(self._heading(name).rjust(width) for name, width in self._widths.items()), flush=True)

    @staticmethod
    def _heading(name: str) -> str:
        return name.replace("_per_s", "/s").replace("_", " ")

    def line(self, **figures: Any) -> None:
        """One line; a figure of None is a dash."""
        cells = []
        for name, form in self._columns.items():
            value = figures[name]
            cells.append(("-" if value is None else format(value, form)).rjust(self._widths[name]))
        print("  ".join(cells), flush=True)


class Workers:
    """Processes that run ``target(rank, say, stop, *arguments)``, where ``say(message)`` comes out here.

    They are spawned, not forked: each imports what it needs, and connects by itself.
    """

    def __init__(self, count: int, target: Callable[..., None], *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self._queue = context.Queue()
        #: Set, it asks the workers to end after their step.
        self.stop = context.Event()
        self._processes = [
            context.Process(target=target, args=(rank, self._queue.put, self.stop, *arguments), daemon=True)
            for rank in range(count)
        ]
        for process in self._processes:
            process.start()

    def running(self) -> bool:
        """Whether any still runs.

        Raises:
            SystemExit: one failed; what it said is on stderr.
        """
        failed = [rank for rank, process in enumerate(self._processes) if process.exitcode not in (None, 0)]
        if failed:
            raise SystemExit(f"worker {failed[0]} ended with code {self._processes[failed[0]].exitcode}")
        return any(process.exitcode is None for process in self._processes)

    def message(self, seconds: float) -> Optional[Any]:
        """The next message; None when there is none in this time."""
        try:
            return self._queue.get(timeout=seconds)
        except queue.Empty:
            return None

    def end(self) -> None:
        """Asks them to end, and waits for them."""
        self.stop.set()
        for process in self._processes:
            process.join()
        self.running()
