"""Jobs: the workers of a training run, in step as far as the job's staleness asks for.

A worker takes a rank under a lease; whoever had the rank before is fenced, and none of its pushes is taken any more. It
ends each step with :meth:`Worker.tick`, whose cursor says where a replacement goes on::

    job = cluster.job("ml", workers=4, staleness=2)
    with job.worker(rank) as w:
        for position, batch in data.resume(w.cursor):
            rows = w.pull(items, batch.ids)
            w.push(items, batch.ids, gradients(rows, batch))
            w.tick(cursor=str(position).encode())

Not here: who waits for whom (the servers).
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Dict, Optional, Sequence

import numpy as np

from evershard.errors import InvalidArgument, UnknownJob
from evershard.steps_in_flight import StepsInFlight
from evershard.tensor import Tensor

if TYPE_CHECKING:
    from evershard import _evershard
    from evershard.cluster import Cluster

__all__ = ["Job", "Worker"]


class Job:
    """Made by :meth:`evershard.Cluster.job`. May be pickled."""

    def __init__(
        self,
        cluster: "Cluster",
        name: str,
        workers: int,
        staleness: Optional[int],
        on_dead_worker: str,
        lease: float,
        aggregate: Optional[str] = None,
    ):
        #: The cluster it belongs to.
        self.cluster = cluster
        #: Its name.
        self.name = name
        #: How many ranks it began with.
        self.workers = workers
        #: How many steps the fastest worker may be ahead of the slowest; None: nobody waits.
        self.staleness = staleness
        self._on_dead_worker = on_dead_worker
        self._lease = lease
        self._aggregate = aggregate

    def worker(self, rank: Optional[int] = None, *, steps_in_flight: int = 0) -> "Worker":
        """Takes a rank, as a new incarnation of its worker: whoever had it is fenced when this returns.

        Args:
            rank: 0 to ``workers - 1``; the number of ranks there are, to add one more. By default ``$RANK``, as
                ``torchrun`` sets it.
            steps_in_flight: how many steps may be ended, and their pushes and ticks not over, while the next is computed: so
                many steps hide what holds these up (docs/jobs.md). They add to the job's staleness: at the beginning of its
                step *c* the worker reads, from every other worker, at least the first *c - staleness - steps_in_flight*
                steps, and as many of its own, but for the staleness. 0 in a job with a staleness of 0.

        Raises:
            JobAborted: a worker died, and the job was made to end then.
        """
        if rank is None:
            given = os.environ.get("RANK")
            if given is None or not given.isdecimal():
                raise InvalidArgument(f"worker() needs a rank: $RANK is {given!r}")
            rank = int(given)
        if rank < 0:
            raise InvalidArgument(f"a rank is 0 or more, not {rank}")
        if steps_in_flight < 0:
            raise InvalidArgument(f"steps_in_flight is 0 or more, not {steps_in_flight}")
        native = self.cluster._connection()
        handle = native.join_job(
            self.name, rank, self.workers, self.staleness, self._on_dead_worker, self._lease, self._aggregate
        )
        return Worker(self, handle, 0 if self.staleness == 0 else steps_in_flight)

    def describe(self) -> Dict[str, Any]:
        """Everybody's state now.

        Returns:
            ``{"name", "staleness", "aborted", "workers": [{"rank", "state", "epoch", "clock", "cursor",
            "waits_for"}]}``; ``state`` is ``"absent"``, ``"live"``, ``"dead"`` or ``"done"``.

        Raises:
            UnknownJob: nobody has joined it yet, or it was removed.
        """
        for job in self.cluster._connection().jobs():
            if job["name"] == self.name:
                return job
        raise UnknownJob(f"there is no job {self.name!r}: it is made with its first worker")

    def __repr__(self) -> str:
        return f"evershard.Job({self.name!r}, workers={self.workers}, staleness={self.staleness})"


class Worker:
    """An incarnation of a rank. Use it as a context manager: it leaves its job at the end.

    When the block ends with an exception it does not leave: its lease ends, and the job's policy decides what becomes of
    the others; a replacement goes on from the last tick.
    """

    def __init__(self, job: Job, handle: "_evershard.WorkerHandle", steps_in_flight: int = 0):
        #: The job.
        self.job = job
        #: How many steps may be ended and not over; 0 in a job with a staleness of 0.
        self.steps_in_flight = steps_in_flight
        #: Its rank.
        self.rank: int = handle.rank
        #: Its fencing epoch: of two that claim the rank, the higher one has it.
        self.epoch: int = handle.epoch
        self._handle = handle
        self._steps: Optional[StepsInFlight] = None
        if steps_in_flight > 0:
            self._steps = StepsInFlight(handle, steps_in_flight)
            # The thread does not know the worker, so that forgetting the worker ends it.
            weakref.finalize(self, self._steps.stop).atexit = False

    @property
    def clock(self) -> int:
        """Steps that the rank has done, by whichever incarnation; those in flight are waited for."""
        self._drain()
        return self._handle.clock

    @property
    def cursor(self) -> bytes:
        """What the rank's last tick said; empty before the first. Steps in flight are waited for."""
        self._drain()
        return self._handle.cursor

    def pull(self, table: Any, ids: Any = None, out: Optional[np.ndarray] = None) -> np.ndarray:
        """Reads rows of a table, or a tensor, see :meth:`Table.pull` and :meth:`Tensor.pull`: every push of the steps that the
        staleness promises is in them.
        """
        return table.pull(out) if isinstance(table, Tensor) else table.pull(ids, out)

    def push(self, table: Any, ids: Any, grads: Any = None) -> None:
        """Gradients as part of this step: of a table ``push(table, ids, grads)``, see :meth:`Table.push`, of a tensor
        ``push(tensor, grad)``, see :meth:`Tensor.push`. Returns when a quorum has them. With a staleness of 0 they are summed
        over all workers and applied when the step ends: this returns when the leaders have them in memory.

        Raises:
            Fenced: another has the rank, or the lease ended.
        """
        self.push_many([_item(table, ids, grads)])

    def push_async(self, table: Any, ids: Any, grads: Any = None) -> None:
        """The same, and returns at once: :meth:`tick` waits for it, and raises what went wrong with it."""
        self.push_many_async([_item(table, ids, grads)])

    def push_many(self, items: Sequence[tuple]) -> None:
        """Gradients of several tables and tensors as part of this step, as for :meth:`Cluster.push_many`, without a rate."""
        self._push_many(items, True)

    def push_many_async(self, items: Sequence[tuple]) -> None:
        """The same, and returns at once: :meth:`tick` waits for it, and raises what went wrong with it."""
        self._push_many(items, False)

    def tick(self, cursor: bytes = b"") -> None:
        """Ends the step, and returns when the job's staleness allows the next one. With steps in flight: when no more than those
        are; it then raises what went wrong with an earlier step, and so does every later call. Take the rank again to go on, at
        the cursor of the last step that is over.

        Args:
            cursor: at most 16 KiB; where a replacement would go on.

        Raises:
            Fenced, JobAborted: it is over for this worker.
            DeadlineExceeded: the cluster did not answer; the step may have ended, and the same call may be made again.
        """
        if self._steps is not None:
            self._steps.tick(bytes(cursor))
        else:
            self._handle.tick(bytes(cursor))

    def barrier(self) -> None:
        """Waits until every worker has come to its barrier of the same number."""
        self._drain()
        self._handle.barrier()

    def leave(self) -> None:
        """Its part is done: nobody waits for it any more."""
        self._drain()
        if self._steps is not None:
            self._steps.stop()
            self._steps.join()
        self._handle.leave()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self.leave()
            return
        if self._steps is not None:
            self._steps.abandon()
        else:
            self._handle.abandon()

    def __repr__(self) -> str:
        return f"evershard.Worker({self.job.name!r}, rank={self.rank}, epoch={self.epoch})"

    def _push_many(self, items: Sequence[tuple], and_wait: bool) -> None:
        cluster = self.job.cluster
        for group, lr in cluster._groups(cluster._connection(), items, None):
            if lr is not None:
                raise InvalidArgument("a worker's pushes are at the table's own learning rate")
            if self._steps is not None and not and_wait:
                self._steps.push(group)
                continue
            self._drain()
            self._handle.push_many(group, and_wait)

    def _drain(self) -> None:
        """Waits for steps in flight."""
        if self._steps is not None:
            self._steps.drain()


def _item(table: Any, ids: Any, grads: Any) -> tuple:
    """A push of one table or tensor: of a tensor the gradient stands in the place of the ids."""
    if grads is None:
        if not isinstance(table, Tensor):
            raise TypeError("push() of a table needs ids and gradients")
        return (table, ids)
    return (table, ids, grads)
