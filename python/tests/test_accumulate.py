"""Gradient accumulation against torch.nn: several backward passes, one push."""

import numpy as np
import pytest
import torch
from torch import nn

import evershard as es
from evershard.torch import DenseParameters, Embedding, EmbeddingBag, EmbeddingGroup

ROWS, DIM, LR = 50, 6, 0.1
ALL = np.arange(ROWS)


def make(cluster, name, dim=DIM, **options):
    return cluster.create_table(name, dim=dim, optimizer=es.Adagrad(lr=LR), initializer=es.Normal(std=1.0, seed=4), **options)


def local(table):
    return torch.from_numpy(table.pull(ALL))


def loss_of(output, seed):
    return (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))).square().sum()


@pytest.fixture
def ones(cluster, name):
    return cluster.create_table(name, dim=1, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())


def test_it_trains_as_torch_does(cluster, name):
    """Adagrad, so that one push of a sum differs from several pushes; a table that two modules share; dense layers."""
    tables = {part: make(cluster, f"{name}-{part}") for part in ("shared", "bag")}
    layers, local_layers = nn.Linear(3 * DIM, 1), nn.Linear(3 * DIM, 1)
    local_layers.load_state_dict(layers.state_dict())
    shared = nn.Embedding.from_pretrained(local(tables["shared"]), freeze=False)
    bag = nn.EmbeddingBag.from_pretrained(local(tables["bag"]), freeze=False, mode="mean")
    parameters = [*shared.parameters(), *bag.parameters(), *local_layers.parameters()]
    optimizer = torch.optim.Adagrad(parameters, lr=LR, eps=es.Adagrad(lr=LR).eps)

    dense = DenseParameters(layers, cluster, f"{name}-dense", optimizer=es.Adagrad(lr=LR))
    dense.initialize()
    group = EmbeddingGroup(
        {
            "user": Embedding(table=tables["shared"]),
            "friend": Embedding(table=tables["shared"]),
            "tags": EmbeddingBag(table=tables["bag"]),
        },
        dense=dense,
    )
    random = torch.Generator().manual_seed(1)
    for step in range(3):
        optimizer.zero_grad()
        before = tables["shared"].pull(ALL)
        with group.accumulate():
            for micro in range(4):
                user, friend = (torch.randint(0, 20, (8,), generator=random) for _ in range(2))
                tags = torch.randint(0, 20, (8, 3), generator=random)
                out = group({"user": user, "friend": friend, "tags": tags})
                ours = layers(torch.cat([out[key] for key in ("user", "friend", "tags")], 1))
                theirs = local_layers(torch.cat([shared(user), shared(friend), bag(tags)], 1))
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
                loss_of(ours, 10 * step + micro).backward()
                loss_of(theirs, 10 * step + micro).backward()
            assert np.array_equal(tables["shared"].pull(ALL), before), "nothing is pushed in the block"
        optimizer.step()
        np.testing.assert_allclose(tables["shared"].pull(ALL), shared.weight.detach().numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(tables["bag"].pull(ALL), bag.weight.detach().numpy(), rtol=1e-4, atol=1e-5)
    fresh = nn.Linear(3 * DIM, 1)
    fresh.load_state_dict(dense.state_dict())
    torch.testing.assert_close(fresh.weight, local_layers.weight, rtol=1e-4, atol=1e-5)


def test_sums_are_one_push_in_the_order_of_the_passes(ones, cluster):
    """f32 sums depend on their order: (2^24 + 1) - 2^24 is 0, and 2^24 - 2^24 + 1 is 1."""
    module = Embedding(table=ones)
    for factors, expected in ([(2.0**24, 1.0, -(2.0**24)), 0.0], [(2.0**24, -(2.0**24), 1.0), -1.0]):
        before = ones.pull([1])[0, 0]
        messages = cluster.stats()["messages_acked"]
        with module.accumulate():
            for factor in factors:
                (module(torch.tensor([1])) * factor).sum().backward()
        assert ones.pull([1])[0, 0] - before == expected
        assert cluster.stats()["messages_acked"] == messages + 1


def test_a_block_that_breaks_off_pushes_nothing(ones):
    module = Embedding(table=ones)
    with pytest.raises(KeyError):
        with module.accumulate():
            module(torch.tensor([1])).sum().backward()
            raise KeyError
    assert not ones.pull([1], return_exists=True)[1].any()
    with module.accumulate():
        with pytest.raises(RuntimeError, match="nest"):
            with module.accumulate():
                pass
        module(torch.tensor([2])).sum().backward()
    with module.accumulate():
        pass
    module(torch.tensor([3])).sum().backward()
    assert ones.pull([1, 2, 3]).tolist() == [[0], [-1], [-1]]


def test_the_block_raises_what_the_push_raises(ones):
    module = Embedding(table=ones)
    with pytest.raises(es.NonFiniteGradient):
        with module.accumulate():
            (module(torch.tensor([1])) * float("nan")).sum().backward()
    with module.accumulate():
        module(torch.tensor([1])).sum().backward()
    assert ones.pull([1]).tolist() == [[-1]]


def test_learning_rates_stay_apart(ones):
    slow = Embedding(table=ones, lr=0.5)
    group = EmbeddingGroup({"fast": Embedding(table=ones), "slow": slow})
    with group.accumulate():
        for _ in range(2):
            out = group({"fast": torch.tensor([1]), "slow": torch.tensor([1])})
            (out["fast"] + out["slow"]).sum().backward()
    assert ones.pull([1]).tolist() == [[-3]]


@pytest.mark.parametrize("staleness", [0, 1])
def test_accumulated_gradients_are_part_of_the_step(cluster, ones, name, staleness):
    group = EmbeddingGroup({"e": Embedding(table=ones)})
    with cluster.job(name, workers=1, staleness=staleness).worker(0) as worker:
        group.worker = worker
        for step in range(3):
            with group.accumulate():
                for micro in range(2):
                    group({"e": torch.tensor([micro, 7])})["e"].sum().backward()
            worker.tick()
            assert ones.pull([0, 1, 7]).tolist() == [[-step - 1], [-step - 1], [-2 * step - 2]]
        with pytest.raises(ValueError, match="worker"):
            with group.accumulate():
                group({"e": torch.tensor([1])})["e"].sum().backward()
                group.worker = None
                group({"e": torch.tensor([1])})["e"].sum().backward()
