"""Rows of the next batches, pulled while the model computes.

::

    with Prefetch(group, batches, inputs=lambda batch: {"user": batch.user, "item": batch.item}) as ready:
        for batch in ready:
            out = group(batch)                       # the rows are here already
            loss_of(out, batch.batch.label).backward()
            worker.tick(...)

A thread takes the next batches and pulls their rows, at most ``depth`` of them ahead of the batch that was given last.

What a prefetched row is: the pull for batch *n* begins after batch *n - depth* was asked for, and not before. So, when each
batch is trained, pushed and ticked before the next one is asked for:

* it has the pushes of this process for batches before *n - depth*, and may or may not have those for the ``depth`` batches
  since: without prefetching it has all of them (read-your-writes);
* in a job whose staleness is *s*, it has of every other worker the first *n - depth - s* steps. :attr:`Prefetch.staleness` is
  that sum. A training that shall never read further back than *t* steps has a job with a staleness of *t - depth*;
* a worker with *f* steps in flight (:meth:`evershard.Job.worker`) makes it *f* steps more, of its own pushes too.

Rows that nobody writes to are the same as without prefetching, and so is the model's output.

In a job with a staleness of 0 every pull must have all of the last step: nothing is pulled ahead there. :class:`Prefetch` then
pulls each batch when it is asked for (:attr:`Prefetch.depth` is 0), and the same program runs in step.

Not here: what is pulled, and what becomes of it (torch.py).
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional

__all__ = ["Prefetch", "Prefetched"]


class Prefetched:
    """A batch whose rows were pulled: an :class:`evershard.torch.EmbeddingGroup` takes it in place of inputs."""

    def __init__(self, group: Any, batch: Any, inputs: Mapping[str, Any], requests: List[Any], rows: List[Any], ahead: bool):
        #: The batch, as the iterable gave it.
        self.batch = batch
        #: What ``inputs`` made of it: arguments of the group's embeddings, by name.
        self.inputs = inputs
        #: What the group asked for, in its own words.
        self.requests = requests
        self._group = group
        self._rows = rows
        self._ahead = ahead

    def rows_for(self, group: Any) -> List[Any]:
        """The rows, for the group that they were pulled for.

        Raises:
            ValueError: for another group, or for a step of a job that must not read behind its last step.
        """
        if group is not self._group:
            raise ValueError("these rows were prefetched for another EmbeddingGroup")
        if self._ahead and _in_step(group.worker):
            raise ValueError("rows pulled ahead are not for a job with a staleness of 0: set the worker before prefetching")
        return self._rows


class Prefetch:
    """An iterator over ``batches`` that gives each as a :class:`Prefetched`; see the head of this module.

    Args:
        group: the :class:`evershard.torch.EmbeddingGroup` that will take them; its ``worker`` must be set before.
        batches: iterated over by the thread. A ``DataLoader`` starts its processes here, before the thread.
        inputs: called by the thread: the group's inputs for a batch. By default the batch itself.
        depth: how many batches ahead; 1 is double buffering. 0: each is pulled when it is asked for.

    An exception of ``batches``, ``inputs`` or a pull is raised where its batch would have been given, and ends the iteration.
    The thread ends with the last batch, with :meth:`close` (the ``with`` block), or when the iterator is forgotten.
    """

    def __init__(
        self,
        group: Any,
        batches: Iterable[Any],
        inputs: Optional[Callable[[Any], Mapping[str, Any]]] = None,
        depth: int = 1,
    ):
        if depth < 0:
            raise ValueError(f"depth is 0 or more, not {depth}")
        worker = group.worker
        #: Batches that are pulled ahead: 0 in a job with a staleness of 0.
        self.depth = 0 if _in_step(worker) else depth
        #: How many steps a row may be behind other workers', the prefetching included; None: any number, or no job.
        self.staleness: Optional[int] = None
        if worker is not None and worker.job.staleness is not None:
            self.staleness = worker.job.staleness + worker.steps_in_flight + self.depth
        self._source = _Source(group, iter(batches), inputs, self.depth > 0)
        self._feed: Optional[_Feed] = None
        if self.depth > 0:
            self._feed = _Feed(self._source, self.depth)
            # The thread knows the feed and not this iterator, so that forgetting the iterator ends it.
            weakref.finalize(self, self._feed.stop).atexit = False
            self._feed.thread.start()

    @property
    def waiting(self) -> int:
        """Batches that are ready now."""
        return 0 if self._feed is None else self._feed.ready.qsize()

    def close(self) -> None:
        """Ends the thread, after the pull that it is at. What was pulled ahead is forgotten."""
        if self._feed is not None:
            self._feed.stop()
            self._feed.join()
        self._source.over = True

    def __iter__(self) -> Iterator[Prefetched]:
        return self

    def __next__(self) -> Prefetched:
        if self._source.over:
            raise StopIteration
        try:
            return self._source.next() if self._feed is None else self._feed.next()
        except BaseException:
            # Also Ctrl-C while it waits: a batch must not be skipped unnoticed.
            self._source.over = True
            if self._feed is not None:
                self._feed.stop()
            raise

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class _Source:
    """Batches, one after the other, with their rows."""

    def __init__(self, group: Any, batches: Iterator[Any], inputs: Optional[Callable[[Any], Any]], ahead: bool):
        self.over = False
        self._group = group
        self._batches = batches
        self._inputs = inputs
        self._ahead = ahead

    def next(self) -> Prefetched:
        batch = next(self._batches)
        inputs: Dict[str, Any] = dict(batch if self._inputs is None else self._inputs(batch))
        if self._ahead:
            _refuse_what_learns(inputs)
        requests = self._group._plan(inputs)
        return Prefetched(self._group, batch, inputs, requests, self._group._pull(requests), self._ahead)


class _Item(NamedTuple):
    """A batch, or the exception in its place; `StopIteration` after the last one."""

    value: Optional[Prefetched]
    error: Optional[BaseException]


class _Feed:
    """The thread and what it has ready.

    Invariant: batches pulled or being pulled, and not yet asked for, are `depth` at most: the thread takes a permit for
    each, and each batch that is asked for gives one.
    """

    def __init__(self, source: _Source, depth: int):
        self.ready: "queue.Queue[_Item]" = queue.Queue()
        self.thread = threading.Thread(target=_run, args=(self, source), name="evershard-prefetch", daemon=True)
        self.stopping = False
        self.permits = threading.Semaphore(depth)
        _feeds.add(self)

    def next(self) -> Prefetched:
        # The batch that is given is not ahead any more: the thread may go on with another.
        self.permits.release()
        item = self.ready.get()
        if item.error is not None:
            raise item.error
        return item.value

    def stop(self) -> None:
        self.stopping = True
        self.permits.release()

    def join(self) -> None:
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join()


def _run(feed: _Feed, source: _Source) -> None:
    while True:
        feed.permits.acquire()
        if feed.stopping:
            # Whoever waits for a batch while another thread closes hears that there are no more.
            feed.ready.put(_Item(None, StopIteration()))
            return
        try:
            feed.ready.put(_Item(source.next(), None))
        except BaseException as error:  # noqa: BLE001 - raised where the batch is asked for
            feed.ready.put(_Item(None, error))
            return


#: Feeds whose thread may run: a daemon thread inside a native call must not meet the end of the interpreter.
_feeds: "weakref.WeakSet[_Feed]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for feed in list(_feeds):
        feed.stop()
        feed.join()


def _in_step(worker: Any) -> bool:
    return worker is not None and worker.job.staleness == 0


def _refuse_what_learns(inputs: Mapping[str, Any]) -> None:
    """An input made ahead of the last optimizer step must not be what that step changes."""
    for name, value in inputs.items():
        for part in value if isinstance(value, tuple) else (value,):
            if getattr(part, "requires_grad", False):
                raise ValueError(f"input {name!r} requires a gradient: it cannot be made ahead of the step that changes it")
