"""What the examples share: a cluster, worker processes, figures.

Not here: models.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
if (ROOT / "bin" / "evershard").exists():
    os.environ.setdefault("EVERSHARD_BIN", str(ROOT / "bin" / "evershard"))
# The data of the demo, which some examples train on as well.
sys.path.insert(0, str(ROOT / "demo"))

import evershard as es  # noqa: E402
from data import auc  # noqa: E402, F401 - examples take it from here

#: A worker that is not heard of for this long is dead, and the others go on without it.
LEASE_S = 30.0
SAY_EVERY_S = 0.5
END_S = 10.0
LOOK_S = 0.1


# --- the command line -----------------------------------------------------------------------------------------------


def arguments(document: str, *, workers: int = 2, staleness: Optional[int] = 0) -> argparse.ArgumentParser:
    """A parser that knows what all examples take; `document` is the example's own head, which `--help` shows."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoints", help="an existing cluster (http://host:port,...); by default one is started here")
    parser.add_argument("--nodes", type=int, default=3, help="servers of the cluster that is started here (default 3)")
    parser.add_argument("--workers", type=int, default=workers, help=f"worker processes (default {workers})")
    parser.add_argument(
        "--staleness",
        type=lambda text: None if text == "any" else int(text),
        default=staleness,
        metavar="N|any",
        help="steps that a worker may be ahead of the slowest; 0: all in step, their gradients summed; any: nobody waits "
        f"(default {staleness})",
    )
    parser.add_argument("--steps", type=int, help="steps of each worker")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between lines (default 5)")
    parser.add_argument("--kill", action="store_true", help="kill -9 the busiest server half-way (of a cluster started here)")
    parser.add_argument("--name", help="of the tables and the job; a name used before goes on with its model")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, checked as far as they are common; without a name they get one that is new."""
    options = parser.parse_args()
    if options.kill and options.endpoints:
        parser.error("--kill is for a cluster that is started here")
    if options.kill and options.nodes < 3:
        parser.error("--kill needs 3 nodes: of fewer, none can be missed")
    if options.workers < 1 or (options.staleness or 0) < 0 or (options.steps or 0) < 0:
        parser.error("--workers is 1 or more, --staleness and --steps are 0 or more")
    if options.name is None:
        options.name = f"{pathlib.Path(parser.prog).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return options


def run(main: Callable[[], None]) -> None:
    """Runs an example. What the cluster refuses, and Ctrl-C, end it with one line in place of a traceback."""
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except es.EvershardError as error:
        sys.exit(f"{type(error).__name__}: {error}")


# --- the cluster ----------------------------------------------------------------------------------------------------


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


def is_new(cluster: es.Cluster, name: str) -> bool:
    """Whether no job of that name ever ran: then somebody has to publish initial values."""
    return all(job["name"] != name for job in cluster.jobs())


def kill_busiest(cluster: es.LocalCluster) -> str:
    """Ends the server that leads the most shards, as a crash would; says what it did."""
    led = collections.Counter(shard["leader"] for shard in cluster.routing()["shards"])
    node, shards = led.most_common(1)[0]
    cluster.kill_node(node)
    return f"kill -9 of node {node}, which led {shards} of {sum(led.values())} shards"


# --- workers --------------------------------------------------------------------------------------------------------


class Flag:
    """Set once, seen by all processes that were given it. Nobody locks it."""

    def __init__(self, context: Any):
        self._value = context.RawValue("b", 0)

    def set(self) -> None:
        """From now on it is set."""
        self._value.value = 1

    def is_set(self) -> bool:
        """Whether it is."""
        return self._value.value == 1


class Workers:
    """Processes that run ``target(rank, say, stop, *arguments)``, where ``say(message)`` comes out here.

    They are spawned, not forked: each imports what it needs, and connects by itself. The ``with`` block waits for them; when it
    ends with an exception they are asked to end their step, and not waited for for long. Ctrl-C is for this process alone.
    """

    def __init__(self, count: int, target: Callable[..., None], *arguments: Any):
        self._context = multiprocessing.get_context("spawn")
        #: Set, it asks the workers to end after their step.
        self.stop = Flag(self._context)
        self._target = target
        self._arguments = arguments
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._processes = [self._start(rank) for rank in range(count)]

    def running(self) -> bool:
        """Whether any still runs.

        Raises:
            SystemExit: one failed; what it said is on stderr.
        """
        for rank, process in enumerate(self._processes):
            if process.exitcode not in (None, 0):
                raise SystemExit(f"worker {rank} ended with code {process.exitcode}")
        return any(process.exitcode is None for process in self._processes)

    def message(self, seconds: float) -> Optional[Any]:
        """The next message; None when there is none in this time."""
        if not self._pipes:
            time.sleep(seconds)
        for pipe in multiprocessing.connection.wait(self._pipes, seconds):
            try:
                return pipe.recv()
            except (EOFError, OSError):  # It ended, and all it said was heard.
                self._pipes.remove(pipe)
        return None

    def replace(self, rank: int) -> str:
        """Kills a worker as a crash would, and starts another with its rank; says what it did."""
        before = self._processes[rank]
        before.kill()
        before.join()
        self._processes[rank] = self._start(rank)
        return f"kill -9 of worker {rank}; process {self._processes[rank].pid} takes its rank and goes on at its cursor"

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self.stop.set()
        for process in self._processes:
            process.join(None if kind is None else END_S)
            if process.exitcode is None:
                process.kill()
                process.join()

    def _start(self, rank: int) -> multiprocessing.process.BaseProcess:
        # A pipe for each: what they share could be left locked by one that is killed.
        pipe, far_end = self._context.Pipe(duplex=False)
        self._pipes.append(pipe)
        arguments = (self._target, rank, far_end.send, self.stop, *self._arguments)
        process = self._context.Process(target=_work, args=arguments, daemon=True)
        # What is ignored when a process starts is ignored by it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        far_end.close()
        return process


def _work(target: Callable[..., None], rank: int, *arguments: Any) -> None:
    try:
        target(rank, *arguments)
    except es.EvershardError as error:
        sys.exit(f"worker {rank}: {type(error).__name__}: {error}")


def shuffled(begin: int, end: int, size: int, batch: int, rank: int, workers: int) -> Iterator[tuple[int, np.ndarray]]:
    """A worker's steps and the positions of their examples: all workers together see each of `size` once an epoch.

    A step's positions depend on nothing but its number and the rank, so a replacement that begins at a cursor sees what its
    predecessor would have seen.
    """
    in_epoch = size // (batch * workers)
    order, drawn = np.empty(0, int), None
    for step in range(begin, end):
        epoch, place = divmod(step, in_epoch)
        if epoch != drawn:
            order, drawn = np.random.default_rng(epoch).permutation(size), epoch
        at = (place * workers + rank) * batch
        yield step, order[at : at + batch]


# --- figures --------------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What workers say of their steps: how many, the sum of the examples' losses, and rows pulled and pushed."""

    steps: int = 0
    loss: float = 0.0
    rows: int = 0

    def plus(self, other: "Told") -> "Told":
        """Both."""
        return Told(*(a + b for a, b in zip(self, other)))


class Meter:
    """A worker's side of :func:`follow`: says how it gets on, twice a second."""

    def __init__(self, say: Callable[[Told], None]):
        self._say = say
        self._since = Told()
        # The time that processes take to start is not the training's.
        self.tell()

    def step(self, loss: float, rows: int = 0) -> None:
        """A step ended."""
        self._since = self._since.plus(Told(1, loss, rows))
        if time.monotonic() - self._told_at >= SAY_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Says what was not said yet."""
        self._say(self._since)
        self._since, self._told_at = Told(), time.monotonic()


class Interval(NamedTuple):
    """What is shown in one line: of `seconds` that end `at`."""

    at: float
    seconds: float
    since: Told
    total: Told


def follow(
    workers: Workers,
    every: float,
    show: Callable[[Interval], None],
    progress: Callable[[float, Told], float],
    half_way: Optional[Callable[[], str]] = None,
) -> Interval:
    """Shows how the workers get on until all have ended; gives the whole.

    Args:
        every: seconds between lines.
        show: prints one.
        progress: of the seconds since they began and what they did: 0.5 is half-way, and at 1 they are asked to end.
        half_way: called then; what it says is printed.
    """
    began = line_at = heard_at = None
    total, since = Told(), Told()
    while True:
        # First: who has ended has said all.
        is_running = workers.running()
        message = workers.message(LOOK_S)
        now = time.monotonic()
        if message is not None:
            heard_at = now
            began, line_at = began or now, line_at or now
            since, total = since.plus(message), total.plus(message)
        elif not is_running:
            break
        if began is None:
            continue
        done = progress(now - began, total)
        if half_way is not None and done >= 0.5:
            print(f"  {half_way()}", flush=True)
            half_way = None
        if done >= 1:
            workers.stop.set()
        # The last steps are in the last line.
        if now - line_at >= every and done < 1:
            show(Interval(now - began, now - line_at, since, total))
            line_at, since = now, Told()
    if began is None:
        return Interval(0.0, 0.0, total, total)
    if since.steps:
        show(Interval(heard_at - began, max(heard_at - line_at, 1e-9), since, total))
    return Interval(heard_at - began, max(heard_at - began, 1e-9), total, total)


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
