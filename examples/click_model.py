"""A click model of 10 million categorical values: worker processes of one job train it, and may lose a server meanwhile.

    .venv/bin/python examples/click_model.py                  # 2 minutes, 2 workers, 3 servers on this machine
    .venv/bin/python examples/click_model.py --minutes 10 --workers 4 --staleness any
    .venv/bin/python examples/click_model.py --kill            # the busiest server is killed half-way

DeepFM: a weight of each value, products of their vectors in pairs, and a perceptron over the vectors and the counts. Two
tables hold the values (one id for each value of each category), dense tensors the perceptron; each step is one pull and one
push of all of them. The next batches are pulled while this one is computed. The data are drawn as they are needed
(click_data.py), so an example is seen once, and the test AUC says what was learned; it can reach that of the hidden model.

Not here: data, processes, clusters (click_data.py, common.py).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import common  # First: it finds the server binary.
import numpy as np
import torch
from torch import nn

import click_data
import evershard as es
from evershard.torch import DenseParameters, Embedding, EmbeddingGroup, Prefetch

DIM = 16
HIDDEN = (64, 32)
TEST_SEED = 1
TRAIN_SEED = 2


class ClickModel(nn.Module):
    """Counts and ids to logits."""

    def __init__(self, cluster: es.Cluster, name: str):
        super().__init__()
        inputs = click_data.COUNTS + click_data.FIELDS * DIM
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(inputs, HIDDEN[0]), nn.ReLU(), nn.Linear(HIDDEN[0], HIDDEN[1]), nn.ReLU(), nn.Linear(HIDDEN[1], 1)
        )
        # Adagrad's first steps are its longest. A click has 26 values at once, and workers that are apart make theirs without
        # knowing of each other's: an accumulator that does not begin at 0 keeps these steps short, and the model learns faster.
        optimizer = es.Adagrad(lr=0.05, initial_accumulator=10.0)
        vectors = cluster.create_table(f"{name}.vectors", dim=DIM, optimizer=optimizer, initializer=es.Normal(std=0.01))
        weights = cluster.create_table(f"{name}.weights", dim=1, optimizer=optimizer)
        self.dense = DenseParameters(self.layers, cluster, f"{name}.dense", optimizer=es.Adagrad(lr=0.01))
        self.group = EmbeddingGroup({"vector": Embedding(table=vectors), "weight": Embedding(table=weights)}, self.dense)

    def forward(self, counts: np.ndarray, rows: Any) -> torch.Tensor:
        """Logits, ``float32[n]``; `rows` is what the group takes."""
        out = self.group(rows)
        vectors, weights = out["vector"], out["weight"]
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        deep = self.layers(torch.cat([torch.from_numpy(counts), vectors.flatten(1)], 1))
        return deep.squeeze(1) + weights.sum((1, 2)) + pairs


def inputs_of(batch: click_data.Clicks) -> dict[str, np.ndarray]:
    """What the group looks up for a batch."""
    return {"vector": batch.ids, "weight": batch.ids}


def work(rank: int, say, stop, endpoints: str, options: argparse.Namespace) -> None:
    """One worker: takes its rank, goes on where it (or its predecessor) was, and says how it gets on."""
    torch.set_num_threads(1)
    with es.connect(endpoints) as cluster:
        model = ClickModel(cluster, options.name)
        job = cluster.job(options.name, workers=options.workers, staleness=options.staleness, lease=common.LEASE_S)
        with job.worker(rank) as worker:
            model.group.worker = worker
            meter = common.Meter(say)
            begin = int(worker.cursor or b"0")
            steps = range(begin, options.steps if options.steps is not None else sys.maxsize)
            batches = ((step, click_data.draw(options.batch, TRAIN_SEED, rank, step)) for step in steps)
            with Prefetch(model.group, batches, lambda numbered: inputs_of(numbered[1]), options.prefetch) as ready:
                for pulled in ready:
                    step, batch = pulled.batch
                    logits = model(batch.counts, pulled)
                    # Summed, not averaged: what a value's gradient is does not depend on the batch that it is in.
                    loss = nn.functional.binary_cross_entropy_with_logits(
                        logits, torch.from_numpy(batch.label), reduction="sum"
                    )
                    loss.backward()  # Pushes, as part of the step.
                    worker.tick(b"%d" % (step + 1))  # Waits for the pushes, and for workers that are too far behind.
                    meter.step(loss.item(), 2 * model.group.last_rows)
                    if stop.is_set():
                        break
            meter.tell()


def test_auc(model: ClickModel, test: click_data.Clicks, batch: int = 4096) -> float:
    """Reads only: nothing is pushed under ``no_grad``."""
    model.eval()
    scores = []
    with torch.no_grad():
        for at in range(0, len(test.label), batch):
            part = click_data.Clicks(*(column[at : at + batch] for column in test))
            scores.append(model(part.counts, inputs_of(part)).numpy())
    return common.auc(test.label, np.concatenate(scores))


def train(cluster: es.Cluster, options: argparse.Namespace) -> None:
    """Starts the workers, and shows how the model gets on until the time is over."""
    torch.set_num_threads(1)
    model = ClickModel(cluster, options.name)
    if common.is_new(cluster, options.name):
        model.dense.initialize()
    test = click_data.draw(options.test, TEST_SEED)
    best = common.auc(test.label, test.probability)
    slack = "any" if options.staleness is None else options.staleness
    print(
        f"\n{click_data.CARDINALITIES.sum():,} values of {click_data.FIELDS} categories, {options.workers} workers, staleness "
        f"{slack}, {options.prefetch} batches pulled ahead\n{test.label.mean():.1%} of test examples are clicks; the hidden "
        f"model itself has a test AUC of {best:.4f}\n",
        flush=True,
    )
    report = common.Report(
        seconds=".0f", steps=",d", examples=",d", examples_per_s=",.0f", rows_per_s=",.0f", train_loss=".4f", test_AUC=".4f"
    )

    def show(part: common.Interval) -> None:
        examples = part.since.steps * options.batch
        report.line(
            seconds=part.at,
            steps=part.total.steps,
            examples=part.total.steps * options.batch,
            examples_per_s=examples / part.seconds,
            rows_per_s=part.since.rows / part.seconds,
            train_loss=part.since.loss / examples if examples else None,
            test_AUC=test_auc(model, test),
        )

    def progress(seconds: float, total: common.Told) -> float:
        by_time = seconds / (60 * options.minutes) if options.minutes is not None else 0.0
        by_steps = total.steps / max(options.steps * options.workers, 1) if options.steps is not None else 0.0
        return max(by_time, by_steps)

    with common.Workers(options.workers, work, ",".join(cluster.endpoints), options) as workers:
        kill = (lambda: common.kill_busiest(cluster)) if options.kill else None
        whole = common.follow(workers, options.every, show, progress, kill)
    print(
        f"\n{whole.total.steps * options.batch:,} examples in {whole.at:.0f} s: "
        f"{whole.total.steps * options.batch / whole.seconds:,.0f} examples/s, {whole.total.rows / whole.seconds:,.0f} rows/s "
        f"pulled and pushed; test AUC {test_auc(model, test):.4f} of {best:.4f}"
    )


def main() -> None:
    """See the head of this file."""
    parser = common.arguments(__doc__, staleness=2)
    parser.add_argument("--batch", type=int, default=512, help="examples of one worker's step (default 512)")
    parser.add_argument("--minutes", type=float, help="how long (default 2, unless --steps)")
    parser.add_argument("--prefetch", type=int, default=1, help="batches pulled ahead (default 1; none with a staleness of 0)")
    parser.add_argument("--test", type=int, default=20_000, help="test examples (default 20000)")
    options = common.parse(parser)
    if options.minutes is None and options.steps is None:
        options.minutes = 2.0
    if options.staleness == 0:
        options.prefetch = 0
    with common.cluster_of(options) as cluster:
        train(cluster, options)


if __name__ == "__main__":
    common.run(main)
