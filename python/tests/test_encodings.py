"""Gradients as bf16, f16 and int8: rounded as documented, and with what int8 leaves out added later."""

import pickle

import numpy as np
import pytest

import evershard as es


@pytest.mark.parametrize("encoding, relative", [("bf16", 2.0**-8), ("f16", 2.0**-11), ("int8", 1 / 254)])
def test_gradients_are_rounded_no_more_than_documented(sgd, encoding, relative):
    random = np.random.default_rng(0)
    grads = random.normal(0, 1, (100, 4)).astype(np.float32)
    ids = np.arange(100)
    sgd.push(ids, grads, encoding=encoding)
    error = np.abs(sgd.pull(ids) + grads)
    # bf16 and f16 round each value, int8 rounds to steps of its row's largest.
    scale = np.abs(grads) if encoding != "int8" else np.abs(grads).max(axis=1, keepdims=True)
    assert (error <= scale * relative * 1.0001).all()
    assert error.max() > 0, "it was encoded at all"


def test_what_int8_leaves_out_comes_with_the_next_gradient(sgd):
    table = sgd.with_encoding("int8")
    for _ in range(100):
        table.push([1], [[1.0, 0.001, -0.0013, 0.0]])
    sums = -table.pull([1])[0]
    np.testing.assert_allclose(sums, [100.0, 0.1, -0.13, 0.0], atol=1.01 / 127)


def test_integers_that_fit_are_exact_in_every_encoding(sgd):
    for encoding in ["f32", "bf16", "f16", "int8"]:
        sgd.push([5, 5, 6], [[1, 2, 3, 127]] * 2 + [[-127, 0, 1, 64]], encoding=encoding)
    # bf16 keeps eight bits: 254 is one of its numbers.
    assert sgd.pull([5, 6]).tolist() == [[-8, -16, -24, -1016], [508, 0, -4, -256]]


def test_a_handle_keeps_its_encoding_and_a_wrong_one_is_refused(sgd):
    table = sgd.with_encoding("bf16")
    assert (table.encoding, sgd.encoding) == ("bf16", "f32")
    assert pickle.loads(pickle.dumps(table)).encoding == "bf16"
    with pytest.raises(es.InvalidArgument, match="f64"):
        sgd.push([1], [[1, 2, 3, 4]], encoding="f64")
    with pytest.raises(es.NonFiniteGradient):
        sgd.push([1], [[70000.0, 0, 0, 0]], encoding="f16")
    assert not sgd.pull([1]).any()
