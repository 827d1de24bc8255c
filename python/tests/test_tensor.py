"""Dense tensors through the wheel: shape and dtype kept, slices, what changed only, several in one round trip."""

import pickle

import numpy as np
import pytest
import torch

import evershard as es


def integers(shape, factor=1.0):
    """Integers that tell every element from its neighbours."""
    return (np.arange(int(np.prod(shape)), dtype=np.float32) % 1000).reshape(shape) * np.float32(factor)


@pytest.fixture
def weight(cluster, name):
    """SGD, lr = 1, zeros, four blocks; row 163 lies in two of them."""
    return cluster.create_tensor(name, (500, 100), optimizer=es.SGD(lr=1.0))


def test_what_goes_in_comes_out(weight):
    assert (weight.shape, weight.dtype, weight.size, weight.blocks) == ((500, 100), "float32", 50_000, 4)
    weight.push(-integers(weight.shape))
    pulled = weight.pull()
    assert pulled.dtype == np.float32 and np.array_equal(pulled, integers(weight.shape))
    weight.push_async(-integers(weight.shape)).wait()
    out = np.empty(weight.shape, np.float32)
    assert weight.pull(out) is out and np.array_equal(out, integers(weight.shape, 2))
    weight.assign(integers(weight.shape, 3))
    weight.add(np.ones(weight.shape))
    assert np.array_equal(weight.pull(), integers(weight.shape, 3) + 1)


def test_any_rank(cluster, name):
    for number, shape in enumerate([(), (1,), (7,), (2, 3, 4), (2,) * 8]):
        tensor = cluster.create_tensor(f"{name}-{number}", shape, optimizer=es.SGD(lr=1.0))
        assert tensor.shape == shape and tensor.pull().shape == shape
        tensor.push(-integers(shape) - 1)
        assert np.array_equal(tensor.pull(), integers(shape) + 1)
    assert cluster.create_tensor(f"{name}-n", 5).shape == (5,)
    for shape in [(3, 0), (-1,), (1,) * 9]:
        with pytest.raises(es.InvalidArgument):
            cluster.create_tensor(f"{name}-none", shape)


def test_an_existing_tensor_is_found_and_another_definition_is_a_conflict(cluster, name, weight):
    found = cluster.tensor(name)
    assert (found.number, found.shape) == (weight.number, weight.shape)
    cluster.create_tensor(name, [500, 100], "float32", optimizer=es.SGD(lr=1.0))
    for shape, dtype in [((100, 500), np.float32), ((500, 100), np.float16)]:
        with pytest.raises(es.Conflict, match="shape"):
            cluster.create_tensor(name, shape, dtype, optimizer=es.SGD(lr=1.0))
    with pytest.raises(es.InvalidArgument, match="dense tensor"):
        cluster.table(name)
    with pytest.raises(es.UnknownTable):
        cluster.tensor(f"{name}-none")
    described = next(table for table in cluster.routing()["tables"] if table["name"] == name)
    assert (described["kind"], described["shape"], described["dtype"]) == ("dense", [500, 100], "float32")
    for optimizer in [es.Adagrad(rowwise=True), es.SGD(clip_norm=1.0)]:
        with pytest.raises(es.InvalidArgument):
            cluster.create_tensor(f"{name}-rows", 5, optimizer=optimizer)
    cluster.drop_table(name)
    with pytest.raises(es.UnknownTable):
        weight.push(integers(weight.shape))


def test_dtypes(cluster, name):
    half = cluster.create_tensor(f"{name}-half", (3, 5), np.float16, optimizer=es.SGD(lr=1.0))
    half.push(np.full((3, 5), -1 - 2**-11, np.float32))
    assert half.dtype == "float16" and half.pull().dtype == np.float16
    assert np.array_equal(half.pull(), np.ones((3, 5), np.float16)), "rounded to nearest, ties to even"
    kept = half.pull(np.empty((3, 5), np.float32))
    assert np.array_equal(kept, np.full((3, 5), 1 + 2**-11, np.float32)), "the servers keep float32"
    brain = cluster.create_tensor(f"{name}-brain", (4,), torch.bfloat16)
    assert brain.dtype == "bfloat16" and brain.pull().dtype == np.float32
    brain.assign(torch.full((4,), 1.5, dtype=torch.bfloat16))
    assert brain.pull().tolist() == [1.5] * 4
    for dtype in [np.float64, "int8", torch.float64]:
        with pytest.raises(TypeError):
            cluster.create_tensor(f"{name}-none", 5, dtype)
    with pytest.raises(TypeError):
        half.pull(np.empty((3, 5), np.float64))


def test_slices(weight):
    expected = integers(weight.shape)
    weight.push(-expected)
    for start, stop in [(0, 1), (163, 164), (160, 170), (499, 500), (0, 500), (7, 7)]:
        assert np.array_equal(weight.pull_rows(start, stop), expected[start:stop])
    weight.push(np.full((10, 100), -5.0), start=160, stop=170)
    weight.add(np.full((10, 100), 2.0), start=165, stop=175)
    expected[160:170] += 5
    expected[165:175] += 2
    assert np.array_equal(weight.pull(), expected)
    for start, stop in [(499, 501), (-1, 3), (5, 4)]:
        with pytest.raises(es.InvalidArgument):
            weight.pull_rows(start, stop)
    with pytest.raises(IndexError):
        weight.pull_rows(499, 501)
    with pytest.raises(es.OutOfRange):
        weight.push(np.zeros((2, 100)), start=499, stop=501)
    with pytest.raises(es.InvalidArgument, match="500 rows at a time"):
        weight.assign(np.zeros((10, 100)), start=160, stop=170)
    for wrong in [np.zeros((500, 99)), np.zeros(50_000), np.zeros((10, 100))]:
        with pytest.raises(es.LengthMismatch):
            weight.push(wrong)
    assert np.array_equal(weight.pull(), expected)


def test_slices_begin_and_end_with_a_block_where_a_zero_is_a_gradient(cluster, name):
    adam = cluster.create_tensor(name, (1000, 64), optimizer=es.Adam(lr=0.1))
    assert adam.aligned_rows == 256
    with pytest.raises(es.InvalidArgument, match="256 rows at a time"):
        adam.push(np.ones((100, 64)), stop=100)
    adam.push(np.ones((256, 64)), start=256, stop=512)
    adam.push(np.ones((232, 64)), start=768)
    changed = adam.pull()[:, 0] != 0
    assert changed[256:512].all() and changed[768:].all() and not changed[:256].any() and not changed[512:768].any()


def test_only_what_changed_travels(cluster, name):
    tensor = cluster.create_tensor(name, (6, 16_384), optimizer=es.SGD(lr=1.0))
    copy = np.full(tensor.shape, np.nan, np.float32)
    version = tensor.pull_if_newer(copy)
    assert version.changed == 6 and not copy.any()
    version = tensor.pull_if_newer(copy, version)
    assert version.changed == 0
    tensor.push(-np.ones((1, 16_384)), start=3, stop=4)
    copy[0, 0] = 77
    version = tensor.pull_if_newer(copy, version)
    assert version.changed == 1 and copy[0, 0] == 77 and copy[3].all() and not copy[4].any()
    half = cluster.create_tensor(f"{name}-half", (2, 16_384), "float16", optimizer=es.SGD(lr=1.0))
    copy = np.ones(half.shape, np.float16)
    version = half.pull_if_newer(copy)
    half.push(-np.ones(half.shape))
    assert half.pull_if_newer(copy, version).changed == 2 and np.array_equal(copy, np.ones(half.shape, np.float16))


def test_tensors_and_tables_go_together(cluster, name, sgd):
    weight = cluster.create_tensor(f"{name}-w", (300, 100), optimizer=es.SGD(lr=1.0))
    bias = cluster.create_tensor(f"{name}-b", 100, np.float16, optimizer=es.SGD(lr=1.0))
    cluster.push_many([(weight, -integers((300, 100))), (sgd, [5, 6], np.ones((2, 4))), (bias, None, -np.ones(100), 2.0)])
    whole, rows, some, half = cluster.pull_many([weight, (sgd, [[6], [5]]), (weight, (7, 9)), (bias, None)])
    assert np.array_equal(whole, integers((300, 100))) and np.array_equal(some, whole[7:9])
    assert rows.tolist() == [[[-1] * 4], [[-1] * 4]]
    assert half.dtype == np.float16 and half.tolist() == [2.0] * 100
    cluster.push_many_async([(weight, (7, 9), np.ones((2, 100))), (sgd, [5], np.ones((1, 4)))]).wait()
    assert np.array_equal(weight.pull_rows(7, 9), whole[7:9] - 1)
    with pytest.raises(es.InvalidArgument, match="twice"):
        cluster.push_many([(bias, np.ones(100)), (bias, np.ones(100))])
    with pytest.raises(es.OutOfRange):
        cluster.push_many([(bias, np.ones(100)), (weight, (299, 301), np.ones((2, 100)))])
    assert bias.pull().tolist() == [2.0] * 100


def test_a_step_sums_tensors_and_tables(cluster, name, weight):
    rows = cluster.create_table(f"{name}-rows", dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
    job = cluster.job(name, workers=1, staleness=0)
    with job.worker(0) as worker:
        worker.push(weight, -np.ones(weight.shape))
        worker.push_async(weight, -np.ones(weight.shape))
        worker.push_many([(rows, [1], np.ones((1, 4))), (weight, (0, 2), -np.ones((2, 100)))])
        assert not weight.pull().any() and not rows.pull([1]).any()
        worker.tick()
        pulled = worker.pull(weight)
        assert (pulled[:2] == 3).all() and (pulled[2:] == 2).all()
        assert rows.pull([1]).tolist() == [[-1] * 4]
        with pytest.raises(es.InvalidArgument, match="learning rate"):
            worker.push_many([(weight, None, np.ones(weight.shape), 0.5)])


def test_initial_values_are_a_pure_function_and_glorot_takes_the_shape(cluster, name):
    tensor = cluster.create_tensor(name, (300, 100), optimizer=es.SGD(lr=1.0), initializer=es.Glorot(seed=3))
    values = tensor.pull()
    bound = np.sqrt(6 / 400)
    assert np.abs(values).max() <= bound and np.abs(values).max() > 0.99 * bound
    assert abs(values.std() - bound / np.sqrt(3)) < 0.01 * bound
    assert np.array_equal(values, tensor.pull())
    assert len(np.unique(values)) > 29_000


def test_training_is_that_of_pytorch(cluster, name):
    torch.manual_seed(0)
    start = torch.randn(130, 150)
    tensor = cluster.create_tensor(name, start.shape, torch.float32, optimizer=es.Adam(lr=0.01))
    tensor.assign(start)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([theirs], lr=0.01)
    for _ in range(20):
        grad = torch.randn(130, 150)
        tensor.push(grad)
        theirs.grad = grad
        optimizer.step()
    np.testing.assert_allclose(tensor.pull(), theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_encodings_and_optimizers(weight):
    small = np.ones(weight.shape, np.float32)
    for encoding in ["bf16", "f16"]:
        weight.with_encoding(encoding).push(-small)
    weight.push(-small, encoding="bf16")
    assert (weight.pull() == 3).all()
    weight.set_optimizer(es.SGD(lr=0.5))
    weight.push(-small)
    assert (weight.pull() == 3.5).all()
    with pytest.raises(es.Conflict):
        weight.set_optimizer(es.Adam())
    weight.push(-small, lr=2.0)
    assert (weight.pull() == 5.5).all()
    with pytest.raises(es.NonFiniteGradient):
        weight.push(np.full(weight.shape, np.nan))


def test_a_tensor_may_be_pickled(cluster, weight):
    weight.push(-integers(weight.shape))
    copy = pickle.loads(pickle.dumps(weight))
    try:
        assert copy.shape == weight.shape and copy.cluster is not cluster
        assert np.array_equal(copy.pull(), integers(weight.shape))
    finally:
        copy.cluster.close()
