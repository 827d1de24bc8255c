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


def test_set_optimizer_is_in_force_for_what_is_pushed_afterwards(cluster, name):
    table = cluster.create_table(name, dim=2, optimizer=es.SGD(lr=1.0))
    ids = np.arange(64)
    table.push(ids, np.ones((64, 2)))
    table.set_optimizer(es.SGD(lr=0.25))
    table.set_optimizer(es.SGD(lr=0.25))
    table.push(ids, np.ones((64, 2)))
    assert np.array_equal(table.pull(ids), np.full((64, 2), -1.25, np.float32))
    # For everybody, and through any handle.
    cluster.table(name).push(ids, np.ones((64, 2)))
    assert np.array_equal(table.pull(ids), np.full((64, 2), -1.5, np.float32))


def test_set_optimizer_keeps_optimizer_state(cluster, name):
    table = cluster.create_table(name, dim=1, optimizer=es.Adagrad(lr=1.0, eps=1e-10))
    table.push([1], [[3.0]])
    table.set_optimizer(es.Adagrad(lr=0.5, eps=1e-10))
    table.push([1], [[4.0]])
    assert table.pull([1])[0, 0] == pytest.approx(-1.0 - 0.5 * 4.0 / 5.0, rel=1e-6)


def test_set_optimizer_changes_numbers_and_not_the_kind(cluster, name):
    table = cluster.create_table(name, dim=2, optimizer=es.SGD(lr=1.0))
    for other in (es.Adam(), es.SGD(lr=1.0, momentum=0.9)):
        with pytest.raises(es.Conflict, match="hyper-parameters only"):
            table.set_optimizer(other)
    with pytest.raises(es.InvalidArgument, match="sgd.lr"):
        table.set_optimizer(es.SGD(lr=-1.0))
    with pytest.raises(TypeError):
        table.set_optimizer(None)
    table.set_optimizer(es.SGD(lr=0.5))
    with pytest.raises(es.Conflict, match="set_optimizer"):
        cluster.create_table(name, dim=2, optimizer=es.SGD(lr=1.0))
    assert cluster.create_table(name, dim=2, optimizer=es.SGD(lr=0.5)).number == table.number
    cluster.drop_table(name)
    with pytest.raises(es.UnknownTable):
        table.set_optimizer(es.SGD(lr=1.0))


SCHEDULES = {
    "warm-up": (es.WarmUp(4), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
    "step decay": (es.StepDecay(every=2, factor=0.5), [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]),
    "step decay after a warm-up": (
        es.StepDecay(every=2, factor=0.5, warmup_steps=2),
        [0.5, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25],
    ),
    "cosine": (es.Cosine(steps=4, floor=0.5), [1.0, None, 0.75, None, 0.5, 0.5, 0.5, 0.5]),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_schedule_follows_the_clock_of_the_worker(cluster, name, case):
    schedule, factors = SCHEDULES[case]
    table = cluster.create_table(name, dim=1, optimizer=es.SGD(lr=1.0, schedule=schedule))
    with cluster.job(f"job-{name}", workers=1).worker(0) as worker:
        for step, factor in enumerate(factors):
            worker.push(table, [step], [[1.0]])
            worker.tick()
            if factor is not None:
                assert -table.pull([step])[0, 0] == pytest.approx(factor, rel=1e-6), f"step {step}"
    cluster.remove_job(f"job-{name}")


def test_set_optimizer_brings_and_takes_a_schedule(cluster, name):
    table = cluster.create_table(name, dim=1, optimizer=es.SGD(lr=1.0))
    table.set_optimizer(es.SGD(lr=1.0, schedule=es.WarmUp(4)))
    table.push([1], [[1.0]])
    table.push([2], [[1.0]], lr=3.0)
    assert -table.pull([1, 2])[:, 0] == pytest.approx([0.25, 3.0])
    table.set_optimizer(es.SGD(lr=1.0))
    table.push([3], [[1.0]])
    assert -table.pull([3])[0, 0] == 1.0


def test_schedules_are_checked(cluster, name):
    for schedule, field in [(es.StepDecay(every=0), "schedule.step.every"), (es.Cosine(9, floor=2.0), "cosine.floor")]:
        with pytest.raises(es.InvalidArgument, match=field):
            cluster.create_table(name, dim=1, optimizer=es.SGD(schedule=schedule))
    for schedule in (es.WarmUp(-1), es.WarmUp(1.5), "cosine", es.Zeros()):
        with pytest.raises(TypeError):
            cluster.create_table(name, dim=1, optimizer=es.SGD(schedule=schedule))
