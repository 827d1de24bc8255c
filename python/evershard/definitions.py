"""What a table is made of: optimizers, initialisers, and rules for which rows there are, as plain values.

They are the arguments of :meth:`evershard.Cluster.create_table`; optimizers are those of :meth:`evershard.Table.set_optimizer`
too. The learning rate of an optimizer is constant unless it has a ``schedule`` (:mod:`evershard.schedules`).

Not here: their arithmetic, which runs on the servers.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, Union

from evershard.schedules import Schedule

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Admission",
    "Constant",
    "Eviction",
    "Glorot",
    "Initializer",
    "Normal",
    "Optimizer",
    "RMSprop",
    "TruncatedNormal",
    "Uniform",
    "Zeros",
]


@dataclasses.dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: ``w -= lr * g``, as ``torch.optim.SGD``, with its momentum if given."""

    lr: float = 0.01
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    clip_value: float = 0.0
    clip_norm: float = 0.0
    schedule: Optional[Schedule] = None


@dataclasses.dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi et al. 2011), as ``torch.optim.Adagrad`` with ``lr_decay=0``.

    ``rowwise=True`` keeps one accumulator a row, of mean squares, in place of one a weight.
    """

    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    rowwise: bool = False
    clip_value: float = 0.0
    clip_norm: float = 0.0
    schedule: Optional[Schedule] = None


@dataclasses.dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015), lazy: each row counts its own steps for the bias correction."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0
    schedule: Optional[Schedule] = None


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), lazy like :class:`Adam`."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_value: float = 0.0
    clip_norm: float = 0.0
    schedule: Optional[Schedule] = None


@dataclasses.dataclass(frozen=True)
class RMSprop:
    """RMSprop, as ``torch.optim.RMSprop``; lazy: a row's means decay only when it is pushed."""

    lr: float = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0
    schedule: Optional[Schedule] = None


@dataclasses.dataclass(frozen=True)
class FTRL:
    """FTRL-proximal (McMahan et al. 2013); ``lr`` is the paper's alpha. Weights start best from zeros."""

    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0
    schedule: Optional[Schedule] = None


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


@dataclasses.dataclass(frozen=True)
class Constant:
    """Rows never pushed read as ``value`` throughout."""

    value: float = 0.0


@dataclasses.dataclass(frozen=True)
class TruncatedNormal:
    """Normal, without what lies outside ``mean + std * [low, high]``."""

    mean: float = 0.0
    std: float = 0.01
    low: float = -2.0
    high: float = 2.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Glorot:
    """Glorot and Bengio 2010 (Xavier): ``fan_in`` is how many rows are expected, ``fan_out`` the dim when 0.

    A tensor takes both from its shape when they are 0, as ``torch.nn.init.xavier_uniform_`` does.
    """

    fan_in: int = 0
    fan_out: int = 0
    gain: float = 1.0
    normal: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Admission:
    """Which ids a gradient makes a row for; until then an id reads as one that was never pushed.

    ``filter_freq``: by its n-th occurrence, repetitions within a push included; the push that reaches it trains the row.
    ``admit_probability``: this share of all ids, by a hash of ``seed`` and id; 0 and 1 mean all. Both must admit an id.
    """

    filter_freq: int = 0
    admit_probability: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Eviction:
    """Which rows go by themselves, as soon as one rule says so; 0 is no rule.

    ``expire_seconds``: not changed for longer. ``steps_to_live``: not changed while the table's step (the highest clock of its
    pushes) grew by more. ``min_l2``: the norm of the weights is below. ``max_rows``: of more rows than that over all
    shards, those that came least often.
    """

    expire_seconds: int = 0
    steps_to_live: int = 0
    min_l2: float = 0.0
    max_rows: int = 0


Optimizer = Union[SGD, Adagrad, Adam, AdamW, RMSprop, FTRL]
Initializer = Union[Zeros, Constant, Uniform, Normal, TruncatedNormal, Glorot]
