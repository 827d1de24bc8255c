"""DataLoader workers that read from the cluster: tables go along into forked and spawned processes."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import evershard as es
from evershard.torch import Embedding, EmbeddingGroup, Prefetch

SIZE, DIM = 24, 4
METHODS = ["fork", "spawn"]


class Looked(Dataset):
    """Items that a worker process makes of rows: what a table of features is read for."""

    def __init__(self, table):
        self.table = table

    def __len__(self):
        return SIZE

    def __getitem__(self, at):
        worker = get_worker_info()
        return at, torch.from_numpy(self.table.pull([at])[0]), -1 if worker is None else worker.id


class Counting(IterableDataset):
    """Each worker process pushes its own share, as an audit of what was seen would."""

    def __init__(self, table):
        self.table = table

    def __iter__(self):
        worker = get_worker_info()
        for at in range(worker.id, SIZE, worker.num_workers):
            self.table.push([at], np.ones((1, DIM)))
            yield at


class WithModule(Dataset):
    """A whole module inside of a dataset."""

    def __init__(self, module):
        self.module = module

    def __len__(self):
        return SIZE

    @torch.no_grad()
    def __getitem__(self, at):
        return self.module(torch.tensor([at]))[0]


@pytest.fixture
def rows(cluster, sgd):
    """Row i holds -i, and the parent's connection is in use."""
    sgd.push(np.arange(SIZE), np.repeat(np.arange(SIZE), DIM).reshape(SIZE, DIM))
    return sgd


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_pull_while_the_parent_trains(rows, method, persistent):
    loader = DataLoader(
        Looked(rows), batch_size=4, num_workers=2, multiprocessing_context=method, persistent_workers=persistent
    )
    for _ in range(2):
        seen, processes = [], set()
        for ids, pulled, workers in loader:
            assert torch.equal(pulled[:, 0], -ids.float())
            rows.push(ids + 1000, np.ones((len(ids), DIM)))  # The parent goes on by its own connection.
            seen += ids.tolist()
            processes |= set(workers.tolist())
        assert seen == list(range(SIZE)) and processes == {0, 1}
    assert np.all(rows.pull(np.arange(SIZE) + 1000) == -2)


@pytest.mark.parametrize("method", METHODS)
def test_workers_push_exactly_once(sgd, method):
    loader = DataLoader(Counting(sgd), batch_size=None, num_workers=2, multiprocessing_context=method)
    assert sorted(loader) == list(range(SIZE))
    assert np.all(sgd.pull(np.arange(SIZE)) == -1)


@pytest.mark.parametrize("method", METHODS)
def test_modules_and_local_clusters_go_along(rows, method):
    """`cluster` is an `es.local()`: its copies are clients, and their end does not end the servers."""
    loader = DataLoader(WithModule(Embedding(table=rows)), num_workers=2, batch_size=6, multiprocessing_context=method)
    assert torch.equal(torch.cat(list(loader))[:, 0], -torch.arange(SIZE).float())
    assert np.all(rows.pull([1]) == -1)


@pytest.mark.parametrize("method", METHODS)
def test_a_loader_with_workers_behind_a_prefetch(rows, method):
    """The loader's processes make batches, a thread pulls rows for them, and the model trains."""
    loader = DataLoader(Looked(rows), batch_size=4, num_workers=2, multiprocessing_context=method)
    group = EmbeddingGroup({"e": Embedding(table=rows)})
    with Prefetch(group, loader, lambda batch: {"e": batch[0]}, depth=2) as prefetch:
        for batch in prefetch:
            out = group(batch)["e"]
            assert torch.equal(out[:, 0], -batch.batch[0].float())
            out.sum().backward()
    assert np.all(rows.pull(np.arange(SIZE))[:, 0] == -np.arange(SIZE) - 1)


@pytest.mark.parametrize("method", METHODS)
def test_the_errors_of_a_worker_process_arrive(cluster, sgd, method):
    data = Looked(sgd)
    cluster.drop_table(sgd.name)
    loader = DataLoader(data, num_workers=1, multiprocessing_context=method)
    with pytest.raises(es.UnknownTable):
        list(loader)


def test_a_worker_of_a_job_does_not_go_along(cluster, sgd, name):
    """Its rank has one incarnation: a forked copy is refused, and cannot be pickled for a spawned one."""
    with cluster.job(name, workers=1, staleness=None).worker(0) as worker:

        class Pushing(Dataset):
            def __len__(self):
                return 1

            def __getitem__(self, at):
                worker.push(sgd, [at], np.ones((1, DIM)))
                return at

        with pytest.raises(es.AlreadyClosed, match="parent process"):
            list(DataLoader(Pushing(), num_workers=1, multiprocessing_context="fork"))
        worker.push(sgd, [0], np.ones((1, DIM)))
        worker.tick()
    assert np.all(sgd.pull([0]) == -1)
