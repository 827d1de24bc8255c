"""What a table is made of: optimizers and initialisers, as plain values.

They are the arguments of :meth:`evershard.Cluster.create_table`, and what :class:`evershard.Table` shows.

Not here: their arithmetic, which runs on the servers.
"""

from __future__ import annotations

import dataclasses
from typing import Union

__all__ = ["SGD", "Adagrad", "Adam", "Initializer", "Normal", "Optimizer", "Uniform", "Zeros"]


@dataclasses.dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: ``w -= lr * g``, as ``torch.optim.SGD`` without momentum."""

    lr: float = 0.01
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi et al. 2011), as ``torch.optim.Adagrad`` with ``lr_decay=0``."""

    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015), lazy: each row counts its own steps for the bias correction."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Zeros:
    """Rows never pushed read as zeros."""


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Rows never pushed are uniform over ``[low, high)``: a pure function of (seed, id, column)."""

    low: float = -0.05
    high: float = 0.05
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Normal:
    """Rows never pushed are normal: a pure function of (seed, id, column)."""

    mean: float = 0.0
    std: float = 0.01
    seed: int = 0


Optimizer = Union[SGD, Adagrad, Adam]
Initializer = Union[Zeros, Uniform, Normal]
