"""The ordinary parameters of a PyTorch module, on the cluster: see :mod:`evershard.torch`, which has what is here.

Not here: embeddings, and how pulls and pushes go together with autograd.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from evershard.tensor import Tensor

__all__ = ["DenseParameters"]

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class _TensorRequest(NamedTuple):
    """One whole tensor for one forward pass, as a `_Request` of evershard.torch."""

    table: Tensor
    ids: None
    lr: Optional[float]
    finish: Callable[[torch.Tensor], Any]


class _Place(NamedTuple):
    """Where the module has a parameter."""

    owner: nn.Module
    name: str
    full_name: str
    #: Its number among the distinct parameters.
    number: int


class DenseParameters:
    """The parameters of a module, each kept on the cluster as a tensor, so that all workers train the same ones.

    The module's trainable ``Parameter`` objects are taken out (frozen ones and empty ones stay; shared ones stay shared);
    before each use the values come from the cluster as plain tensors (:meth:`pull`, or together with an
    :class:`EmbeddingGroup`), all in one round trip, and ``backward()`` pushes their gradients together. A parameter is the
    tensor ``<name>.<its name in module.named_parameters()>``, of its own shape and dtype (``float32``, ``float16`` or
    ``bfloat16``; the servers keep ``float32``, so that small steps are not lost).

    One worker calls :meth:`initialize` once, before training starts, to publish its module's initial values.

    Args:
        module: loses its trainable parameters to the cluster.
        cluster: an :class:`evershard.Cluster`.
        name: of the model: what its tensors' names begin with.
        optimizer: create the tensors (idempotent), as :meth:`evershard.Cluster.create_tensor`. None: they exist.
        lr: learning rate of every push, in place of the tensors'; may be changed between steps.
        gradient_encoding: how gradients travel, as for :meth:`evershard.Tensor.with_encoding`.
        worker: as for :class:`Embedding`.

    Example::

        dense = DenseParameters(net, cluster, "net", optimizer=es.Adam(lr=1e-3))
        if rank == 0:
            dense.initialize()
        ...
        dense.pull()
        loss_of(net(batch)).backward()      # one push
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Any,
        name: str,
        *,
        optimizer: Any = None,
        lr: Optional[float] = None,
        gradient_encoding: Optional[str] = None,
        worker: Any = None,
    ):
        self.module = module
        self.cluster = cluster
        self.name = name
        self.lr = lr
        #: As for :class:`Embedding`.
        self.worker: Any = worker
        places, initial = _take_out(module)
        if not initial:
            raise ValueError("the module has no parameters")
        names = [next(place.full_name for place in places if place.number == number) for number in range(len(initial))]
        for parameter, of in zip(initial, names):
            if parameter.dtype not in _DTYPES:
                raise TypeError(f"parameter {of} is of {parameter.dtype}: a tensor is of float32, float16 or bfloat16")
        if optimizer is None:
            tensors = [cluster.tensor(f"{name}.{of}") for of in names]
            for tensor, parameter in zip(tensors, initial):
                if tensor.shape != tuple(parameter.shape) or tensor.dtype != _DTYPES[parameter.dtype]:
                    raise ValueError(f"the module has {list(parameter.shape)} of {parameter.dtype} for {tensor!r}")
        else:
            tensors = cluster._create_tensors(
                [(f"{name}.{of}", p.shape, p.dtype, optimizer, None) for p, of in zip(initial, names)]
            )
        if gradient_encoding is not None:
            tensors = [tensor.with_encoding(gradient_encoding) for tensor in tensors]
        #: By parameter name; a shared one under its first name.
        self.tensors: Dict[str, Tensor] = dict(zip(names, tensors))
        self._places = places
        self._initial = initial
        for place in places:
            del place.owner._parameters[place.name]
        for number, values in enumerate(initial):
            self._load(number, values)

    @property
    def numel(self) -> int:
        """Values on the cluster."""
        return sum(tensor.size for tensor in self.tensors.values())

    def initialize(self) -> None:
        """Publishes the values that the module was constructed with. Overwrites what is there: call it in one worker."""
        for tensor, values in zip(self.tensors.values(), self._initial):
            tensor.assign(values)

    def pull(self) -> None:
        """Loads the values now on the cluster into the module."""
        from evershard.torch import _run

        plans = self._plans()
        _run(plans, [self.module.training] * len(plans), self.worker)

    def state_dict(self) -> Dict[str, torch.Tensor]:
        """A copy of the values on the cluster, by parameter name; fits the module as it was before."""
        pulled = self.cluster.pull_many(list(self.tensors.values()))
        values = [torch.from_numpy(p).to(initial.dtype) for p, initial in zip(pulled, self._initial)]
        return {place.full_name: values[place.number].clone() for place in self._places}

    def _plans(self) -> List[_TensorRequest]:
        def loads(number: int) -> Callable[[torch.Tensor], None]:
            return lambda values: self._load(number, values)

        return [_TensorRequest(tensor, None, self.lr, loads(n)) for n, tensor in enumerate(self.tensors.values())]

    def _load(self, number: int, values: torch.Tensor) -> None:
        values = values.to(self._initial[number].dtype)
        for place in self._places:
            if place.number == number:
                setattr(place.owner, place.name, values)


def _take_out(module: nn.Module) -> Tuple[List[_Place], List[torch.Tensor]]:
    """The places of the module's trainable parameters, and the distinct ones' values."""
    places: List[_Place] = []
    values: List[torch.Tensor] = []
    seen: Dict[int, int] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.requires_grad or not parameter.numel():
                continue
            # A parameter that two modules share (tied weights) stays one: its gradients are summed.
            number = seen.setdefault(id(parameter), len(values))
            if number == len(values):
                values.append(parameter.detach().clone())
            places.append(_Place(owner, name, f"{prefix}.{name}" if prefix else name, number))
    return places, values
