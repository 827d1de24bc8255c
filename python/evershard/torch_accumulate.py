"""Gradient accumulation: the gradients of several backward passes are one push.

::

    for batches in micro_batches:
        with group.accumulate():
            for batch in batches:
                loss_of(group(batch)).backward()     # nothing is pushed
        worker.tick(...)                             # the block's end pushed the sums

Sums are by id, in float32, in the order of the backward passes: what ``Parameter.grad`` holds after the same passes in
PyTorch. Not divided by their number: divide the losses, as there.

Not here: who gives the gradients (torch.py).
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np

__all__ = ["Accumulating", "Accumulation", "send"]

#: A table, distinct ids, their gradients, and a learning rate in place of the table's; or a tensor, None, and its gradient.
_Item = Tuple[Any, Optional[np.ndarray], np.ndarray, Optional[float]]


def send(cluster: Any, worker: Any, items: List[_Item]) -> None:
    """Pushes: as part of the worker's step when there is one, else at once, returning when a quorum has them."""
    if worker is not None:
        if items:
            worker.push_many_async(items)
    elif items:
        cluster.push_many(items)


class Accumulating:
    """A module that pushes gradients, and may keep them for a while."""

    #: The block that is open, None outside of one.
    accumulation: Optional["Accumulation"] = None

    def accumulate(self) -> "Accumulation":
        """A context manager: ``backward()`` in the block pushes nothing, the end of the block pushes the sums.

        The block's end raises what the push raises. When the block ends with an exception, nothing is pushed.
        """
        return Accumulation(self)


class Accumulation:
    """Made by ``accumulate()``. Holds one float32 row for each distinct id, and each tensor once."""

    def __init__(self, owner: Accumulating):
        self._owner = owner
        self._target: Optional[Tuple[Any, Any]] = None
        self._sums: Dict[tuple, _Item] = {}

    def add(self, cluster: Any, worker: Any, items: List[_Item]) -> None:
        """Takes the gradients of one backward pass; the ids of an item are distinct."""
        if self._target is None:
            self._target = (cluster, worker)
        elif self._target[0] is not cluster or self._target[1] is not worker:
            raise ValueError("the worker (or the cluster) of a module may not change while its gradients accumulate")
        for table, ids, rows, lr in items:
            key = (table.number, table.encoding, lr)
            if key in self._sums and ids is None:
                self._sums[key][2][...] += rows
            elif key in self._sums:
                _, earlier_ids, sums, _ = self._sums[key]
                self._sums[key] = (table, *_added(earlier_ids, sums, ids, rows), lr)
            else:
                # The rows may be autograd's own memory.
                self._sums[key] = (table, ids if ids is None else np.asarray(ids, np.uint64), rows.copy(), lr)

    def __enter__(self) -> "Accumulation":
        if self._owner.accumulation is not None:
            raise RuntimeError("this module accumulates already: accumulate() does not nest")
        self._owner.accumulation = self
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._owner.accumulation = None
        sums, self._sums = self._sums, {}
        if kind is None and self._target is not None:
            send(*self._target, list(sums.values()))


def _added(ids: np.ndarray, sums: np.ndarray, more_ids: np.ndarray, more: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Both sums as one; the ids of each are distinct, those of the result as well."""
    distinct, places = np.unique(np.concatenate([ids, np.asarray(more_ids, np.uint64)]), return_inverse=True)
    places = places.reshape(-1)
    total = np.zeros((len(distinct), sums.shape[1]), np.float32)
    total[places[: len(ids)]] = sums
    total[places[len(ids) :]] += more
    return distinct, total
