"""What the modules of :mod:`evershard.torch` have in common: a table, and ids to distinct rows of it.

Not here: pulling and pushing (torch.py).
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np
import torch
from torch import nn

from evershard.torch_accumulate import Accumulating

__all__ = ["Rows", "ids_of"]


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


def ids_of(ids: Any) -> Tuple[np.ndarray, Tuple[int, ...]]:
    """Ids as ``int64[n]`` (a u64 id keeps its bits) and their shape."""
    array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"ids must be integers, not {array.dtype}")
    if array.dtype == np.uint64:
        return np.ascontiguousarray(array).view(np.int64).reshape(-1), array.shape
    return np.ascontiguousarray(array, np.int64).reshape(-1), array.shape


class Rows(Accumulating, nn.Module):
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

    def get_extra_state(self) -> Dict[str, Any]:
        """For ``state_dict()``: which table the weights are in. The weights stay on the cluster."""
        return {"table": self.table.name, "number": self.table.number, "dim": self.table.dim}

    def set_extra_state(self, state: Any) -> None:
        """For ``load_state_dict()``: loads nothing, and checks that the module's table is the one that was saved.

        Raises:
            ValueError: it is another table, one of another dim, or was dropped and made anew since.
        """
        if not isinstance(state, dict) or not {"table", "number", "dim"} <= state.keys():
            raise ValueError(f"this is not what an evershard.torch module saves: {state!r}")
        here = self.get_extra_state()
        if state["table"] != here["table"]:
            raise ValueError(f"the state is of table {state['table']!r}, but the module has table {here['table']!r}")
        if state["dim"] != here["dim"]:
            raise ValueError(f"table {here['table']!r} has dim {here['dim']}, but had {state['dim']} when the state was saved")
        if state["number"] != here["number"]:
            raise ValueError(
                f"table {here['table']!r} is not the one that was saved: its number is {here['number']}, and was "
                f"{state['number']}. It was dropped and made anew, or is in another cluster"
            )

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings or 'any id'}, {self.embedding_dim}, table={self.table.name!r}{padding}"
