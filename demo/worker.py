"""One training process of the demo: trains its share of the ratings, and pushes countable gradients beside it.

It is a worker of a job: its gradients are parts of steps, and each step ends with a tick. With a staleness of 0 they are
summed with those of the others before they are applied, and nobody is ahead of anybody.

It writes JSON lines to stdout: `ready`; progress about four times a second (steps, loss, rows, and the moment each pull
and step was acknowledged); and `done`. It begins at the first line on stdin, trains its epochs, and goes on until a
second line (or the end of stdin) tells it that all kills are over; or it trains as many steps as it is told.

The audit: a thread pushes gradients that are small positive integers to a table with SGD, lr = 1 and zeros to begin
with, and adds to its own account what was acknowledged. Sums stay below 2**24, so f32 is exact: at the end the table
must hold the negated sum of all accounts, to the bit. One push lost or applied twice shows.

Not here: starting processes, kills, verdicts.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time

import numpy as np
import torch

import evershard as es

import data
import model

AUDIT_ROWS = 2000
AUDIT_DIM = 8
AUDIT_BATCH = 64
AUDIT_UNITS_MAX = 4
AUDIT_PAUSE_S = 0.04
REPORT_S = 0.25
TIMEOUT_S = 60.0
LEASE_S = 30.0


class Audit(threading.Thread):
    """Pushes integers until told to stop, and keeps the account of what was acknowledged.

    Invariant: `account` is the exact sum of all pushes that returned. A push that raised ends the audit; its error is in
    `error`, since its outcome may be unknown.
    """

    def __init__(self, table: es.Table, rank: int):
        super().__init__(name="audit", daemon=True)
        self.account = np.zeros((AUDIT_ROWS, AUDIT_DIM), np.int64)
        self.pushes = 0
        self.error: Exception | None = None
        self._table = table
        self._random = np.random.default_rng([11, rank])
        self._stop_now = threading.Event()

    def run(self) -> None:
        while not self._stop_now.wait(AUDIT_PAUSE_S):
            # Drawn with repeats: duplicates in one push must be summed.
            ids = self._random.integers(0, AUDIT_ROWS, AUDIT_BATCH)
            units = self._random.integers(1, AUDIT_UNITS_MAX, (AUDIT_BATCH, AUDIT_DIM))
            # Column 0 counts rows, whatever their units.
            units[:, 0] = 1
            try:
                self._table.push(ids, units.astype(np.float32))
            except es.EvershardError as error:
                self.error = error
                return
            np.add.at(self.account, ids, units)
            self.pushes += 1

    def stop(self) -> None:
        """Ends after the push in flight."""
        self._stop_now.set()
        self.join()


class Reporter:
    """Collects what happened since the last line, and writes the next one when it is due."""

    def __init__(self, rank: int):
        self.rank = rank
        self._acks: list[float] = []
        self._loss, self._steps, self._rows, self._due = 0.0, 0, 0, 0.0

    def acknowledged(self) -> None:
        """A pull or push of the training was answered, now."""
        self._acks.append(round(time.monotonic(), 5))

    def step(self, loss: float, rows: int, audit_pushes: int) -> None:
        """A training step ended."""
        self._loss, self._steps, self._rows = self._loss + loss, self._steps + 1, self._rows + rows
        if time.monotonic() >= self._due:
            self.flush(audit_pushes)

    def flush(self, audit_pushes: int) -> None:
        """Writes the line now."""
        acks, self._acks = self._acks, []
        if self._steps:
            emit(
                kind="progress",
                rank=self.rank,
                at=round(time.monotonic(), 4),
                steps=self._steps,
                loss=self._loss / self._steps,
                rows=self._rows,
                audit_pushes=audit_pushes,
                acks=acks,
            )
        self._loss, self._steps, self._rows = 0.0, 0, 0
        self._due = time.monotonic() + REPORT_S


def emit(**fields) -> None:
    """One JSON line to whoever started this process."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def batches(size: int, batch: int, rank: int, workers: int, epoch: int, seed: int = model.SEED):
    """Positions of this rank's batches in one epoch: all ranks together see every rating once."""
    order = np.random.default_rng([seed, epoch]).permutation(size)
    for number, at in enumerate(range(0, size - batch + 1, batch)):
        if number % workers == rank:
            yield order[at : at + batch]


def main() -> None:
    """Trains until the epochs are done and the orchestrator agrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoints", required=True)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--staleness", type=int, help="steps that a worker may be ahead of others (default: any number)")
    parser.add_argument("--steps", type=int, help="train this many, in place of whole epochs")
    parser.add_argument("--encoding", default="f32", help="how gradients travel")
    parser.add_argument("--seed", type=int, default=model.SEED)
    parser.add_argument("--account", required=True, help="file for the audit account (.npy)")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1000 * options.seed + options.rank)

    train, _ = data.load()
    cluster = es.connect(options.endpoints, timeout=TIMEOUT_S)
    tables = model.create_tables(cluster, options.prefix, options.encoding, options.seed)
    net = model.Recommender(tables, options.prefix, options.encoding, options.seed)
    reporter = Reporter(options.rank)
    audit = Audit(cluster.table(f"{options.prefix}.audit"), options.rank)
    emit(kind="ready", rank=options.rank)
    if not sys.stdin.readline():
        return
    released = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), released.set()), daemon=True).start()
    audit.start()

    def is_over(epoch: int, steps: int) -> bool:
        return steps >= options.steps if options.steps is not None else epoch >= options.epochs and released.is_set()

    job = cluster.job(
        options.prefix,
        workers=options.workers,
        staleness=options.staleness,
        aggregate="sum" if options.staleness == 0 else None,
        lease=LEASE_S,
    )
    epoch = steps = 0
    with job.worker(options.rank) as member:
        net.group.worker = member
        while not is_over(epoch, steps):
            for rows in batches(len(train), options.batch, options.rank, options.workers, epoch, options.seed):
                cursor = b"%d" % (steps + 1)
                loss, moved = model.train_step(
                    net, train.take(rows), lambda: member.tick(cursor), reporter.acknowledged
                )
                steps += 1
                reporter.step(loss, moved, audit.pushes)
                if audit.error is not None:
                    raise audit.error
                if is_over(epoch, steps):
                    break
            epoch += 1

    audit.stop()
    reporter.flush(audit.pushes)
    np.save(options.account, audit.account)
    emit(
        kind="done",
        rank=options.rank,
        steps=steps,
        audit_pushes=audit.pushes,
        audit_error=None if audit.error is None else f"{type(audit.error).__name__}: {audit.error}",
        client=cluster.stats(),
    )
    cluster.close()


if __name__ == "__main__":
    main()
