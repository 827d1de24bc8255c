"""Servers die while Python pushes: every acknowledged push is there once, and a cluster that is gone is a typed error."""

import collections

import numpy as np
import pytest

import evershard as es


def busiest(cluster):
    led = collections.Counter(s["leader"] for s in cluster.routing()["shards"])
    led.pop(0, None)
    return led.most_common(1)[0][0]


def test_kill_nine_between_pushes(binary, tmp_path):
    ids = np.arange(512)
    with es.local(3, 4, str(tmp_path), timeout=60.0) as cluster:
        table = cluster.create_table("t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
        account = np.zeros((512, 2), np.int64)
        random = np.random.default_rng(0)

        def push(times):
            for _ in range(times):
                chosen = random.integers(0, 512, 64)
                units = random.integers(1, 4, (64, 2))
                table.push(chosen, units.astype(np.float32))
                np.add.at(account, chosen, units)

        push(20)
        for _ in range(2):
            node = busiest(cluster)
            in_flight = [table.push_async([7], [[1.0, 1.0]]) for _ in range(8)]
            cluster.kill_node(node)
            for handle in in_flight:
                handle.wait()
                account[7] += 1
            push(20)
            cluster.start_node(node)
            push(20)
        assert np.array_equal(table.pull(ids), -account.astype(np.float32))


def test_all_replicas_down(binary, tmp_path):
    with es.local(1, 1, str(tmp_path), timeout=2.0) as cluster:
        table = cluster.create_table("t", dim=1, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
        table.push([1], [[1.0]])
        cluster.kill_node(1)
        with pytest.raises(es.EvershardError):
            table.pull([1])
        with pytest.raises(es.EvershardError):
            table.push([1], [[1.0]])
        cluster.start_node(1)
        again = es.connect(",".join(cluster.endpoints), timeout=30.0)
        assert again.table("t").pull([1])[0, 0] in (-1, -2)  # The push's outcome was unknown, and said to be.
        again.close()
