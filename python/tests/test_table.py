"""Pull and push through the wheel: what goes in comes out, and bad input changes nothing."""

import threading

import numpy as np
import pytest
import torch

import evershard as es

MAX = 2**64 - 1
EDGES = np.array([0, 1, MAX, MAX - 1, 2**63], np.uint64)


def test_push_and_pull(sgd):
    sgd.push([3, 1], [[1, 2, 3, 4], [5, 6, 7, 8]])
    rows = sgd.pull([1, 2, 3])
    assert rows.dtype == np.float32 and rows.shape == (3, 4)
    assert rows.tolist() == [[-5, -6, -7, -8], [0, 0, 0, 0], [-1, -2, -3, -4]]


def test_edge_ids_are_ordinary(sgd):
    grads = np.arange(20, dtype=np.float32).reshape(5, 4)
    sgd.push(EDGES, grads)
    assert np.array_equal(sgd.pull(EDGES), -grads)
    assert np.array_equal(sgd.pull(EDGES.view(np.int64)), -grads)
    assert np.array_equal(sgd.pull([int(i) for i in EDGES]), -grads)


def test_ids_with_equal_low_bits(sgd):
    ids = (np.arange(200, dtype=np.uint64) << np.uint64(32)) | np.uint64(12345)
    grads = np.repeat(np.arange(200, dtype=np.float32)[:, None], 4, axis=1)
    sgd.push(ids, grads)
    assert np.array_equal(sgd.pull(ids), -grads)


def test_duplicates_are_summed(sgd):
    ids = np.array([7, 8, 7, 7])
    sgd.push(ids, np.ones((4, 4), np.float32))
    assert sgd.pull([7, 8, 7]).tolist() == [[-3] * 4, [-1] * 4, [-3] * 4]


def test_duplicates_are_one_step_of_the_optimizer(cluster, name):
    table = cluster.create_table(name, dim=1, optimizer=es.Adagrad(lr=1.0), initializer=es.Zeros())
    table.push([5, 5], [[1.0], [2.0]])
    assert table.pull([5])[0, 0] == pytest.approx(-1.0)  # one step of g = 3: -3 / sqrt(9)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 65_536])
def test_batch_sizes(sgd, size):
    ids = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    grads = np.repeat(np.arange(size, dtype=np.float32)[:, None], 4, axis=1)
    sgd.push(ids, grads)
    assert np.array_equal(sgd.pull(ids), -grads)


def test_a_pull_of_64_mib(cluster, name):
    table = cluster.create_table(name, dim=256, optimizer=es.SGD(lr=1.0), initializer=es.Uniform(-1, 1, seed=3))
    ids = np.arange(65_536)
    rows = table.pull(ids)
    assert rows.nbytes == 64 << 20
    assert rows.min() >= -1 and rows.max() < 1 and abs(rows.mean()) < 0.01
    assert np.array_equal(rows[::997], table.pull(ids[::997]))


def test_shapes_follow_the_ids(sgd):
    sgd.push(np.arange(6).reshape(2, 3), np.ones((2, 3, 4)))
    assert sgd.pull(np.arange(6).reshape(3, 2)).shape == (3, 2, 4)
    assert sgd.pull(4).shape == (4,)
    sgd.push(4, np.ones(4))
    assert sgd.pull(4).tolist() == [-2] * 4


def test_tensors(sgd):
    sgd.push(torch.tensor([1, -1]), torch.ones(2, 4, dtype=torch.float64))
    assert sgd.pull(torch.tensor([[1], [MAX - 2**64]])).tolist() == [[[-1] * 4], [[-1] * 4]]


def test_pull_into(sgd):
    sgd.push([1], np.ones((1, 4)))
    out = np.full((2, 4), 9, np.float32)
    assert sgd.pull([1, 2], out=out) is out
    assert out.tolist() == [[-1] * 4, [0] * 4]
    for bad, error in [
        (np.zeros((2, 4)), TypeError),
        (np.zeros((1, 4), np.float32), es.LengthMismatch),
        (np.zeros((2, 8), np.float32)[:, ::2], es.InvalidArgument),
    ]:
        with pytest.raises(error):
            sgd.pull([1, 2], out=bad)


def test_exists_and_remove(sgd):
    sgd.push([1, 2], np.ones((2, 4)))
    assert sgd.pull([1, 2, 3], return_exists=True)[1].tolist() == [True, True, False]
    sgd.remove([1])
    rows, exists = sgd.pull([1, 2], return_exists=True)
    assert exists.dtype == bool and exists.tolist() == [False, True]
    assert rows.tolist() == [[0] * 4, [-1] * 4]


def test_assign_and_add(sgd):
    sgd.assign([1, 2], [[1, 1, 1, 1], [2, 2, 2, 2]])
    sgd.add([2, 3], np.full((2, 4), 0.5))
    assert sgd.pull([1, 2, 3])[:, 0].tolist() == [1, 2.5, 0.5]


def test_push_pull_reads_before_it_pushes(sgd):
    sgd.push([1], np.ones((1, 4)))
    assert sgd.push_pull([1, 2], np.ones((2, 4))).tolist() == [[-1] * 4, [0] * 4]
    assert sgd.pull([1, 2])[:, 0].tolist() == [-2, -1]


def test_a_learning_rate_for_one_push(sgd):
    for lr in (float("nan"), float("inf"), -1.0):
        with pytest.raises(es.InvalidArgument, match="learning rate"):
            sgd.push([1], np.ones((1, 4)), lr=lr)
    sgd.push([1], np.ones((1, 4)), lr=0.25)
    sgd.apply_gradients([1], np.ones((1, 4)))
    assert sgd.lookup([1])[0].tolist() == [-1.25] * 4


def test_asynchronous_pushes_apply_in_order(sgd):
    handles = [sgd.push_async([1], np.full((1, 4), float(i))) for i in range(20)]
    for handle in handles:
        handle.wait()
        assert handle.done()
        handle.wait()  # Again: the same answer.
    assert sgd.pull([1])[0, 0] == -sum(range(20))


def test_the_arrays_of_an_asynchronous_push_may_be_changed_at_once(sgd):
    grads = np.ones((1, 4), np.float32)
    handle = sgd.push_async([1], grads)
    grads[:] = 1000
    handle.wait()
    assert sgd.pull([1])[0].tolist() == [-1] * 4


def test_many_tables_at_once(cluster, name):
    tables = [cluster.create_table(f"{name}-{dim}", dim=dim, optimizer=es.SGD(lr=1.0)) for dim in (1, 3, 8)]
    cluster.push_many([(t, np.arange(100), np.full((100, t.dim), t.dim)) for t in tables], lr=0.5)
    pulled = cluster.pull_many([(t, np.arange(100).reshape(10, 10)) for t in tables])
    for table, rows in zip(tables, pulled):
        assert rows.shape == (10, 10, table.dim)
        assert (rows == -0.5 * table.dim).all()
    cluster.push_many_async([(tables[0], [1], [[1.0]]), (tables[1], [1], [[1.0, 1, 1]])]).wait()
    assert tables[1].pull([1])[0].tolist() == [-2.5] * 3
    # One table twice, and learning rates of their own.
    cluster.push_many([(tables[0], [5], [[1.0]]), (tables[0], [5, 6], [[1.0], [1.0]]), (tables[0], [6], [[1.0]], 0.5)])
    assert tables[0].pull([5, 6])[:, 0].tolist() == [-0.5 - 2, -0.5 - 1.5]
    assert cluster.pull_many([]) == []
    cluster.push_many([])


def test_an_unseen_row_is_the_same_for_everybody(cluster, name):
    table = cluster.create_table(name, dim=8, optimizer=es.SGD(), initializer=es.Normal(std=0.1, seed=5))
    first = table.pull(EDGES)
    assert first.std() > 0.01
    with es.connect(",".join(cluster.endpoints)) as other:
        same = other.table(name)
        assert np.array_equal(same.pull(EDGES), first)
        for node in (1, 2, 3):
            assert np.array_equal(same.pull(EDGES, consistency="any", node=node), first)
    assert not table.pull(EDGES, return_exists=True)[1].any()


def test_threads_share_a_cluster(sgd):
    def push():
        for _ in range(25):
            sgd.push([1, 2], np.ones((2, 4)))

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sgd.pull([1, 2])[:, 0].tolist() == [-100, -100]


# --- bad input: a typed error, and nothing changed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "grads", "error"),
    [
        ([1, 2], np.ones((2, 3)), es.WrongDim),
        ([1, 2], np.ones((2, 5)), es.WrongDim),
        ([1, 2], np.ones(8), es.WrongDim),
        ([1, 2], np.ones((3, 4)), es.LengthMismatch),
        ([1, 2], np.ones((1, 4)), es.LengthMismatch),
        ([1, 2], [[1, 1, 1, 1], [1, 1, np.nan, 1]], es.NonFiniteGradient),
        ([1, 2], [[1, 1, 1, 1], [1, 1, np.inf, 1]], es.NonFiniteGradient),
    ],
)
def test_bad_pushes(sgd, ids, grads, error):
    for push in (sgd.push, sgd.push_pull, lambda i, g: sgd.push_async(i, g).wait()):
        with pytest.raises(error) as raised:
            push(ids, grads)
        assert isinstance(raised.value, (es.EvershardError, ValueError))
        assert sgd.name in str(raised.value)
    assert not sgd.pull([1, 2], return_exists=True)[1].any()
    sgd.push([1], np.ones((1, 4)))  # The session goes on.
    assert sgd.pull([1])[0, 0] == -1


def test_what_becomes_of_values_that_are_not_finite_is_the_tables_policy(cluster, name):
    grads = [[1, np.nan], [2, -np.inf], [3, 3], [4, 4]]
    expected = {"skip_row": [[0, 0], [-3, -3], [-4, -4]], "clip": [[-1, 0], [-5, np.finfo(np.float32).max], [-4, -4]]}
    for policy, rows in expected.items():
        table = cluster.create_table(f"{name}-{policy}", dim=2, optimizer=es.SGD(lr=1.0), non_finite=policy)
        table.push([1, 2, 2, 3], grads)
        assert table.pull([1, 2, 3]).tolist() == np.float32(rows).tolist()
    with pytest.raises(es.InvalidArgument, match="skip_row"):
        cluster.create_table(f"{name}-other", dim=2, non_finite="ignore")
    with pytest.raises(es.Conflict):
        cluster.create_table(f"{name}-clip", dim=2, optimizer=es.SGD(lr=1.0), non_finite="reject")
    cluster.create_table(f"{name}-clip", dim=2, optimizer=es.SGD(lr=1.0), non_finite="clip")


@pytest.mark.parametrize("policy", ["reject", "skip_row", "clip"])
def test_large_and_tiny_values_and_negative_zero_are_finite_under_every_policy(cluster, name, policy):
    tiny = 2.0**-149  # The smallest denormal.
    table = cluster.create_table(name, dim=2, optimizer=es.SGD(lr=1.0), non_finite=policy)
    grads = np.array([[1e38, -1e38], [tiny, -1e-40], [-0.0, 0.0], [3e38, -0.0]], np.float32)
    table.push([1, 2, 3, 4], grads)
    rows, exists = table.pull([1, 2, 3, 4], return_exists=True)
    assert rows.tobytes() == (np.float32(0) - grads).tobytes() and exists.all()
    table.assign([5], np.array([[-0.0, -tiny]], np.float32))
    assert table.pull([5]).tobytes() == np.array([[-0.0, -tiny]], np.float32).tobytes()


def test_a_push_with_two_learning_rates_is_refused_whole(cluster, sgd, name):
    other = cluster.create_table(f"{name}-other", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
    items = [(sgd, [1], np.ones((1, 4)), 0.5), (other, [1], [[1, np.nan]], 0.1)]
    for push in (cluster.push_many, lambda i: cluster.push_many_async(i).wait()):
        with pytest.raises(es.NonFiniteGradient):
            push(items)
    assert not sgd.pull([1], return_exists=True)[1].any()


def test_consistencies_read_what_was_pushed(sgd):
    for value in range(1, 20):
        sgd.assign([1, 2], np.full((2, 4), value))
        for options in (
            {},
            {"consistency": "linearizable"},
            {"consistency": "bounded", "max_staleness_ms": 60_000},
        ):
            rows, exists = sgd.pull([1, 2, 3], return_exists=True, **options)
            assert rows.tolist() == [[value] * 4] * 2 + [[0] * 4], options
            assert exists.tolist() == [True, True, False]


def test_bounds_that_make_no_sense(sgd):
    for options in (
        {"consistency": "bounded"},
        {"consistency": "bounded", "max_staleness_ms": 0},
        {"consistency": "any", "max_staleness_ms": 5},
        {"consistency": "linearizable", "node": 1},
    ):
        with pytest.raises(es.InvalidArgument):
            sgd.pull([1], **options)


def test_rows_that_do_not_exist_are_zeros_when_nothing_is_created(cluster, name):
    table = cluster.create_table(name, dim=3, optimizer=es.SGD(lr=1.0), initializer=es.Normal(std=1.0))
    table.assign([1], [[5, 5, 5]])
    rows, exists = table.pull([[1, 2], [2, 1]], create=False)
    assert exists.tolist() == [[True, False], [False, True]]
    assert rows.tolist() == [[[5] * 3, [0] * 3], [[0] * 3, [5] * 3]]
    assert (table.pull([2]) != 0).all()
    assert table.size() == 1


def test_a_whole_table_without_an_optimizer(cluster, name):
    table = cluster.create_table(name, dim=2)
    assert table.size() == 0
    assert [array.shape for array in table.export()] == [(0,), (0, 2)]
    ids = np.concatenate([np.arange(5000, dtype=np.uint64), EDGES])
    ids = np.unique(ids)
    values = np.stack([np.arange(len(ids)), np.ones(len(ids))], axis=1).astype(np.float32)
    table.assign(ids, values)
    table.remove(ids[::2])
    reader = cluster.table(name)
    for options in ({}, {"consistency": "bounded", "max_staleness_ms": 60_000}):
        found, rows = reader.export(**options)
        order = np.argsort(found)
        assert np.array_equal(found[order], ids[1::2]) and np.array_equal(rows[order], values[1::2])
        assert reader.size(**options) == len(ids[1::2])
    pieces = list(reader.scan())
    assert sum(len(part) for part, _ in pieces) == reader.size()
    assert all(rows.shape == (len(part), 2) for part, rows in pieces)
    reader.clear()
    assert reader.size() == 0 and not list(reader.scan())
    table.assign([1], [[1, 1]])
    assert reader.export()[0].tolist() == [1]


def test_a_node_cannot_be_asked_for_what_only_the_leader_knows(sgd):
    with pytest.raises(es.InvalidArgument, match="any"):
        sgd.pull([1], node=2)


def test_unknown_table(cluster, name):
    with pytest.raises(es.UnknownTable) as raised:
        cluster.table(name)
    assert name in str(raised.value) and isinstance(raised.value, KeyError)
    with pytest.raises(es.UnknownTable):
        cluster.drop_table(name)


def test_a_dropped_table_is_unknown(cluster, sgd):
    cluster.drop_table(sgd.name)
    with pytest.raises(es.UnknownTable):
        sgd.push([1], np.ones((1, 4)))
    with pytest.raises(es.UnknownTable):
        sgd.pull([1])
    assert sgd.name not in cluster.tables()


def test_a_table_of_the_same_name_later_is_another(cluster, sgd):
    sgd.push([1], np.ones((1, 4)))
    cluster.drop_table(sgd.name)
    again = cluster.create_table(sgd.name, dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
    assert again.number != sgd.number
    assert again.pull([1])[0].tolist() == [0] * 4


def test_no_optimizer(cluster, name):
    table = cluster.create_table(name, dim=2)
    with pytest.raises(es.NoOptimizer):
        table.push([1], [[1, 1]])
    table.assign([1], [[1, 2]])
    assert table.pull([1]).tolist() == [[1, 2]]


def test_create_table_is_idempotent_and_conflicts_are_told(cluster, sgd):
    again = cluster.create_table(sgd.name, dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
    assert again.number == sgd.number
    for dim, optimizer in [(5, es.SGD(lr=1.0)), (4, es.SGD(lr=2.0)), (4, es.Adagrad()), (4, None)]:
        with pytest.raises(es.Conflict):
            cluster.create_table(sgd.name, dim=dim, optimizer=optimizer, initializer=es.Zeros())


@pytest.mark.parametrize(
    ("dim", "optimizer", "initializer"),
    [
        (0, es.SGD(), None),
        (10**6, es.SGD(), None),
        (4, es.SGD(lr=float("nan")), None),
        (4, es.SGD(), es.Normal(std=float("inf"))),
    ],
)
def test_bad_definitions(cluster, name, dim, optimizer, initializer):
    with pytest.raises(es.InvalidArgument):
        cluster.create_table(name, dim=dim, optimizer=optimizer, initializer=initializer)
    assert name not in cluster.tables()


def test_wrong_types(cluster, sgd):
    with pytest.raises(TypeError):
        sgd.pull([1.5])
    with pytest.raises(TypeError):
        cluster.create_table("x", dim=4, optimizer="sgd")
    with pytest.raises(TypeError):
        cluster.create_table("x", dim=4, optimizer=es.Zeros())
    with pytest.raises(es.InvalidArgument):
        sgd.pull([1], consistency="sometimes")
