"""PyTorch modules whose weights live on an Evershard cluster.

* :class:`Embedding` and :class:`EmbeddingBag` take the place of ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag``:
  the forward pass pulls the distinct rows of the batch, the backward pass pushes their gradients.
* :class:`DenseParameters` keeps the ordinary parameters of a module (its linear layers) on the cluster as well.
* :class:`EmbeddingGroup` pulls all of these together, and pushes all their gradients together: one wait for the forward
  pass of a whole model, one for its backward pass.
* :class:`Prefetch` pulls the rows of the next batches while the model computes.
* ``module.accumulate()`` sums the gradients of several backward passes, and pushes them once.
* :func:`from_environment` and :func:`job_from_environment` understand ``torchrun``.

The optimizer runs on the servers, once per distinct row and backward pass: these modules have no ``Parameter`` of their
own, need no ``zero_grad()`` and no local ``optimizer.step()``. Gradients of repeated ids are summed first, as PyTorch
does. Nothing is pushed in eval mode, under ``torch.no_grad()``, or for a row with no gradient.

``backward()`` returns when a quorum of replicas has the gradients; it raises an :class:`evershard.EvershardError` when
they could not be pushed. Calling ``backward()`` twice pushes twice.

In a job, set the ``worker`` of a module (or of the group that it is in) to the :class:`evershard.Worker`: its gradients are
then part of the worker's step, summed with those of all workers when the job has a staleness of 0. ``backward()`` returns
when they are on their way, and ``worker.tick()`` waits for them and raises what went wrong::

    with job.worker() as worker:
        group.worker = worker
        for position, batch in data.resume(worker.cursor):
            loss_of(group(batch)).backward()
            worker.tick(cursor=str(position).encode())

Not here: devices other than the CPU. Rows arrive in CPU memory; move what the module returns with ``.to(device)``, and
autograd brings the gradients back.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from evershard.launch import Launch, from_environment, job_from_environment
from evershard.torch_accumulate import Accumulating, Accumulation, send
from evershard.torch_dense import DenseParameters
from evershard.torch_prefetch import Prefetch, Prefetched
from evershard.torch_rows import Rows, ids_of

__all__ = [
    "Accumulation",
    "DenseParameters",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingGroup",
    "Launch",
    "Prefetch",
    "Prefetched",
    "from_environment",
    "job_from_environment",
]


class _Request(NamedTuple):
    """Rows that one module wants for one forward pass, and what it makes of them. (Of a dense tensor: all, without ids.)"""

    table: Any
    ids: np.ndarray
    lr: Optional[float]
    finish: Callable[[torch.Tensor], Any]


class _Exchange:
    """One pull of several tables' rows, and the push of their gradients that belongs to it."""

    def __init__(self, requests: List[_Request], worker: Any, owner: Optional[Accumulating] = None):
        self.requests = requests
        self.worker = worker
        self.owner = owner
        self.cluster = requests[0].table.cluster
        for request in requests:
            if request.table.cluster is not self.cluster:
                raise ValueError("the tables of an EmbeddingGroup must belong to one cluster")
            if worker is not None and request.lr is not None:
                raise ValueError("lr= is not for a worker's pushes, which are summed: give the table a schedule")
        if worker is not None and worker.job.cluster is not self.cluster:
            raise ValueError("the worker's job must be of the cluster that the tables are in")

    def pull(self) -> List[torch.Tensor]:
        """The rows, ``float32[len(ids), dim]`` for each request, or a whole tensor in its shape."""
        rows = self.cluster.pull_many([(r.table, r.ids) for r in self.requests])
        return [torch.from_numpy(r) for r in rows]

    def push(self, grads: Iterable[Optional[torch.Tensor]]) -> None:
        """Pushes the gradients of the rows that took part in the loss."""
        items = [
            (r.table, r.ids, g.detach().cpu().float().contiguous().numpy(), r.lr)
            for r, g in zip(self.requests, grads)
            if g is not None and (r.ids is None or len(r.ids))
        ]
        if self.owner is not None and self.owner.accumulation is not None:
            self.owner.accumulation.add(self.cluster, self.worker, items)
        else:
            send(self.cluster, self.worker, items)


class _PulledRows(torch.autograd.Function):
    """Identity on pulled rows whose backward pass pushes."""

    @staticmethod
    def forward(ctx, anchor, exchange, *rows):  # noqa: ARG004 - the anchor makes autograd call backward
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return tuple(row.view_as(row) for row in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        ctx.exchange.push(grads)
        return (None, None) + tuple(None for _ in grads)


def _run(
    requests: List[_Request],
    trains: List[bool],
    worker: Any,
    owner: Optional[Accumulating] = None,
    rows: Optional[List[torch.Tensor]] = None,
) -> List[Any]:
    """Pulls (unless it has the rows), lets gradients flow back to the requests that train, and gives each module's output."""
    exchange = _Exchange(requests, worker, owner)
    if rows is None:
        rows = exchange.pull()
    if torch.is_grad_enabled() and any(trains):
        anchor = torch.empty(0, requires_grad=True)
        tracked = _PulledRows.apply(anchor, exchange, *rows)
        rows = [t if train else r for t, r, train in zip(tracked, rows, trains)]
    return [request.finish(row) for request, row in zip(requests, rows)]


class Embedding(Rows):
    """``torch.nn.Embedding`` over a table of the cluster: ids of any shape ``S`` to ``float32[*S, dim]``.

    Args:
        num_embeddings: ids must be below this (``IndexError``); None: any 64-bit id is valid.
        embedding_dim: must be the table's dim when given; needed when the table is created here.
        padding_idx: this id reads as zeros and gets no gradient; the servers never see it.
        table: an :class:`evershard.Table`, or the name of one in ``cluster``.
        cluster: an :class:`evershard.Cluster`, for a table given by name.
        optimizer, initializer: create the table (idempotent), as :meth:`evershard.Cluster.create_table`.
        lr: learning rate of every push, in place of the table's; may be changed between steps.
        gradient_encoding: how gradients travel, as for :meth:`evershard.Table.with_encoding`; the table handle's by default.
    """

    def __init__(
        self,
        num_embeddings: Optional[int] = None,
        embedding_dim: Optional[int] = None,
        padding_idx: Optional[int] = None,
        *,
        table: Any,
        cluster: Any = None,
        optimizer: Any = None,
        initializer: Any = None,
        lr: Optional[float] = None,
        gradient_encoding: Optional[str] = None,
    ):
        super().__init__(num_embeddings, embedding_dim, padding_idx, table, cluster, optimizer, initializer, lr, gradient_encoding)

    def _plan(self, input: Any) -> _Request:
        ids, shape = ids_of(input)
        distinct, inverse, padding = self._distinct(ids)

        def finish(rows: torch.Tensor) -> torch.Tensor:
            weight = self._with_padding(rows, padding)
            return functional.embedding(inverse, weight, padding).reshape(*shape, self.embedding_dim)

        return _Request(self.table, distinct, self.lr, finish)

    def forward(self, input: Any) -> torch.Tensor:
        """Rows of ``input`` (integer tensor or array of any shape): ``float32[*input.shape, dim]``."""
        return _run([self._plan(input)], [self.training], self.worker, self)[0]


class EmbeddingBag(Rows):
    """``torch.nn.EmbeddingBag`` over a table of the cluster: bags of ids to the sum or mean of their rows.

    ``mode`` is ``"sum"`` or ``"mean"``; an empty bag gives zeros. The other arguments are as for :class:`Embedding`;
    ids equal to ``padding_idx`` do not count in the mean.
    """

    def __init__(
        self,
        num_embeddings: Optional[int] = None,
        embedding_dim: Optional[int] = None,
        mode: str = "mean",
        padding_idx: Optional[int] = None,
        *,
        table: Any,
        cluster: Any = None,
        optimizer: Any = None,
        initializer: Any = None,
        lr: Optional[float] = None,
        gradient_encoding: Optional[str] = None,
        include_last_offset: bool = False,
    ):
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode must be 'sum' or 'mean', not {mode!r}")
        super().__init__(num_embeddings, embedding_dim, padding_idx, table, cluster, optimizer, initializer, lr, gradient_encoding)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def _plan(self, input: Any, offsets: Any = None, per_sample_weights: Optional[torch.Tensor] = None) -> _Request:
        ids, shape = ids_of(input)
        if len(shape) == 2 and offsets is None:
            starts = np.arange(shape[0], dtype=np.int64) * shape[1]
            last_included = False
        elif len(shape) == 1 and offsets is not None:
            starts, _ = ids_of(offsets)
            last_included = self.include_last_offset
        else:
            raise ValueError("give ids of shape [bags, n], or flat ids of shape [n] with offsets")
        distinct, inverse, padding = self._distinct(ids)
        starts_tensor = torch.from_numpy(np.array(starts))
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)

        def finish(rows: torch.Tensor) -> torch.Tensor:
            return functional.embedding_bag(
                inverse,
                self._with_padding(rows, padding),
                starts_tensor,
                mode=self.mode,
                per_sample_weights=weights,
                include_last_offset=last_included,
                padding_idx=padding,
            )

        return _Request(self.table, distinct, self.lr, finish)

    def forward(
        self, input: Any, offsets: Any = None, per_sample_weights: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Bags to ``float32[bags, dim]``.

        Args:
            input: ids of shape ``[bags, n]``, or flat ids ``[n]`` with ``offsets``.
            offsets: ``[bags]``, where each bag begins in the flat ids.
            per_sample_weights: a factor for each id (mode ``"sum"`` only); gradients flow to it.
        """
        return _run([self._plan(input, offsets, per_sample_weights)], [self.training], self.worker, self)[0]


class EmbeddingGroup(Accumulating, nn.Module):
    """Several embeddings pulled at the same time, and their gradients pushed together: tables share messages.

    Args:
        embeddings: name -> :class:`Embedding` or :class:`EmbeddingBag`, all of one cluster.
        dense: a :class:`DenseParameters` that is pulled and pushed along with them.

    Example::

        group = EmbeddingGroup({"user": Embedding(table=users), "genre": EmbeddingBag(table=genres)})
        out = group({"user": user_ids, "genre": (genre_ids, offsets)})
        loss_of(out["user"], out["genre"]).backward()      # one push for both tables
    """

    def __init__(
        self, embeddings: Mapping[str, Union[Embedding, EmbeddingBag]], dense: Optional[DenseParameters] = None
    ):
        super().__init__()
        self.embeddings = nn.ModuleDict(dict(embeddings))
        self.dense = dense
        #: As for :class:`Embedding`; counts for all that is in the group.
        self.worker: Any = None
        #: Distinct rows that the last forward pass pulled, over all tables.
        self.last_rows = 0

    def forward(self, inputs: Union[Mapping[str, Any], Prefetched]) -> Dict[str, torch.Tensor]:
        """Outputs by name, for the inputs by name: ids, or a tuple of the embedding's arguments. Or for what a
        :class:`Prefetch` gave, whose rows are here already."""
        rows = None
        if isinstance(inputs, Prefetched):
            rows, requests = inputs.rows_for(self), inputs.requests
            inputs = inputs.inputs
        else:
            requests = self._plan(inputs)
        trains = [self.training and self.embeddings[name].training for name in inputs]
        if self.dense is not None:
            trains.extend([self.training] * (len(requests) - len(trains)))
        self.last_rows = sum(len(request.ids) for request in requests if request.ids is not None)
        if not requests:
            return {}
        return dict(zip(inputs, _run(requests, trains, self.worker, self, rows)))

    def _plan(self, inputs: Mapping[str, Any]) -> List[_Request]:
        """What a forward pass pulls, in the order of `inputs`; the dense parameters last."""
        unknown = [name for name in inputs if name not in self.embeddings]
        if unknown:
            raise KeyError(f"no such embedding in the group: {', '.join(unknown)}")
        requests = []
        for name, value in inputs.items():
            module = self.embeddings[name]
            requests.append(module._plan(*value) if isinstance(value, tuple) else module._plan(value))
        if self.dense is not None:
            requests.extend(self.dense._plans())
        return requests

    def _pull(self, requests: List[_Request]) -> List[torch.Tensor]:
        """The rows that a forward pass with these requests needs."""
        return _Exchange(requests, self.worker).pull() if requests else []
