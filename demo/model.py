"""The demo's recommender: embeddings and dense layers on the servers, arithmetic in the worker.

A small DLRM crossed with NeuMF: six categorical features, each an embedding of `DIM` values (genre is a bag); all
pairwise dot products, next to the embeddings themselves, go through a multilayer perceptron to one logit.

Everything that learns is on the servers: one table per feature, and a dense tensor for each parameter of the perceptron's
layers, so all workers train one model. Each training step is one pull and one push, of all of them together.

Not here: where the data come from, and who runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import evershard as es
from evershard.torch import DenseParameters, Embedding, EmbeddingBag, EmbeddingGroup

from data import Ratings

FEATURES = ("user", "item", "age", "occupation", "hour", "genre")
DIM = 16
HIDDEN = 64
DROPOUT = 0.2
SEED = 7

EMBEDDING_LR = 0.05
EMBEDDING_DECAY = 0.1
DENSE_LR = 0.01


def create_tables(
    cluster: es.Cluster, prefix: str, encoding: str = "f32", seed: int = SEED
) -> dict[str, es.Table]:
    """Creates (or finds) the tables of one training run; `prefix` keeps runs apart. Gradients travel in the encoding."""
    optimizer = es.Adagrad(lr=EMBEDDING_LR, weight_decay=EMBEDDING_DECAY)
    tables = {}
    for number, name in enumerate(FEATURES):
        initializer = es.Normal(std=0.01, seed=seed * len(FEATURES) + number)
        table = cluster.create_table(f"{prefix}.{name}", dim=DIM, optimizer=optimizer, initializer=initializer)
        tables[name] = table.with_encoding(encoding)
    return tables


class Recommender(nn.Module):
    """Ratings to logits. Constructing it draws the initial dense layers from the seed: the same in every worker."""

    def __init__(self, tables: dict[str, es.Table], prefix: str, encoding: str = "f32", seed: int = SEED):
        super().__init__()
        pairs = len(FEATURES) * (len(FEATURES) - 1) // 2
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                nn.Linear(len(FEATURES) * DIM + pairs, HIDDEN), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(HIDDEN, 1)
            )
        cluster = tables["user"].cluster
        self.dense = DenseParameters(
            self.layers, cluster, f"{prefix}.dense", optimizer=es.Adagrad(lr=DENSE_LR), gradient_encoding=encoding
        )
        self.group = EmbeddingGroup(
            {
                name: EmbeddingBag(table=tables[name], mode="mean") if name == "genre" else Embedding(table=tables[name])
                for name in FEATURES
            },
            dense=self.dense,
        )
        self._pairs = torch.triu_indices(len(FEATURES), len(FEATURES), offset=1)

    def forward(self, ratings: Ratings) -> torch.Tensor:
        """Logits, ``float32[n]``."""
        inputs = {name: getattr(ratings, name) for name in FEATURES if name != "genre"}
        inputs["genre"] = ratings.genre_bags()
        embedded = self.group(inputs)
        stacked = torch.stack([embedded[name] for name in FEATURES], dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self._pairs[0], self._pairs[1]]
        return self.layers(torch.cat([stacked.flatten(1), dots], dim=1)).squeeze(1)


def train_step(
    model: Recommender,
    batch: Ratings,
    end_step: Callable[[], None] = lambda: None,
    acknowledged: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """Pull, forward, backward, push, and whatever ends the step; calls `acknowledged` after the pull and after the step.

    Gradients are summed over the batch, not averaged: a row's gradient then does not shrink with the batch size.

    Returns the mean loss of the batch, and the rows moved: those pulled and those pushed.
    """
    model.train()
    logits = model(batch)
    acknowledged()
    loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.label), reduction="sum")
    loss.backward()
    end_step()
    acknowledged()
    return float(loss.detach()) / len(batch), 2 * model.group.last_rows


def predict(model: Recommender, ratings: Ratings, batch: int = 2048) -> np.ndarray:
    """Scores of the ratings, ``float32[n]``; reads only."""
    model.eval()
    with torch.no_grad():
        scores = [
            model(ratings.take(np.arange(at, min(at + batch, len(ratings))))).numpy()
            for at in range(0, len(ratings), batch)
        ]
    return np.concatenate(scores)
