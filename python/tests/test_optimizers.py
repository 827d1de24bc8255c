"""The servers' optimizers against PyTorch's own, on the same gradients."""

import numpy as np
import pytest
import torch

import evershard as es

CASES = {
    "sgd": (es.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd with decay": (es.SGD(lr=0.1, weight_decay=0.05), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05)),
    "adagrad": (
        es.Adagrad(lr=0.1, eps=1e-8, initial_accumulator=0.25),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8, initial_accumulator_value=0.25),
    ),
    "adagrad with decay": (
        es.Adagrad(lr=0.1, weight_decay=0.05),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.05),
    ),
    "adam": (es.Adam(lr=0.01, beta1=0.8, beta2=0.95), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95))),
    "momentum": (
        es.SGD(lr=0.1, momentum=0.9, dampening=0.2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2),
    ),
    "nesterov": (
        es.SGD(lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "rmsprop": (
        es.RMSprop(lr=0.01, alpha=0.9, momentum=0.5),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, momentum=0.5),
    ),
    "adamw": (es.AdamW(lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    "adam with decay": (es.Adam(lr=0.01, weight_decay=0.05), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.05)),
}


@pytest.mark.parametrize("case", CASES)
def test_same_steps_as_pytorch(cluster, name, case):
    ours, theirs = CASES[case]
    table = cluster.create_table(name, dim=8, optimizer=ours, initializer=es.Normal(std=0.5, seed=1))
    ids = np.arange(64)
    weight = torch.nn.Parameter(torch.from_numpy(table.pull(ids)))
    optimizer = theirs([weight])
    random = np.random.default_rng(0)
    for _ in range(30):
        grads = random.normal(0, 1, (64, 8)).astype(np.float32)
        weight.grad = torch.from_numpy(grads.copy())
        optimizer.step()
        table.push(ids, grads)
    np.testing.assert_allclose(table.pull(ids), weight.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_adam_counts_steps_by_row(cluster, name):
    """PyTorch's dense Adam moves rows without a gradient too; ours leaves them, and corrects the bias by their own steps."""
    table = cluster.create_table(name, dim=1, optimizer=es.Adam(lr=0.1), initializer=es.Zeros())
    for _ in range(10):
        table.push([1], [[1.0]])
    table.push([2], [[1.0]])
    first, second = table.pull([1, 2])[:, 0]
    assert second == pytest.approx(-0.1, rel=1e-4)
    assert first == pytest.approx(-1.0, rel=1e-3)


def test_ftrl_leaves_weights_without_evidence_at_zero(cluster, name):
    table = cluster.create_table(name, dim=2, optimizer=es.FTRL(lr=0.5, l1=1.0))
    for _ in range(4):
        table.push([1], [[1.0, 0.1]])
    strong, weak = table.pull([1])[0]
    assert strong < 0 and weak == 0


def test_rowwise_adagrad_scales_a_row_as_one(cluster, name):
    table = cluster.create_table(name, dim=2, optimizer=es.Adagrad(lr=1.0, rowwise=True))
    table.push([1], [[3.0, 1.0]])
    np.testing.assert_allclose(table.pull([1])[0], -np.array([3.0, 1.0]) / np.sqrt(5.0), rtol=1e-6)


def test_a_row_is_clipped_by_its_norm(cluster, name):
    table = cluster.create_table(name, dim=2, optimizer=es.SGD(lr=1.0, clip_norm=1.0))
    table.push([1, 2], [[3.0, 4.0], [0.3, 0.4]])
    np.testing.assert_allclose(-table.pull([1, 2]), [[0.6, 0.8], [0.3, 0.4]], rtol=1e-5)


@pytest.mark.parametrize(
    "initializer", [es.TruncatedNormal(std=0.1, seed=3), es.Glorot(fan_in=100, seed=3), es.Constant(0.25)]
)
def test_initial_values_are_within_their_bounds_and_always_the_same(cluster, name, initializer):
    table = cluster.create_table(name, dim=16, optimizer=es.SGD(), initializer=initializer)
    rows = table.pull(np.arange(1000))
    bound = {"TruncatedNormal": 0.2, "Glorot": np.sqrt(6 / 116), "Constant": 0.25}[type(initializer).__name__]
    assert np.abs(rows).max() <= bound * (1 + 1e-6)
    assert np.array_equal(rows, table.pull(np.arange(1000)))
