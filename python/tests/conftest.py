"""One cluster of real processes for all tests; each test has tables of its own.

The binary is $EVERSHARD_BIN, or what `evershard.local.find_binary` finds. Without it, tests that need a cluster are skipped
with the reason; tests of pure Python run all the same.
"""

import itertools
import os

import pytest

import evershard as es
from evershard.local import find_binary

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def binary():
    """Path of the server binary."""
    try:
        return find_binary()
    except es.InvalidArgument as error:
        if "EVERSHARD_BIN" in os.environ:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cluster(binary, tmp_path_factory):
    """Three nodes, eight shards; kept for the session, so no test may kill its nodes."""
    with es.local(3, 8, str(tmp_path_factory.mktemp("cluster"))) as cluster:
        yield cluster


@pytest.fixture
def name():
    """A table name that no other test uses."""
    return f"test-{next(_numbers)}"


@pytest.fixture
def sgd(cluster, name):
    """A table of dim 4 with SGD, lr = 1, zeros: a pull shows the negated sum of all pushes."""
    return cluster.create_table(name, dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
