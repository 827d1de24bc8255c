"""Prefetching: the same rows, as far behind as it says, and nothing left running."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import evershard as es
from evershard.torch import DenseParameters, Embedding, EmbeddingBag, EmbeddingGroup, Prefetch

DIM = 3


@pytest.fixture
def counted(cluster, name):
    """SGD of 1 from zeros: a pull shows the negated number of pushes of ones."""
    return cluster.create_table(name, dim=DIM, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())


def group_of(table):
    return EmbeddingGroup({"e": Embedding(table=table)})


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "evershard-prefetch"]


def until(condition):
    """Waits for a state; a test that hangs here is ended by its runner."""
    event = threading.Event()
    while not condition():
        event.wait(0.002)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_rows_that_nobody_writes_are_the_same(cluster, name, depth):
    """Two tables and a bag, weights of samples and dense layers, against the same group without prefetching."""
    make = lambda part: cluster.create_table(  # noqa: E731
        f"{name}-{part}", dim=DIM, optimizer=es.SGD(lr=1.0), initializer=es.Normal(std=1.0, seed=3)
    )
    layers = torch.nn.Linear(2 * DIM, 1)
    dense = DenseParameters(layers, cluster, f"{name}-dense", optimizer=es.SGD(lr=1.0))
    dense.initialize()
    group = EmbeddingGroup({"a": Embedding(table=make("a")), "b": EmbeddingBag(table=make("b"), mode="sum")}, dense=dense)
    random = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 30, (5,), generator=random) for _ in range(7)]
    factors = torch.rand(5, generator=random)
    inputs = lambda ids: {"a": ids, "b": (ids + 1, torch.arange(5), factors)}  # noqa: E731
    seen = 0
    with torch.no_grad(), Prefetch(group, batches, inputs, depth) as prefetch:
        assert prefetch.depth == depth and prefetch.staleness is None
        for batch, plain in zip(prefetch, batches):
            assert batch.batch is plain
            out, expected = group(batch), group(inputs(plain))
            for key in "ab":
                assert torch.equal(out[key], expected[key])
            assert torch.equal(layers(torch.cat([out["a"], out["b"]], 1)), layers(torch.cat([expected["a"], expected["b"]], 1)))
            assert not out["a"].requires_grad
            seen += 1
        assert list(prefetch) == []
    assert seen == len(batches) and threads() == []


def test_without_depth_or_in_step_every_row_has_what_was_just_pushed(cluster, counted, name):
    group = group_of(counted)
    for number, batch in enumerate(Prefetch(group, [{"e": torch.tensor([1])}] * 5, depth=0)):
        out = group(batch)["e"]
        assert out[0, 0] == -number
        out.sum().backward()
    for aggregate in ("sum", "apart"):
        with cluster.job(f"{name}-{aggregate}", workers=1, staleness=0, aggregate=aggregate).worker(0) as worker:
            group.worker = worker
            before = counted.pull([1])[0, 0]
            prefetch = Prefetch(group, [{"e": torch.tensor([1])}] * 5, depth=3)
            assert prefetch.depth == 0 and prefetch.staleness == 0 and threads() == []
            for number, batch in enumerate(prefetch):
                out = group(batch)["e"]
                assert out[0, 0] == before - number
                out.sum().backward()
                worker.tick()


@pytest.mark.parametrize("depth", [1, 3])
def test_rows_are_as_far_behind_as_it_says_and_no_further(counted, depth):
    group = group_of(counted)
    with Prefetch(group, [{"e": torch.tensor([1])}] * 10, depth=depth) as prefetch:
        for number, batch in enumerate(prefetch):
            out = group(batch)["e"]
            # Of the pushes of batches 0 to number - 1, those since number - depth may be missing.
            assert -number <= out[0, 0] <= -max(number - depth, 0)
            # All that may be pulled ahead is here before this batch is pushed: none of it has the push.
            until(lambda: prefetch.waiting == depth or number + prefetch.waiting >= 9)
            assert out[0, 0] == -max(number - depth, 0)
            out.sum().backward()
    assert counted.pull([1])[0, 0] == -10, "every gradient is pushed, of whatever age its rows were"


def test_the_slack_of_a_job_and_of_prefetching_add_up(cluster, counted, name):
    group = group_of(counted)
    with cluster.job(name, workers=1, staleness=2).worker(0) as worker:
        group.worker = worker
        with Prefetch(group, [{"e": torch.tensor([1])}] * 4, depth=2) as prefetch:
            assert (prefetch.depth, prefetch.staleness) == (2, 4)
            for number, batch in enumerate(prefetch):
                group(batch)["e"].sum().backward()
                worker.tick(b"%d" % number)
    with cluster.job(name + "x", workers=1, staleness=None).worker(0) as worker:
        group.worker = worker
        assert Prefetch(group, []).staleness is None
    assert counted.pull([1])[0, 0] == -4


def test_rows_pulled_ahead_are_not_for_a_step_of_all(cluster, counted, name):
    group = group_of(counted)
    with Prefetch(group, [{"e": torch.tensor([1])}]) as prefetch:
        batch = next(prefetch)
    with pytest.raises(ValueError, match="another"):
        group_of(counted)(batch)
    with cluster.job(name, workers=1, staleness=0).worker(0) as worker:
        group.worker = worker
        with pytest.raises(ValueError, match="staleness of 0"):
            group(batch)


def test_it_takes_no_more_batches_than_its_depth(counted):
    taken = []

    def batches():
        for number in range(20):
            taken.append(number)
            yield {"e": torch.tensor([number])}

    prefetch = Prefetch(group_of(counted), batches(), depth=3)
    until(lambda: prefetch.waiting == 3)
    assert taken == [0, 1, 2]
    next(prefetch)
    until(lambda: prefetch.waiting == 3)
    assert taken == [0, 1, 2, 3]
    prefetch.close()
    assert threads() == [] and len(taken) <= 4
    assert list(prefetch) == [], "closed"


@pytest.mark.parametrize("depth", [0, 1, 5])
@pytest.mark.parametrize("where", ["batches", "inputs", "pull"])
def test_errors_come_where_their_batch_would(cluster, name, depth, where):
    table = cluster.create_table(name, dim=1, optimizer=es.SGD(lr=1.0))
    group = EmbeddingGroup({"e": Embedding(10, table=table)})

    def batches():
        for number in range(6):
            if where == "batches" and number == 3:
                raise OSError("no more data")
            yield number

    def inputs(number):
        if where == "inputs" and number == 3:
            raise OSError("no such column")
        return {"e": torch.tensor([99 if where == "pull" and number == 3 else number])}

    prefetch, seen = Prefetch(group, batches(), inputs, depth), []
    with pytest.raises((OSError, IndexError)):
        for batch in prefetch:
            seen.append(batch.batch)
    assert seen == [0, 1, 2]
    assert list(prefetch) == [], "an error ends the iteration"
    until(lambda: threads() == [])


def test_a_failed_pull_is_raised_as_it_is(cluster, name):
    table = cluster.create_table(name, dim=1, optimizer=es.SGD(lr=1.0))
    with es.connect(",".join(cluster.endpoints)) as other:
        group = group_of(other.table(name))
        prefetch = Prefetch(group, [{"e": torch.tensor([1])}] * 5)
        next(prefetch)
        until(lambda: prefetch.waiting == 1)
        next(prefetch)
        until(lambda: prefetch.waiting == 1)
    next(prefetch)  # Pulled before the cluster was closed.
    with pytest.raises(es.AlreadyClosed):
        while True:
            next(prefetch)
    assert table.pull([1]).shape == (1, 1)


def test_a_forgotten_iterator_ends_its_thread(counted):
    group = group_of(counted)
    for batch in Prefetch(group, ({"e": torch.tensor([number])} for number in range(1000)), depth=2):
        group(batch)
        break
    del batch
    gc.collect()
    until(lambda: threads() == [])


def test_closing_ends_who_waits(counted):
    """A thread that waits for a batch hears of the end, also when the batches never come."""
    release = threading.Event()

    def batches():
        release.wait()
        yield {"e": torch.tensor([1])}

    prefetch = Prefetch(group_of(counted), batches())
    ended = []
    reader = threading.Thread(target=lambda: ended.append(list(prefetch)))
    reader.start()
    closer = threading.Thread(target=prefetch.close)
    closer.start()
    release.set()
    reader.join(60)
    closer.join(60)
    assert len(ended) == 1 and len(ended[0]) <= 1 and threads() == []


def test_weights_that_learn_are_not_made_ahead(counted):
    group = EmbeddingGroup({"e": EmbeddingBag(table=counted, mode="sum")})
    factors = torch.ones(2, requires_grad=True)
    batch = {"e": (torch.tensor([1, 2]), torch.tensor([0]), factors)}
    with pytest.raises(ValueError, match="requires a gradient"):
        next(Prefetch(group, [batch]))
    group(next(Prefetch(group, [batch], depth=0)))["e"].sum().backward()
    assert factors.grad is not None
    with pytest.raises(ValueError, match="depth"):
        Prefetch(group, [], depth=-1)


def test_a_program_that_ends_in_the_middle_ends(cluster, name):
    """No close(), a thread that waits, and one inside a pull: the interpreter still ends, with its own code."""
    cluster.create_table(name, dim=2, optimizer=es.SGD(lr=1.0))
    code = (
        "import sys, itertools, torch, evershard as es\n"
        "from evershard.torch import *\n"
        "table = es.connect(sys.argv[1]).table(sys.argv[2])\n"
        "group = EmbeddingGroup({'e': Embedding(table=table)})\n"
        "waits = Prefetch(group, ({'e': torch.arange(10)} for _ in itertools.count()))\n"
        "works = Prefetch(group, ({'e': torch.arange(20000)} for _ in itertools.count()), depth=10000)\n"
        "next(waits); next(works)\n"
        "sys.exit(7)\n"
    )
    command = [sys.executable, "-c", code, ",".join(cluster.endpoints), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (7, "")


def test_ids_of_numpy_batches(counted):
    counted.push(np.arange(4), np.ones((4, DIM)))
    group = group_of(counted)
    with Prefetch(group, [np.array([0, 3], np.uint64)], lambda ids: {"e": ids}) as prefetch:
        assert group(next(prefetch))["e"].tolist() == [[-1] * DIM] * 2
