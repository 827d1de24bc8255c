"""DLRM on MovieLens 100k: will this person give this film 4 or 5 stars? Everything that learns is on the servers.

    .venv/bin/python examples/dlrm.py                    # 15 seconds, 2 workers, 3 servers on this machine
    .venv/bin/python examples/dlrm.py --kill             # the busiest server is killed half-way
    .venv/bin/python examples/dlrm.py --kill-worker      # a worker is killed half-way; another takes its rank, at its cursor

Numbers go through a bottom perceptron to a vector; each category has an embedding; the products of all these vectors in pairs,
beside the bottom's vector, go through a top perceptron to a logit (Naumov et al. 2019). One pull brings the rows of a batch and
the layers, one push takes the gradients of both. The workers are at most 2 steps apart, and pull the rows of the next batch
while they compute this one. The test AUC is 0.773 to 0.783; by the means of films and people it is 0.760.

Not here: data, processes, clusters (demo/data.py, common.py).
"""

from __future__ import annotations

import argparse
from typing import Any

import common  # First: it finds the server binary and the data.
import numpy as np
import torch
from torch import nn

import data
import evershard as es
from evershard.torch import DenseParameters, Embedding, EmbeddingBag, EmbeddingGroup, Prefetch

CATEGORIES = ("user", "item", "age", "occupation", "hour", "genre")
NUMBERS = 5
DIM = 16
DROPOUT = 0.2


class Dlrm(nn.Module):
    """Numbers and categories to logits."""

    def __init__(self, cluster: es.Cluster, name: str):
        super().__init__()
        vectors = len(CATEGORIES) + 1
        torch.manual_seed(0)  # The layers begin with the same values in every process.
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(DIM + vectors * (vectors - 1) // 2, 64), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(64, 1)
        )
        self.pairs = torch.triu_indices(vectors, vectors, offset=1)
        # Takes the parameters of both perceptrons out of this module: from here on they are on the servers.
        dense = DenseParameters(self, cluster, f"{name}.dense", optimizer=es.Adagrad(lr=0.01))
        embeddings: dict[str, nn.Module] = {}
        for seed, category in enumerate(CATEGORIES):
            table = cluster.create_table(
                f"{name}.{category}",
                dim=DIM,
                optimizer=es.Adagrad(lr=0.03, weight_decay=0.1),
                initializer=es.Normal(std=0.01, seed=seed),
            )
            # A film has several genres.
            embeddings[category] = EmbeddingBag(table=table) if category == "genre" else Embedding(table=table)
        self.group = EmbeddingGroup(embeddings, dense)

    def forward(self, numbers: np.ndarray, rows: Any) -> torch.Tensor:
        """Logits, ``float32[n]``; `rows` is what the group takes."""
        out = self.group(rows)
        bottom = self.bottom(torch.from_numpy(numbers))
        vectors = torch.stack([bottom, *(out[category] for category in CATEGORIES)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], 1)).squeeze(1)


def categories_of(ratings: data.Ratings) -> dict[str, Any]:
    """What the group looks up for these ratings."""
    return {**{name: getattr(ratings, name) for name in CATEGORIES[:-1]}, "genre": ratings.genre_bags()}


class Numbers:
    """Numeric features: how much a person rates, how often a film is rated, its genres, and the time of day."""

    def __init__(self, train: data.Ratings):
        self._counts = {
            side: np.log1p(np.bincount(getattr(train, side).astype(np.int64), minlength=2048)) for side in ("user", "item")
        }

    def of(self, ratings: data.Ratings) -> np.ndarray:
        """``float32[n, 5]``, each of about the size of 1."""
        counts = [self._counts[side][getattr(ratings, side).astype(np.int64)] - 4 for side in ("user", "item")]
        day = ratings.hour * (np.pi / 12)
        return np.stack([*counts, ratings.genre_count - 2, np.sin(day), np.cos(day)], 1).astype(np.float32)


def work(rank: int, say, stop, endpoints: str, options: argparse.Namespace) -> None:
    """One worker: takes its rank, goes on where it (or its predecessor) was, and says how it gets on."""
    torch.set_num_threads(1)
    train, _ = data.load()
    numbers = Numbers(train)
    with es.connect(endpoints) as cluster:
        model = Dlrm(cluster, options.name)
        job = cluster.job(options.name, workers=options.workers, staleness=options.staleness, lease=common.LEASE_S)
        with job.worker(rank) as worker:
            model.group.worker = worker
            meter = common.Meter(say)
            begin = int(worker.cursor or b"0")
            steps = common.shuffled(begin, options.steps, len(train), options.batch, rank, options.workers)
            batches = ((step, train.take(positions)) for step, positions in steps)
            with Prefetch(model.group, batches, lambda numbered: categories_of(numbered[1])) as ready:
                for pulled in ready:
                    step, batch = pulled.batch
                    torch.manual_seed(step * options.workers + rank)  # Dropout, the same for whoever does this step.
                    logits = model(numbers.of(batch), pulled)
                    loss = nn.functional.binary_cross_entropy_with_logits(
                        logits, torch.from_numpy(batch.label), reduction="sum"
                    )
                    loss.backward()  # Pushes, as part of the step.
                    worker.tick(b"%d" % (step + 1))
                    meter.step(loss.item(), 2 * model.group.last_rows)
                    if stop.is_set():
                        break
            meter.tell()


def test_auc(model: Dlrm, numbers: Numbers, test: data.Ratings, batch: int = 2048) -> float:
    """Reads only: nothing is pushed under ``no_grad``."""
    model.eval()
    with torch.no_grad():
        parts = [test.take(np.arange(at, min(at + batch, len(test)))) for at in range(0, len(test), batch)]
        scores = [model(numbers.of(part), categories_of(part)).numpy() for part in parts]
    return common.auc(test.label, np.concatenate(scores))


def baseline(train: data.Ratings, test: data.Ratings, damping: int = 10) -> float:
    """Test AUC of the share of likes that a film and a person have: needs no training."""
    mean = train.label.mean()
    score = np.zeros(len(test))
    for side in ("user", "item"):
        ids, asked = getattr(train, side).astype(np.int64), getattr(test, side).astype(np.int64)
        likes = np.bincount(ids, train.label - mean, minlength=2048)
        score += (likes / (np.bincount(ids, minlength=2048) + damping))[asked]
    return common.auc(test.label, score)


def train_model(cluster: es.Cluster, options: argparse.Namespace) -> None:
    """Starts the workers, and shows how the model gets on."""
    torch.set_num_threads(1)
    train, test = data.load()
    numbers, by_means = Numbers(train), baseline(train, test)
    model = Dlrm(cluster, options.name)
    if common.is_new(cluster, options.name):
        model.group.dense.initialize()
    in_epoch = len(train) // (options.batch * options.workers)
    if options.steps is None:
        options.steps = options.epochs * in_epoch
    print(f"\n{len(train):,} ratings to train on, {len(test):,} to test with; {options.workers} workers")
    print(f"test AUC by the means of films and people: {by_means:.4f}\n", flush=True)
    report = common.Report(
        seconds=".0f", step=",d", epoch=".1f", ratings_per_s=",.0f", rows_per_s=",.0f", train_loss=".4f", test_AUC=".4f"
    )

    def show(part: common.Interval) -> None:
        ratings = part.since.steps * options.batch
        report.line(
            seconds=part.at,
            step=part.total.steps // options.workers,
            epoch=part.total.steps / (in_epoch * options.workers),
            ratings_per_s=ratings / part.seconds,
            rows_per_s=part.since.rows / part.seconds,
            train_loss=part.since.loss / ratings if ratings else None,
            test_AUC=test_auc(model, numbers, test),
        )

    def progress(_: float, total: common.Told) -> float:
        return total.steps / max(options.steps * options.workers, 1)

    with common.Workers(options.workers, work, ",".join(cluster.endpoints), options) as workers:
        half_way = (lambda: common.kill_busiest(cluster)) if options.kill else None
        if options.kill_worker:
            half_way = lambda: workers.replace(0)  # noqa: E731
        whole = common.follow(workers, options.every, show, progress, half_way)
    print(
        f"\n{whole.total.steps * options.batch:,} ratings in {whole.at:.0f} s; test AUC "
        f"{test_auc(model, numbers, test):.4f}, by the means of films and people {by_means:.4f}"
    )


def main() -> None:
    """See the head of this file."""
    parser = common.arguments(__doc__, staleness=2)
    parser.add_argument("--batch", type=int, default=512, help="ratings of one worker's step (default 512)")
    parser.add_argument("--epochs", type=int, default=4, help="unless --steps (default 4)")
    parser.add_argument("--kill-worker", action="store_true", help="kill -9 worker 0 half-way, and start another in its place")
    options = common.parse(parser)
    data.ensure_wheel()
    with common.cluster_of(options) as cluster:
        train_model(cluster, options)


if __name__ == "__main__":
    common.run(main)
