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
import collections
import sys
import time
from typing import Any, Optional

import common  # First: it finds the server binary.
import numpy as np
import torch
from torch import nn

import click_data
import evershard as es
from evershard.torch import DenseParameters, Embedding, EmbeddingGroup, Prefetch

DIM = 16
HIDDEN = (64, 32)
BATCH_SAYS_S = 0.5
LEASE_S = 30.0
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
        vectors = cluster.create_table(
            f"{name}.vectors", dim=DIM, optimizer=es.Adagrad(lr=0.05), initializer=es.Normal(std=0.01)
        )
        weights = cluster.create_table(f"{name}.weights", dim=1, optimizer=es.Adagrad(lr=0.05))
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


def work(rank: int, say, stop, endpoints: str, name: str, options: argparse.Namespace) -> None:
    """One worker: takes its rank, goes on where it (or its predecessor) was, and says how it gets on."""
    torch.set_num_threads(1)
    with es.connect(endpoints) as cluster:
        model = ClickModel(cluster, name)
        job = cluster.job(name, workers=options.workers, staleness=options.staleness, lease=LEASE_S)
        with job.worker(rank) as worker:
            model.group.worker = worker
            begin = int(worker.cursor or b"0")
            steps = range(begin, options.steps if options.steps is not None else sys.maxsize)
            batches = ((step, click_data.draw(options.batch, TRAIN_SEED, rank, step)) for step in steps)
            told = time.monotonic()
            done, rows, loss_sum = 0, 0, 0.0
            with Prefetch(model.group, batches, lambda numbered: inputs_of(numbered[1]), options.prefetch) as ready:
                for pulled in ready:
                    step, batch = pulled.batch
                    logits = model(batch.counts, pulled)
                    loss = nn.functional.binary_cross_entropy_with_logits(
                        logits, torch.from_numpy(batch.label), reduction="sum"
                    )
                    loss.backward()
                    worker.tick(b"%d" % (step + 1))
                    done, rows, loss_sum = done + 1, rows + 2 * model.group.last_rows, loss_sum + loss.item()
                    if time.monotonic() - told >= BATCH_SAYS_S or stop.is_set():
                        say((done, rows, loss_sum))
                        told, done, rows, loss_sum = time.monotonic(), 0, 0, 0.0
                    if stop.is_set():
                        break
            if done:
                say((done, rows, loss_sum))


def test_auc(model: ClickModel, test: click_data.Clicks, batch: int = 4096) -> float:
    """Reads only: nothing is pushed under ``no_grad``."""
    model.eval()
    scores = []
    with torch.no_grad():
        for at in range(0, len(test.label), batch):
            part = click_data.Clicks(*(column[at : at + batch] for column in test))
            scores.append(model(part.counts, inputs_of(part)).numpy())
    return common.auc(test.label, np.concatenate(scores))


def kill_busiest(cluster: es.Cluster) -> str:
    """Ends the server that leads the most shards, as a crash would."""
    led = collections.Counter(shard["leader"] for shard in cluster.routing()["shards"])
    node, shards = led.most_common(1)[0]
    cluster.kill_node(node)
    return f"killed node {node}, which led {shards} shards (kill -9)"


def train(cluster: es.Cluster, options: argparse.Namespace) -> None:
    """Starts the workers, and shows how the model gets on until the time is over."""
    torch.set_num_threads(1)
    name = options.name or common.run_name("clicks")
    model = ClickModel(cluster, name)
    model.dense.initialize()
    test = click_data.draw(options.test, TEST_SEED)
    best = common.auc(test.label, test.probability)
    slack = "any" if options.staleness is None else options.staleness
    print(
        f"{click_data.CARDINALITIES.sum():,} values of {click_data.FIELDS} categories, {options.workers} workers, staleness "
        f"{slack}, {options.prefetch} batches pulled ahead\n{test.label.mean():.1%} of test examples are clicks; the hidden "
        f"model itself has a test AUC of {best:.4f}\n",
        flush=True,
    )
    report = common.Report(
        seconds=".0f", steps=",d", examples=",d", examples_per_s=",.0f", rows_per_s=",.0f", train_loss=".4f", test_AUC=".4f"
    )
    workers = common.Workers(options.workers, work, ",".join(cluster.endpoints), name, options)
    began: Optional[float] = None
    is_killed = not options.kill
    steps = rows = since_steps = since_rows = 0
    since_loss, line_at = 0.0, 0.0
    while workers.running():
        message = workers.message(0.2)
        now = time.monotonic()
        if message is not None:
            if began is None:
                # The time that processes take to start is not the training's.
                began = line_at = now
            since_steps, since_rows, since_loss = (a + b for a, b in zip((since_steps, since_rows, since_loss), message))
        if began is None:
            continue
        if options.minutes is not None and now - began >= 60 * options.minutes:
            workers.stop.set()
        if not is_killed and now - began >= 30 * (options.minutes or 1):
            print(f"  {kill_busiest(cluster)}", flush=True)
            is_killed = True
        if now - line_at >= options.every or (workers.stop.is_set() and not workers.running()):
            steps, rows = steps + since_steps, rows + since_rows
            examples = since_steps * options.batch
            report.line(
                seconds=now - began,
                steps=steps,
                examples=steps * options.batch,
                examples_per_s=examples / (now - line_at),
                rows_per_s=since_rows / (now - line_at),
                train_loss=since_loss / examples if examples else None,
                test_AUC=test_auc(model, test),
            )
            line_at, since_steps, since_rows, since_loss = now, 0, 0, 0.0
    workers.end()
    seconds = time.monotonic() - (began or time.monotonic())
    while (message := workers.message(0.2)) is not None:
        since_steps, since_rows = since_steps + message[0], since_rows + message[1]
    steps, rows = steps + since_steps, rows + since_rows
    final = test_auc(model, test)
    print(
        f"\n{steps * options.batch:,} examples in {seconds:.0f} s: {steps * options.batch / seconds:,.0f} examples/s, "
        f"{rows / seconds:,.0f} rows/s pulled and pushed; test AUC {final:.4f} of {best:.4f}",
        flush=True,
    )


def main() -> None:
    """See the head of this file."""
    parser = common.arguments(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=512, help="examples of one worker's step")
    parser.add_argument("--minutes", type=float, help="how long (default 2, unless --steps)")
    parser.add_argument("--steps", type=int, help="steps of each worker")
    parser.add_argument("--staleness", type=lambda text: None if text == "any" else int(text), default=2, metavar="N|any")
    parser.add_argument("--prefetch", type=int, default=1, help="batches that are pulled ahead (0 with a staleness of 0)")
    parser.add_argument("--test", type=int, default=20_000, help="test examples")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between lines")
    parser.add_argument("--kill", action="store_true", help="kill the busiest server half-way (of a cluster started here)")
    parser.add_argument("--name", help="of the tables and the job; a name used before goes on with its model")
    options = parser.parse_args()
    if options.kill and options.endpoints:
        parser.error("--kill is for a cluster that is started here")
    if options.minutes is None and options.steps is None:
        options.minutes = 2.0
    if options.staleness == 0:
        options.prefetch = 0
    with common.cluster_of(options) as cluster:
        train(cluster, options)


if __name__ == "__main__":
    main()
