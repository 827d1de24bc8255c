"""evershard.torch against torch.nn: the same outputs and, after a step of SGD, the same weights."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

import evershard as es
from evershard.torch import DenseParameters, Embedding, EmbeddingBag, EmbeddingGroup

ROWS, DIM, LR = 50, 6, 0.1
ALL = np.arange(ROWS)


@pytest.fixture
def table(cluster, name):
    return cluster.create_table(name, dim=DIM, optimizer=es.SGD(lr=LR), initializer=es.Normal(std=1.0, seed=4))


def weight_of(table):
    return torch.from_numpy(table.pull(ALL))


def same(table, reference):
    np.testing.assert_allclose(table.pull(ALL), reference.weight.detach().numpy(), rtol=1e-5, atol=1e-6)


def loss_of(output, seed=0):
    return (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))).square().sum()


def step(ours, theirs, *inputs, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(theirs.parameters(), lr=LR)
    optimizer.zero_grad()
    left, right = ours(*inputs), theirs(*inputs)
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    loss_of(left).backward()
    loss_of(right).backward()
    optimizer.step()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 5), (2, 3, 4), (0,)])
def test_embedding(table, shape):
    theirs = nn.Embedding.from_pretrained(weight_of(table), freeze=False)
    ours = Embedding(ROWS, DIM, table=table)
    for seed in range(3):
        # Of 20 ids, so that repeats occur.
        step(ours, theirs, torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(seed)))
    same(table, theirs)


def test_embedding_with_padding(table):
    weight = weight_of(table)
    weight[3] = 0
    theirs = nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=3)
    ours = Embedding(ROWS, padding_idx=3, table=table)
    before = table.pull([3])
    step(ours, theirs, torch.tensor([[3, 1, 2], [3, 3, 1]]))
    step(ours, theirs, torch.tensor([3]))
    assert np.array_equal(table.pull([3]), before)
    assert not table.pull([3], return_exists=True)[1].any()
    others = np.delete(ALL, 3)
    np.testing.assert_allclose(table.pull(others), theirs.weight.detach().numpy()[others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag(table, mode):
    theirs = nn.EmbeddingBag.from_pretrained(weight_of(table), freeze=False, mode=mode)
    ours = EmbeddingBag(ROWS, DIM, mode, table=table)
    step(ours, theirs, torch.tensor([[1, 2, 2], [3, 1, 4]]))
    # Bags of 2, 0, 3 and 0 ids.
    step(ours, theirs, torch.tensor([1, 2, 2, 5, 1]), torch.tensor([0, 2, 2, 5]))
    same(table, theirs)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_with_padding_and_last_offset(table, mode):
    theirs = nn.EmbeddingBag.from_pretrained(
        weight_of(table), freeze=False, mode=mode, padding_idx=2, include_last_offset=True
    )
    ours = EmbeddingBag(ROWS, DIM, mode, 2, table=table, include_last_offset=True)
    step(ours, theirs, torch.tensor([1, 2, 2, 5, 1]), torch.tensor([0, 2, 3, 5]))
    same(table, theirs)


def test_per_sample_weights(table):
    theirs = nn.EmbeddingBag.from_pretrained(weight_of(table), freeze=False, mode="sum")
    ours = EmbeddingBag(mode="sum", table=table)
    ids, offsets = torch.tensor([1, 2, 2, 5, 1]), torch.tensor([0, 2])
    factors = [torch.tensor([1.0, 0.5, 2.0, -1.0, 3.0], requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD(theirs.parameters(), lr=LR)
    for module, factor in zip((ours, theirs), factors):
        loss_of(module(ids, offsets, factor)).backward()
    optimizer.step()
    torch.testing.assert_close(factors[0].grad, factors[1].grad, rtol=1e-5, atol=1e-6)
    same(table, theirs)


def test_reading_writes_nothing(table):
    ours, before = Embedding(table=table), weight_of(table)
    with torch.no_grad():
        assert not ours(torch.arange(5)).requires_grad
    ours.eval()
    assert not ours(torch.arange(5)).requires_grad
    ours.train()
    ours(torch.arange(5))  # Never went backward.
    assert torch.equal(weight_of(table), before)
    assert not table.pull(ALL, return_exists=True)[1].any()


def test_backward_twice_pushes_twice(cluster, name):
    table = cluster.create_table(name, dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
    loss = Embedding(table=table)(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert table.pull([1]).tolist() == [[-2, -2]]


def test_any_id_and_the_range(cluster, table):
    assert Embedding(table=table)(torch.tensor([-1, 2**62])).shape == (2, DIM)
    assert Embedding(table=table)(np.array([2**64 - 1], np.uint64)).shape == (1, DIM)
    for bad in (torch.tensor([ROWS]), torch.tensor([-1])):
        with pytest.raises(IndexError):
            Embedding(ROWS, table=table)(bad)
    with pytest.raises(TypeError):
        Embedding(table=table)(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="dim"):
        Embedding(ROWS, DIM + 1, table=table)


def test_a_table_by_name(cluster, name):
    made = Embedding(None, 3, table=name, cluster=cluster, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
    found = Embedding(table=name, cluster=cluster)
    made(torch.tensor([1])).sum().backward()
    assert found(torch.tensor([1])).tolist() == [[-1, -1, -1]]
    with pytest.raises(ValueError, match="cluster"):
        Embedding(table=name)


def test_a_learning_rate_for_the_module(cluster, name):
    table = cluster.create_table(name, dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
    module = Embedding(table=table, lr=0.5)
    module(torch.tensor([1])).sum().backward()
    module.lr = 0.25
    module(torch.tensor([1])).sum().backward()
    assert table.pull([1]).tolist() == [[-0.75, -0.75]]


def test_a_group_trains_as_a_local_model(cluster, name):
    """Two embeddings, a bag and two linear layers: all on the cluster, against all local, over ten steps."""
    make = lambda part, dim: cluster.create_table(  # noqa: E731
        f"{name}-{part}", dim=dim, optimizer=es.SGD(lr=LR), initializer=es.Normal(std=0.3, seed=9)
    )
    tables = {"user": make("user", DIM), "item": make("item", DIM), "tags": make("tags", DIM)}
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3 * DIM, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))
    torch.manual_seed(0)
    local_layers = nn.Sequential(nn.Linear(3 * DIM, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))
    local = nn.ModuleDict(
        {
            "user": nn.Embedding.from_pretrained(weight_of(tables["user"]), freeze=False),
            "item": nn.Embedding.from_pretrained(weight_of(tables["item"]), freeze=False),
            "tags": nn.EmbeddingBag.from_pretrained(weight_of(tables["tags"]), freeze=False, mode="mean"),
        }
    )
    optimizer = torch.optim.SGD([*local.parameters(), *local_layers.parameters()], lr=LR)

    dense = DenseParameters(layers, cluster, f"{name}-net", optimizer=es.SGD(lr=LR))
    dense.initialize()
    assert list(layers.parameters()) == []
    group = EmbeddingGroup(
        {"user": Embedding(table=tables["user"]), "item": Embedding(table=tables["item"]), "tags": EmbeddingBag(table=tables["tags"])},
        dense=dense,
    )
    random = torch.Generator().manual_seed(1)
    for _ in range(10):
        ids = {key: torch.randint(0, ROWS, (8,), generator=random) for key in ("user", "item")}
        bag = (torch.randint(0, ROWS, (12,), generator=random), torch.tensor([0, 1, 1, 4, 5, 8, 9, 11]))
        out = group({**ids, "tags": bag})
        ours = layers(torch.cat([out[key] for key in ("user", "item", "tags")], 1))
        theirs = local_layers(
            torch.cat([local["user"](ids["user"]), local["item"](ids["item"]), local["tags"](*bag)], 1)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        optimizer.zero_grad()
        loss_of(ours).backward()
        loss_of(theirs).backward()
        optimizer.step()
    for key, table in tables.items():
        np.testing.assert_allclose(table.pull(ALL), local[key].weight.detach().numpy(), rtol=1e-4, atol=1e-5)
    fresh = nn.Sequential(nn.Linear(3 * DIM, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))
    fresh.load_state_dict(dense.state_dict())
    for ours, theirs in zip(fresh.parameters(), local_layers.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_dense_parameters_leave_frozen_ones_alone_and_keep_shared_ones_shared(cluster, name):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(4, 4, bias=False)
            self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
            self.decoder = nn.Linear(4, 4)
            self.decoder.weight = self.encoder.weight

        def forward(self, x):
            return self.decoder(self.encoder(x) * self.scale)

    theirs = Tied()
    ours = Tied()
    ours.load_state_dict(theirs.state_dict())
    dense = DenseParameters(ours, cluster, name, optimizer=es.SGD(lr=LR))
    dense.initialize()
    assert dense.numel == 4 * 4 + 4
    assert list(dense.tensors) == ["encoder.weight", "decoder.bias"]
    assert [key for key, _ in ours.named_parameters()] == ["scale"]
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=LR)
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        dense.pull()
        optimizer.zero_grad()
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
        loss_of(ours(x)).backward()
        loss_of(theirs(x)).backward()
        optimizer.step()
    dense.pull()
    assert ours.encoder.weight.data_ptr() == ours.decoder.weight.data_ptr()
    torch.testing.assert_close(ours.encoder.weight, theirs.encoder.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.scale, torch.full((4,), 2.0))


def test_dense_parameters_keep_shape_and_dtype(cluster, name):
    layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False).to(torch.bfloat16))
    layers.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    layers.register_parameter("none", nn.Parameter(torch.empty(0)))
    theirs = {key: value.clone() for key, value in layers.state_dict().items() if key != "none"}
    dense = DenseParameters(layers, cluster, name, optimizer=es.SGD(lr=1.0))
    assert [key for key, _ in layers.named_parameters()] == ["none"]
    dense.initialize()
    tensors = {key: cluster.tensor(f"{name}.{key}") for key in ("scale", "0.weight", "0.bias", "1.weight")}
    assert [t.shape for t in tensors.values()] == [(), (5, 3), (5,), (2, 5)]
    assert [t.dtype for t in tensors.values()] == ["float32", "float32", "float32", "bfloat16"]
    for key, value in dense.state_dict().items():
        assert value.dtype == theirs[key].dtype and torch.equal(value, theirs[key])
    # The servers keep float32: steps that bfloat16 would swallow add up.
    for _ in range(8):
        dense.pull()
        weight = layers[1].weight
        assert weight.dtype == torch.bfloat16
        (weight * 2**-10).sum().backward()
    moved = theirs["1.weight"].float().numpy() - 8 * 2**-10
    np.testing.assert_array_equal(tensors["1.weight"].pull(), moved)
    # Another worker finds them as they are, and another module does not fit.
    found = DenseParameters(nn.Linear(3, 5), cluster, f"{name}.0")
    found.pull()
    assert torch.equal(found.module.weight, theirs["0.weight"])
    with pytest.raises(ValueError, match="the module has"):
        DenseParameters(nn.Linear(3, 4), cluster, f"{name}.0")
    with pytest.raises(es.UnknownTable):
        DenseParameters(nn.Linear(3, 4), cluster, f"{name}.9")
    with pytest.raises(TypeError, match="float64"):
        DenseParameters(nn.Linear(3, 4).double(), cluster, f"{name}.9", optimizer=es.SGD(lr=1.0))


def test_dense_parameters_of_two_workers_train_as_one_process(cluster, name):
    theirs = nn.Linear(4, 3)
    job = cluster.job(name, workers=2, staleness=0)
    batches = [[torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * rank + n)) for n in range(3)] for rank in (0, 1)]
    failures = []
    DenseParameters(copy.deepcopy(theirs), cluster, name, optimizer=es.SGD(lr=LR)).initialize()

    def run(rank):
        try:
            with job.worker(rank) as worker:
                ours = nn.Linear(4, 3)
                dense = DenseParameters(ours, cluster, name, worker=worker)
                for batch in batches[rank]:
                    dense.pull()
                    loss_of(ours(batch)).backward()
                    worker.tick()
        except Exception as error:  # noqa: BLE001 - told by the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    optimizer = torch.optim.SGD(theirs.parameters(), lr=LR)
    for both in zip(*batches):
        optimizer.zero_grad()
        sum(loss_of(theirs(batch)) for batch in both).backward()
        optimizer.step()
    trained = DenseParameters(nn.Linear(4, 3), cluster, name).state_dict()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-4, atol=1e-5)


def test_a_part_of_the_group_that_took_no_part_in_the_loss_gets_no_push(cluster, name):
    tables = [cluster.create_table(f"{name}-{i}", dim=2, optimizer=es.SGD(lr=1.0)) for i in range(2)]
    group = EmbeddingGroup({"a": Embedding(table=tables[0]), "b": Embedding(table=tables[1])})
    group({"a": torch.tensor([1]), "b": torch.tensor([1])})["a"].sum().backward()
    assert tables[0].pull([1], return_exists=True)[1].all()
    assert not tables[1].pull([1], return_exists=True)[1].any()
    group.embeddings["a"].eval()
    assert not group({"a": torch.tensor([1])})["a"].requires_grad
    with pytest.raises(KeyError):
        group({"c": torch.tensor([1])})


def test_a_failed_push_is_raised_by_backward(cluster, name):
    table = cluster.create_table(name, dim=2, optimizer=es.SGD(lr=1.0))
    output = Embedding(table=table)(torch.tensor([1]))
    with pytest.raises(es.NonFiniteGradient):
        (output * float("nan")).sum().backward()


def test_modules_of_two_workers_train_one_model_in_step(cluster, table, name):
    """A job with a staleness of 0: what both pushed is summed and applied once, as one process does with both batches."""
    theirs = nn.Embedding.from_pretrained(weight_of(table), freeze=False)
    job = cluster.job(name, workers=2, staleness=0, aggregate="sum")
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    batches = [[torch.randint(0, 20, (7,), generator=generator) for _ in range(4)] for generator in generators]
    failures = []

    def run(rank):
        try:
            with job.worker(rank) as worker:
                ours = EmbeddingGroup({"e": Embedding(ROWS, table=table)})
                ours.worker = worker
                for number, batch in enumerate(batches[rank]):
                    loss_of(ours({"e": batch})["e"], number).backward()
                    worker.tick(b"%d" % number)
        except Exception as error:  # noqa: BLE001 - told by the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == [] and [worker["clock"] for worker in job.describe()["workers"]] == [4, 4]
    optimizer = torch.optim.SGD(theirs.parameters(), lr=LR)
    for number, both in enumerate(zip(*batches)):
        optimizer.zero_grad()
        sum(loss_of(theirs(batch), number) for batch in both).backward()
        optimizer.step()
    same(table, theirs)


def test_a_worker_is_of_the_same_cluster_and_takes_no_learning_rate(cluster, table, name):
    with cluster.job(name, workers=1, staleness=0).worker(0) as worker:
        ours = Embedding(ROWS, table=table, lr=0.5)
        ours.worker = worker
        with pytest.raises(ValueError, match="schedule"):
            ours(torch.tensor([1]))
        ours.lr = None
        worker.job.cluster, cluster_of_the_table = None, worker.job.cluster
        with pytest.raises(ValueError, match="of the cluster"):
            ours(torch.tensor([1]))
        worker.job.cluster = cluster_of_the_table
