"""PyTorch modules whose weights live on an Evershard cluster.

* :class:`Embedding` and :class:`EmbeddingBag` take the place of ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag``:
  the forward pass pulls the distinct rows of the batch, the backward pass pushes their gradients.
* :class:`DenseParameters` keeps the ordinary parameters of a module (its linear layers) on the cluster as well.
* :class:`EmbeddingGroup` pulls all of these together, and pushes all their gradients together: one wait for the forward
  pass of a whole model, one for its backward pass.

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

from evershard.torch_dense import DenseParameters

__all__ = ["DenseParameters", "Embedding", "EmbeddingBag", "EmbeddingGroup"]


class _Request(NamedTuple):
    """Rows that one module wants for one forward pass, and what it makes of them. (Of a dense tensor: all, without ids.)"""

    table: Any
    ids: np.ndarray
    lr: Optional[float]
    finish: Callable[[torch.Tensor], Any]


class _Exchange:
    """One pull of several tables' rows, and the push of their gradients that belongs to it."""

    def __init__(self, requests: List[_Request], worker: Any):
        self.requests = requests
        self.worker = worker
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
        if items and self.worker is not None:
            self.worker.push_many_async(items)
        elif items:
            self.cluster.push_many(items)


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


def _run(requests: List[_Request], trains: List[bool], worker: Any) -> List[Any]:
    """Pulls, lets gradients flow back to the requests that train, and gives each module's output."""
    exchange = _Exchange(requests, worker)
    rows = exchange.pull()
    if torch.is_grad_enabled() and any(trains):
        anchor = torch.empty(0, requires_grad=True)
        tracked = _PulledRows.apply(anchor, exchange, *rows)
        rows = [t if train else r for t, r, train in zip(tracked, rows, trains)]
    return [request.finish(row) for request, row in zip(requests, rows)]


def _table(table, cluster, dim, optimizer, initializer):
    """The table given, or the one of that name: created when an optimizer is given, else looked up."""
    if isinstance(table, str):
        if cluster is None:
            raise ValueError(f"table={table!r} is a name: say in which cluster=, or give an evershard.Table")
        if optimizer is None:
            table = cluster.table(table)
        else:
            if dim is None:
                raise ValueError(f"creating table {table!r} needs embedding_dim")
            table = cluster.create_table(table, dim=dim, optimizer=optimizer, initializer=initializer)
    elif optimizer is not None or initializer is not None:
        raise ValueError("optimizer= and initializer= are for a table given by its name")
    if dim is not None and dim != table.dim:
        raise ValueError(f"embedding_dim is {dim}, but table {table.name!r} has dim {table.dim}")
    return table


def _ids(ids: Any) -> Tuple[np.ndarray, Tuple[int, ...]]:
    """Ids as ``int64[n]`` (a u64 id keeps its bits) and their shape."""
    array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"ids must be integers, not {array.dtype}")
    if array.dtype == np.uint64:
        return np.ascontiguousarray(array).view(np.int64).reshape(-1), array.shape
    return np.ascontiguousarray(array, np.int64).reshape(-1), array.shape


class _Rows(nn.Module):
    """What `Embedding` and `EmbeddingBag` share: a table, and ids to distinct rows."""

    def __init__(self, num_embeddings, embedding_dim, padding_idx, table, cluster, optimizer, initializer, lr, encoding):
        super().__init__()
        self.table = _table(table, cluster, embedding_dim, optimizer, initializer)
        if encoding is not None:
            self.table = self.table.with_encoding(encoding)
        self.num_embeddings = num_embeddings
        self.embedding_dim = self.table.dim
        if padding_idx is not None and padding_idx < 0 and num_embeddings is not None:
            padding_idx += num_embeddings
        self.padding_idx = padding_idx
        self.lr = lr
        #: The :class:`evershard.Worker` whose steps the gradients are part of; None: each push counts by itself.
        self.worker: Any = None

    def _distinct(self, ids: np.ndarray) -> Tuple[np.ndarray, torch.Tensor, Optional[int]]:
        """Distinct ids to pull, for each id the row it means, and the row that stands for padding (last, not pulled)."""
        limit = self.num_embeddings
        if limit is not None and len(ids) and (ids.min() < 0 or ids.max() >= limit):
            raise IndexError(f"id out of range for {limit} embeddings: {ids[(ids < 0) | (ids >= limit)][0]}")
        distinct, inverse = np.unique(ids, return_inverse=True)
        inverse = inverse.reshape(-1)
        padding = None
        if self.padding_idx is not None:
            at = np.searchsorted(distinct, self.padding_idx)
            if at < len(distinct) and distinct[at] == self.padding_idx:
                distinct = np.delete(distinct, at)
                padding = len(distinct)
                inverse = np.where(inverse == at, padding, inverse - (inverse > at))
        return distinct.view(np.uint64), torch.from_numpy(inverse.astype(np.int64, copy=False)), padding

    def _with_padding(self, rows: torch.Tensor, padding: Optional[int]) -> torch.Tensor:
        return rows if padding is None else torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings or 'any id'}, {self.embedding_dim}, table={self.table.name!r}{padding}"


class Embedding(_Rows):
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
        ids, shape = _ids(input)
        distinct, inverse, padding = self._distinct(ids)

        def finish(rows: torch.Tensor) -> torch.Tensor:
            weight = self._with_padding(rows, padding)
            return functional.embedding(inverse, weight, padding).reshape(*shape, self.embedding_dim)

        return _Request(self.table, distinct, self.lr, finish)

    def forward(self, input: Any) -> torch.Tensor:
        """Rows of ``input`` (integer tensor or array of any shape): ``float32[*input.shape, dim]``."""
        return _run([self._plan(input)], [self.training], self.worker)[0]


class EmbeddingBag(_Rows):
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
        ids, shape = _ids(input)
        if len(shape) == 2 and offsets is None:
            starts = np.arange(shape[0], dtype=np.int64) * shape[1]
            last_included = False
        elif len(shape) == 1 and offsets is not None:
            starts, _ = _ids(offsets)
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
        return _run([self._plan(input, offsets, per_sample_weights)], [self.training], self.worker)[0]


class EmbeddingGroup(nn.Module):
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

    def forward(self, inputs: Mapping[str, Any]) -> Dict[str, torch.Tensor]:
        """Outputs by name, for the inputs by name: ids, or a tuple of the embedding's arguments."""
        names = list(inputs)
        unknown = [name for name in names if name not in self.embeddings]
        if unknown:
            raise KeyError(f"no such embedding in the group: {', '.join(unknown)}")
        requests, trains = [], []
        for name in names:
            module, value = self.embeddings[name], inputs[name]
            requests.append(module._plan(*value) if isinstance(value, tuple) else module._plan(value))
            trains.append(self.training and module.training)
        if self.dense is not None:
            plans = self.dense._plans()
            requests.extend(plans)
            trains.extend([self.training] * len(plans))
        self.last_rows = sum(len(request.ids) for request in requests if request.ids is not None)
        if not requests:
            return {}
        return dict(zip(names, _run(requests, trains, self.worker)))
