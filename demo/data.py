"""MovieLens 100k for the demo: 100 000 ratings of 1 682 films by 943 people.

The files come from the `recbole` wheel on PyPI, which carries them. Their licence allows research but no
redistribution, so the wheel is downloaded once into a cache outside the checkout (``EVERSHARD_CACHE``, by default
``~/.cache/evershard``), read in place, and never committed.

The task is binary: will this person rate this film 4 or 5? The split is random with a fixed seed, 90 % train and
10 % test, the same in every process.

Not here: models, tables, servers.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import zipfile

import numpy as np

WHEEL = "recbole-1.2.1-py3-none-any.whl"
FOLDER = "recbole/dataset_example/ml-100k"
TEST_SHARE = 0.1
SPLIT_SEED = 20240229
AGE_BUCKETS = np.array([18, 22, 26, 30, 35, 40, 46, 52, 60])
HOUR_SECONDS = 3600


@dataclasses.dataclass
class Ratings:
    """Ratings as columns; row ``i`` of every array belongs to one rating.

    ``user``, ``item``, ``age``, ``occupation`` and ``hour`` are ``uint64[n]`` ids of embedding rows. The genres of
    rating ``i`` are ``genre[genre_start[i]:genre_start[i] + genre_count[i]]``: a bag of at least one id.
    ``label`` is ``float32[n]``, 1 for a rating of 4 or 5; ``stars`` is ``float32[n]``, the rating itself.
    """

    user: np.ndarray
    item: np.ndarray
    age: np.ndarray
    occupation: np.ndarray
    hour: np.ndarray
    genre_start: np.ndarray
    genre_count: np.ndarray
    genre: np.ndarray
    label: np.ndarray
    stars: np.ndarray

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: np.ndarray) -> "Ratings":
        """The ratings at these positions; genre bags keep pointing into the shared ``genre`` array."""
        return Ratings(
            *(getattr(self, f.name)[rows] if f.name != "genre" else self.genre for f in dataclasses.fields(self))
        )

    def genre_bags(self) -> tuple[np.ndarray, np.ndarray]:
        """All genre ids in rating order, and the offset where each rating's bag begins (as EmbeddingBag wants)."""
        ends = np.cumsum(self.genre_count)
        offsets = ends - self.genre_count
        flat = np.repeat(self.genre_start - offsets, self.genre_count) + np.arange(ends[-1] if len(ends) else 0)
        return self.genre[flat], offsets


def cache_directory() -> pathlib.Path:
    """Where downloads are kept, outside the checkout."""
    root = os.environ.get("EVERSHARD_CACHE") or pathlib.Path.home() / ".cache" / "evershard"
    return pathlib.Path(root) / "data"


def ensure_wheel() -> pathlib.Path:
    """Downloads the wheel that carries MovieLens 100k, unless it is there already."""
    directory = cache_directory()
    wheel = directory / WHEEL
    if wheel.exists() and zipfile.is_zipfile(wheel):
        return wheel
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    try:
        subprocess.run([*command, "--dest", str(directory), "recbole==1.2.1"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"demo: could not download MovieLens 100k (PyPI wheel recbole 1.2.1, 2 MB): {error}\n"
            f"      Put {WHEEL} into {directory} by hand and run again."
        ) from error
    return wheel


def load() -> tuple[Ratings, Ratings]:
    """Reads the ratings from the cached wheel: ``(train, test)``."""
    with zipfile.ZipFile(ensure_wheel()) as wheel:
        ratings = _rows(wheel, "inter")
        users = {row[0]: row for row in _rows(wheel, "user")}
        items = {row[0]: row for row in _rows(wheel, "item")}
    occupations = {name: i for i, name in enumerate(sorted({row[3] for row in users.values()}))}
    genres = {name: i for i, name in enumerate(sorted({g for row in items.values() for g in row[3].split()}))}

    user = np.array([row[0] for row in ratings], np.uint64)
    item = np.array([row[1] for row in ratings], np.uint64)
    years = np.array([int(users[row[0]][1]) for row in ratings])
    seconds = np.array([int(float(row[3])) for row in ratings])
    bags = {key: [genres[g] for g in row[3].split()] for key, row in items.items()}
    starts, flat = {}, []
    for key, bag in bags.items():
        starts[key] = len(flat)
        flat.extend(bag)

    stars = np.array([float(row[2]) for row in ratings], np.float32)
    everything = Ratings(
        user=user,
        item=item,
        age=np.searchsorted(AGE_BUCKETS, years).astype(np.uint64),
        occupation=np.array([occupations[users[row[0]][3]] for row in ratings], np.uint64),
        hour=(seconds // HOUR_SECONDS % 24).astype(np.uint64),
        genre_start=np.array([starts[row[1]] for row in ratings]),
        genre_count=np.array([len(bags[row[1]]) for row in ratings]),
        genre=np.array(flat, np.uint64),
        label=(stars >= 4).astype(np.float32),
        stars=stars,
    )
    order = np.random.default_rng(SPLIT_SEED).permutation(len(everything))
    test = int(len(order) * TEST_SHARE)
    return everything.take(order[test:]), everything.take(order[:test])


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: how often a liked film scores above a disliked one (ties count half)."""
    _, rank_of, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    positive = labels > 0.5
    n_positive, n_negative = positive.sum(), (~positive).sum()
    if n_positive == 0 or n_negative == 0:
        return float("nan")
    return float((ranks[rank_of.reshape(-1)][positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))


def _rows(wheel: zipfile.ZipFile, kind: str) -> list[list[str]]:
    lines = wheel.read(f"{FOLDER}/ml-100k.{kind}").decode().splitlines()
    return [line.split("\t") for line in lines[1:] if line]
