"""Evershard: a parameter server for distributed ML training that does not lose anything.

Every push that returned survives the crash of any minority of the servers, and is applied exactly once::

    import evershard as es

    cluster = es.connect("http://10.0.0.1:7400,http://10.0.0.2:7400")      # or es.local(nodes=3)
    items = cluster.create_table("items", dim=16, optimizer=es.Adagrad(lr=0.05), initializer=es.Normal(std=0.01))
    rows = items.pull(ids)            # integers [n] -> float32[n, 16]
    items.push(ids, grads)            # returns when a quorum has them

PyTorch modules are in :mod:`evershard.torch`, errors in :mod:`evershard.errors`.
"""

from evershard import errors
from evershard._evershard import PendingPush, TensorVersion, __version__
from evershard.cluster import Cluster, connect
from evershard.definitions import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Admission,
    Constant,
    Eviction,
    Glorot,
    Initializer,
    Normal,
    Optimizer,
    RMSprop,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from evershard.errors import *  # noqa: F403 - the errors' own __all__
from evershard.job import Job, Worker
from evershard.local import LocalCluster, local
from evershard.schedules import Cosine, Schedule, StepDecay, WarmUp
from evershard.table import Table
from evershard.tensor import Tensor

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Admission",
    "Cluster",
    "Constant",
    "Cosine",
    "Eviction",
    "Glorot",
    "Initializer",
    "Job",
    "LocalCluster",
    "Normal",
    "Optimizer",
    "PendingPush",
    "RMSprop",
    "Schedule",
    "StepDecay",
    "Table",
    "Tensor",
    "TensorVersion",
    "TruncatedNormal",
    "Uniform",
    "WarmUp",
    "Worker",
    "Zeros",
    "__version__",
    "connect",
    "local",
    *errors.__all__,
]
