"""Which rows there are: by how often ids come, and by what the rules of their table let go of."""

import numpy as np
import pytest

import evershard as es


def test_ids_are_counted_before_they_are_summed(cluster):
    admission = es.Admission(filter_freq=3)
    table = cluster.create_table("counted", dim=1, optimizer=es.SGD(lr=1.0), admission=admission)
    ids = np.array([5, 5, 5, 6], dtype=np.uint64)
    table.push(ids, -np.ones((4, 1), dtype=np.float32))
    assert table.pull(np.array([5, 6], dtype=np.uint64)).tolist() == [[3.0], [0.0]]


def test_a_rule_that_makes_no_sense_is_refused(cluster):
    with pytest.raises(es.InvalidArgument, match="admit_probability"):
        cluster.create_table("bad", dim=1, optimizer=es.SGD(), admission=es.Admission(admit_probability=2.0))
    with pytest.raises(TypeError, match="expected Eviction"):
        cluster.create_table("bad", dim=1, optimizer=es.SGD(), eviction=es.Admission())
    eviction = es.Eviction(expire_seconds=86_400, max_rows=1_000_000)
    cluster.create_table("kept", dim=1, optimizer=es.SGD(), eviction=eviction)
    with pytest.raises(es.Conflict, match="eviction"):
        cluster.create_table("kept", dim=1, optimizer=es.SGD())
