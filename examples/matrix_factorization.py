"""Matrix factorization of MovieLens 100k, in plain NumPy: vectors and biases of people and films, and their gradients by hand.

    .venv/bin/python examples/matrix_factorization.py            # 30 seconds, 2 workers, 3 servers on this machine
    .venv/bin/python examples/matrix_factorization.py --kill     # the busiest server is killed half-way: the same RMSE, to the bit

A rating is predicted as mean + bias of the person + bias of the film + product of their vectors. A row of either table is a
vector and, in its last column, the bias. The workers go in step (staleness 0): the gradients of all workers are summed and
applied once, so the model depends neither on who is faster nor on who dies. The test RMSE is 0.910; by the means of films and
people it is 0.941.

Not here: data, processes, clusters (demo/data.py, common.py).
"""

from __future__ import annotations

import argparse

import common  # First: it finds the server binary and the data.
import numpy as np

import data
import evershard as es

DIM = 32
#: Of the squares of the weights that a rating takes part with.
DECAY = 0.1
#: How many average ratings everybody is taken to have beside his own, in the baseline.
DAMPING = 10


class Factors:
    """Two tables, and what a rating is by them."""

    def __init__(self, cluster: es.Cluster, name: str, mean: float):
        self._cluster = cluster
        self._mean = mean
        self.users, self.items = (
            cluster.create_table(
                f"{name}.{side}", dim=DIM + 1, optimizer=es.Adagrad(lr=0.05), initializer=es.Normal(std=0.1, seed=seed)
            )
            for seed, side in enumerate(("users", "items"))
        )

    def pull(self, ratings: data.Ratings) -> tuple[np.ndarray, np.ndarray]:
        """The rows of both sides, one for each rating: one round trip."""
        return self._cluster.pull_many([(self.users, ratings.user), (self.items, ratings.item)])

    def predict(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Ratings by their rows, ``float32[n]``."""
        return self._mean + users[:, -1] + items[:, -1] + (users[:, :-1] * items[:, :-1]).sum(1)

    def rmse(self, ratings: data.Ratings) -> float:
        """Of predictions for these ratings, which are from 1 to 5."""
        return rmse(self.predict(*self.pull(ratings)), ratings.stars)


def gradients(users: np.ndarray, items: np.ndarray, errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of half the squared errors and of the decay, for each rating; whoever has several gets their sum."""
    by_users, by_items = DECAY * users, DECAY * items
    by_users[:, :-1] += errors[:, None] * items[:, :-1]
    by_items[:, :-1] += errors[:, None] * users[:, :-1]
    by_users[:, -1] += errors
    by_items[:, -1] += errors
    return by_users, by_items


def work(rank: int, say, stop, endpoints: str, options: argparse.Namespace) -> None:
    """One worker: takes its rank, goes on where it (or its predecessor) was, and says how it gets on."""
    train, _ = data.load()
    with es.connect(endpoints) as cluster:
        factors = Factors(cluster, options.name, train.stars.mean())
        job = cluster.job(options.name, workers=options.workers, staleness=options.staleness, lease=common.LEASE_S)
        with job.worker(rank) as worker:
            meter = common.Meter(say)
            begin = int(worker.cursor or b"0")
            for step, positions in common.shuffled(
                begin, options.steps, len(train), options.batch, rank, options.workers
            ):
                batch = train.take(positions)
                users, items = factors.pull(batch)
                errors = factors.predict(users, items) - batch.stars
                by_users, by_items = gradients(users, items, errors)
                worker.push_many_async([(factors.users, batch.user, by_users), (factors.items, batch.item, by_items)])
                worker.tick(b"%d" % (step + 1))  # Waits for the pushes, and for the other workers.
                meter.step(loss=float((errors**2).sum()))
                if stop.is_set():
                    break
            meter.tell()


def rmse(predictions: np.ndarray, stars: np.ndarray) -> float:
    """Root of the mean squared error."""
    return float(np.sqrt(((np.clip(predictions, 1, 5) - stars) ** 2).mean(dtype=np.float64)))


def baselines(train: data.Ratings, test: data.Ratings) -> dict[str, float]:
    """Test RMSE of what needs no training: means."""
    mean = train.stars.mean()
    size = int(max(train.user.max(), train.item.max(), test.user.max(), test.item.max())) + 1

    def biases(ids: np.ndarray, left: np.ndarray) -> np.ndarray:
        ids = ids.astype(np.int64)
        return np.bincount(ids, left, size) / (np.bincount(ids, minlength=size) + DAMPING)

    by_item = biases(train.item, train.stars - mean)
    by_user = biases(train.user, train.stars - mean - by_item[train.item.astype(np.int64)])
    films, people = by_item[test.item.astype(np.int64)], by_user[test.user.astype(np.int64)]
    return {
        "the mean of all": rmse(np.full(len(test), mean), test.stars),
        "means of films": rmse(mean + films, test.stars),
        "means of films and people": rmse(mean + films + people, test.stars),
    }


def train_model(cluster: es.Cluster, options: argparse.Namespace) -> None:
    """Starts the workers, and shows how the model gets on."""
    train, test = data.load()
    factors = Factors(cluster, options.name, train.stars.mean())
    in_epoch = len(train) // (options.batch * options.workers)
    if options.steps is None:
        options.steps = options.epochs * in_epoch
    known = baselines(train, test)
    print(f"\n{len(train):,} ratings to train on, {len(test):,} to test with; {options.workers} workers\n")
    print("test RMSE of")
    for name, value in known.items():
        print(f"  {name:<28}{value:>8.4f}")
    print()
    report = common.Report(seconds=".0f", step=",d", epoch=".1f", ratings_per_s=",.0f", train_RMSE=".4f", test_RMSE=".4f")

    def show(part: common.Interval) -> None:
        ratings = part.since.steps * options.batch
        report.line(
            seconds=part.at,
            step=part.total.steps // options.workers,
            epoch=part.total.steps / (in_epoch * options.workers),
            ratings_per_s=ratings / part.seconds,
            train_RMSE=(part.since.loss / ratings) ** 0.5 if ratings else None,
            test_RMSE=factors.rmse(test),
        )

    def progress(_: float, total: common.Told) -> float:
        return total.steps / max(options.steps * options.workers, 1)

    with common.Workers(options.workers, work, ",".join(cluster.endpoints), options) as workers:
        kill = (lambda: common.kill_busiest(cluster)) if options.kill else None
        whole = common.follow(workers, options.every, show, progress, kill)
    print(
        f"\n{whole.total.steps * options.batch:,} ratings in {whole.at:.0f} s; test RMSE {factors.rmse(test):.6f}, "
        f"by means of films and people {known['means of films and people']:.6f}"
    )


def main() -> None:
    """See the head of this file."""
    parser = common.arguments(__doc__)
    parser.add_argument("--batch", type=int, default=1024, help="ratings of one worker's step (default 1024)")
    parser.add_argument("--epochs", type=int, default=20, help="unless --steps (default 20)")
    options = common.parse(parser)
    data.ensure_wheel()
    with common.cluster_of(options) as cluster:
        train_model(cluster, options)


if __name__ == "__main__":
    common.run(main)
