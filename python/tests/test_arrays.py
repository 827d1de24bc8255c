"""Ids and rows on their way to the native module. No cluster."""

import numpy as np
import pytest
import torch

from evershard.arrays import as_ids, as_rows

MAX = 2**64 - 1


@pytest.mark.parametrize(
    "ids",
    [
        [0, 1, MAX, MAX - 1, -(2**63)],
        np.array([0, 1, -1, -2, -(2**63)], np.int64),
        np.array([0, 1, MAX, MAX - 1, 2**63], np.uint64),
        torch.tensor([0, 1, -1, -2, -(2**63)]),
    ],
    ids=["list", "int64", "uint64", "tensor"],
)
def test_every_64_bit_id_is_ordinary(ids):
    array, shape = as_ids(ids)
    assert shape == (5,)
    assert array.dtype == np.uint64
    assert [int(i) for i in array] == [0, 1, MAX, MAX - 1, 2**63]


def test_narrow_integers_keep_their_sign():
    assert [int(i) for i in as_ids(np.array([-1, 3], np.int32))[0]] == [MAX, 3]
    assert [int(i) for i in as_ids(np.array([7], np.uint32))[0]] == [7]
    assert [int(i) for i in as_ids(torch.tensor([-1, 3], dtype=torch.int32))[0]] == [MAX, 3]


def test_nothing_is_copied_that_fits():
    for ids in (np.arange(10, dtype=np.uint64), np.arange(10), torch.arange(10)):
        memory = ids if isinstance(ids, np.ndarray) else ids.numpy()
        assert np.shares_memory(as_ids(ids)[0], memory)
    for rows in (np.ones((3, 4), np.float32), torch.ones(3, 4)):
        memory = rows if isinstance(rows, np.ndarray) else rows.numpy()
        assert np.shares_memory(as_rows(rows)[0], memory)


def test_shapes_are_kept():
    array, shape = as_ids(np.arange(6).reshape(2, 3))
    assert array.shape == (6,) and shape == (2, 3)
    assert as_ids(5)[1] == ()
    assert as_ids([])[0].shape == (0,)
    assert as_ids(np.arange(12).reshape(3, 4)[:, ::2])[0].tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("ids", [[1.5], np.array([1.0]), ["a"], [None], np.array([True]), torch.tensor([1.0])])
def test_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(TypeError):
        as_ids(ids)


def test_an_id_of_more_than_64_bits_is_refused():
    with pytest.raises(OverflowError):
        as_ids([2**64])


def test_rows_are_cast():
    array, shape = as_rows([[1, 2], [3, 4]])
    assert array.dtype == np.float32 and shape == (2, 2) and array.tolist() == [1, 2, 3, 4]
    assert as_rows(torch.ones(2, 2, requires_grad=True))[0].tolist() == [1, 1, 1, 1]
    with pytest.raises(TypeError):
        as_rows(["x"])
