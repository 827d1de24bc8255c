"""A connection to a cluster: tables and tensors by name, and operations over several tables at once.

Safe to use from several threads. A :class:`Cluster` may be pickled: the copy connects to the same endpoints, with a
session of its own, on its first use. After ``os.fork()`` the child likewise connects anew on its first use (threads,
sockets and sessions are not shared with the parent); a push that was in flight at the fork belongs to the parent.

Every call waits with the GIL released, and Ctrl-C interrupts it.

Not here: the wire, retries, exactly-once numbering: the Rust client does all that.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from evershard import _evershard
from evershard.arrays import as_ids
from evershard.definitions import Admission, Eviction, Initializer, Optimizer
from evershard.errors import AlreadyClosed, InvalidArgument
from evershard.job import Job
from evershard.schedules import Cosine, StepDecay, WarmUp
from evershard.table import Table
from evershard.tensor import Tensor, dtype_name

__all__ = ["Cluster", "connect"]


def connect(
    urls: Union[str, Sequence[str]],
    *,
    timeout: float = 30.0,
    connect_timeout: float = 10.0,
) -> "Cluster":
    """Connects to a cluster.

    Args:
        urls: addresses of one or more nodes, as a list or comma-separated: ``"http://10.0.0.1:7400,http://..."``.
            The client learns the other nodes from them.
        timeout: seconds an operation may take, retries and failovers included, before it raises
            :class:`~evershard.errors.DeadlineExceeded`.
        connect_timeout: seconds to find a first node that answers.

    Raises:
        Unavailable: nothing answered; the message names the addresses tried.
        InvalidArgument: an address is malformed.

    Example::

        with es.connect("http://127.0.0.1:7400") as cluster:
            items = cluster.create_table("items", dim=16, optimizer=es.Adagrad(lr=0.05))
    """
    cluster = Cluster(urls, timeout=timeout, connect_timeout=connect_timeout)
    cluster._connection()
    return cluster


class Cluster:
    """A cluster of Evershard servers. Made by :func:`evershard.connect`; use it as a context manager, or ``close()`` it."""

    def __init__(self, urls: Union[str, Sequence[str]], **options: Any):
        parts = urls.split(",") if isinstance(urls, str) else list(urls)
        self._endpoints: Tuple[str, ...] = tuple(part.strip() for part in parts if part.strip())
        self._options: Dict[str, Any] = options
        self._closed = False
        self._native: Optional[_evershard.Connection] = None
        self._pid = os.getpid()
        self._lock = threading.Lock()

    # --- tables ---------------------------------------------------------------------------------------------------

    def create_table(
        self,
        name: str,
        dim: int,
        optimizer: Optional[Optimizer] = None,
        initializer: Optional[Initializer] = None,
        non_finite: str = "reject",
        admission: Optional[Admission] = None,
        eviction: Optional[Eviction] = None,
    ) -> Table:
        """Creates a sparse table of ``float32`` rows, one for any 64-bit id; or finds it, when it exists as given.

        Args:
            name: permanent until dropped.
            dim: values a row.
            optimizer: what :meth:`Table.push` does with gradients. None: the table takes ``assign`` and ``add`` only.
            initializer: what rows never pushed read as; zeros by default.
            non_finite: what becomes of NaN and infinities in a push: "reject" refuses it whole with NonFiniteGradient, "skip_row"
                leaves their rows out, "clip" makes 0 and the largest finite values of them. `evershardctl table show` says who
                pushed them.
            admission: which ids a gradient makes a row for; all by default.
            eviction: which rows go by themselves; none by default.

        Raises:
            Conflict: the table exists with another definition; that may be since :meth:`Table.set_optimizer` changed it.
        """
        native = self._connection()
        kinds = (_definition(optimizer), _definition(initializer))
        rules = (_definition(admission), _definition(eviction))
        handle = native.create_table(name, dim, kinds, rules, non_finite)
        return Table(self, handle, native)

    def table(self, name: str) -> Table:
        """The existing table of that name.

        Raises:
            UnknownTable: there is none.
        """
        native = self._connection()
        return Table(self, native.table(name), native)

    def create_tensor(
        self,
        name: str,
        shape: Union[int, Sequence[int]],
        dtype: Any = np.float32,
        optimizer: Optional[Optimizer] = None,
        initializer: Optional[Initializer] = None,
    ) -> Tensor:
        """Creates a dense tensor; or finds it, when it exists as given.

        Args:
            name: permanent until dropped; tables and tensors share their names.
            shape: at most 8 sizes, each at least 1; ``()`` for a single value.
            dtype: ``float32``, ``float16`` or ``bfloat16`` (a name, or a dtype of numpy or PyTorch): what the tensor's users
                have it in. The servers keep ``float32``.
            optimizer: what :meth:`Tensor.push` does with gradients; not row-wise, and without ``clip_norm``, which are about
                the rows of sparse tables. None: the tensor takes ``assign`` and ``add`` only.
            initializer: what it reads as before it is changed; zeros by default.

        Raises:
            Conflict: the tensor exists with another definition.
        """
        return self._create_tensors([(name, shape, dtype, optimizer, initializer)])[0]

    def _create_tensors(self, tensors: Sequence[tuple]) -> List[Tensor]:
        """Several at the same time: the arguments of `create_tensor` each."""
        native = self._connection()
        definitions = []
        for name, shape, dtype, optimizer, initializer in tensors:
            sizes = [int(size) for size in (np.atleast_1d(shape) if np.ndim(shape) == 0 else shape)]
            if any(size < 1 for size in sizes):
                raise InvalidArgument(f"tensor {name!r}: sizes are at least 1, not {sizes}")
            definitions.append((name, sizes, dtype_name(dtype), _definition(optimizer), _definition(initializer)))
        return [Tensor(self, handle, native) for handle in native.create_tensors(definitions)]

    def tensor(self, name: str) -> Tensor:
        """The existing tensor of that name.

        Raises:
            UnknownTable: there is none.
            InvalidArgument: it is a sparse table.
        """
        native = self._connection()
        return Tensor(self, native.tensor(name), native)

    def tables(self) -> List[str]:
        """Names of all tables and tensors."""
        return sorted(table["name"] for table in self.routing()["tables"])

    def _set_optimizer(self, table: Union[Table, Tensor], optimizer: Optimizer) -> None:
        native = self._connection()
        definition = _definition(optimizer)
        if definition is None:
            raise TypeError("expected an optimizer, not None: a table keeps the kind it was created with")
        change = native.set_tensor_optimizer if isinstance(table, Tensor) else native.set_optimizer
        change(table._in(self, native), definition)

    def drop_table(self, name: str) -> None:
        """Removes a table and all its rows, or a tensor, for good.

        Raises:
            UnknownTable: there is none of that name.
        """
        self._connection().drop_table(name)

    # --- several tables at once -------------------------------------------------------------------------------------

    def pull_many(self, requests: Sequence[Union[Tuple[Table, Any], Tensor, Tuple[Tensor, Any]]]) -> List[np.ndarray]:
        """Reads rows of several tables, and several tensors; all requests travel at the same time.

        Args:
            requests: pairs ``(table, ids)``, ids as for :meth:`Table.pull`; tensors; pairs ``(tensor, (start, stop))``, rows as
                for :meth:`Tensor.pull_rows`, or ``(tensor, None)`` for all of it.

        Returns:
            For each table ``float32[*ids.shape, dim]``, for each tensor what its ``pull`` gives.
        """
        native, flat, shapes = self._connection(), [], []
        for request in requests:
            table, ids = (request, None) if isinstance(request, Tensor) else request
            if isinstance(table, Tensor):
                span = table._span(*(ids or (0, None)))
                flat.append((table._in(self, native), span, None))
                rows = (max(span[1] - span[0], 0), *table.shape[1:])
                shapes.append((table.shape if ids is None else rows, table.numpy_dtype))
            else:
                array, shape = as_ids(ids)
                flat.append((table._in(self, native), array))
                shapes.append((shape + (table.dim,), np.float32))
        pulled = zip(native.pull_many(flat), shapes)
        return [rows.reshape(shape).astype(dtype, copy=False) for rows, (shape, dtype) in pulled]

    def push_many(self, items: Sequence[tuple], *, lr: Optional[float] = None) -> None:
        """Pushes gradients to several tables and tensors, together; returns when a quorum has all of them.

        What goes to one shard travels in messages of at most 256 KiB that tables share, each applied whole or not at
        all, exactly once.

        Args:
            items: tuples ``(table, ids, grads)`` or ``(table, ids, grads, lr)``, as for :meth:`Table.push`;
                ``(tensor, grad)``, or ``(tensor, (start, stop), grad)`` for some rows, with ``None`` for all of them, or
                ``(tensor, rows, grad, lr)``, as for :meth:`Tensor.push`, each tensor once.
            lr: learning rate in place of the tables' own, where the tuple has none.
        """
        native = self._connection()
        groups = self._groups(native, items, lr)
        if len(groups) == 1:
            native.push_many(*groups[0])
        elif groups:
            native.push_begin(groups).wait()

    def push_many_async(self, items: Sequence[tuple], *, lr: Optional[float] = None) -> "_evershard.PendingPush":
        """As :meth:`push_many`, but returns at once with a handle; its ``wait()`` returns or raises.

        Pushes apply in the order sent. Drop no handle without ``wait()``: it tells whether the push was applied.
        """
        native = self._connection()
        return native.push_begin(self._groups(native, items, lr))

    # --- jobs -------------------------------------------------------------------------------------------------------

    def job(
        self,
        name: str,
        workers: int,
        staleness: Optional[int] = 0,
        *,
        on_dead_worker: str = "continue",
        lease: float = 10.0,
        aggregate: Optional[str] = None,
    ) -> Job:
        """A training run of several workers; made with its first worker, or found as defined.

        Args:
            name: of the job.
            workers: ranks are 0 to ``workers - 1``.
            staleness: how many steps the fastest may be ahead of the slowest. 0: all step together, and their gradients are
                summed, in the order of ranks, and applied once, when the step ends; None: nobody waits.
            on_dead_worker: when a worker's lease ends, the others ``"continue"`` without it, ``"wait"`` for a
                replacement, or the job ends (``"abort"``).
            lease: seconds; a worker that was not heard of for this long is dead. Renewed in the background.
            aggregate: with a staleness of 0, ``"sum"`` (the default) applies the sum of the workers' gradients, ``"mean"`` that
                sum over their number, workers with an empty batch included, ``"apart"`` each push when it comes, as with
                other stalenesses.

        Raises:
            Conflict: by the first worker, when the job exists with another definition.
        """
        return Job(self, name, workers, staleness, on_dead_worker, lease, aggregate)

    def jobs(self) -> List[Dict[str, Any]]:
        """All jobs, each as :meth:`Job.describe` tells it."""
        return self._connection().jobs()

    def remove_job(self, name: str) -> None:
        """Forgets a job, its clocks and cursors; its workers are fenced. Tables stay as they are.

        Raises:
            UnknownJob: there is none of that name.
        """
        self._connection().remove_job(name)

    # --- looking ----------------------------------------------------------------------------------------------------

    def routing(self) -> Dict[str, Any]:
        """The cluster as a node describes it now.

        Returns:
            ``{"cluster_id", "version", "software_version", "meta_leader", "nodes": [{"id", "address", "state"}],
            "shards": [{"id", "group", "range_start", "range_end", "leader", "replicas": [{"replica", "node"}]}],
            "tables": [{"number", "name", "kind", "dim"}]}``, a dense tensor with its ``"shape"`` and ``"dtype"``; a leader of 0
            is not known.
        """
        return self._connection().routing()

    def stats(self, *, reset_gap: bool = False) -> Dict[str, int]:
        """Counters of this client since it connected.

        Returns:
            ``{"messages_acked", "rows_pushed", "rows_pulled", "retries", "longest_gap_us"}``: push messages
            acknowledged, distinct rows in them, rows pulled, times something was sent again, and the longest time an
            operation took from its call to its answer (since the last call with ``reset_gap``).
        """
        return self._connection().stats(reset_gap)

    @property
    def endpoints(self) -> Tuple[str, ...]:
        """The addresses given to :func:`connect`."""
        return self._endpoints

    # --- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the session and the connections. Waits for nothing: ``wait()`` for asynchronous pushes first."""
        self._closed = True
        native, self._native = self._native, None
        if native is not None and self._pid == os.getpid():
            native.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"evershard.Cluster({','.join(self._endpoints)!r}{', closed' if self._closed else ''})"

    def __reduce__(self) -> Any:
        return _unpickle, (self._endpoints, self._options)

    def __copy__(self) -> "Cluster":
        return self

    def __deepcopy__(self, memo: Any) -> "Cluster":
        return self

    def _connection(self) -> _evershard.Connection:
        """The native connection of this process, made on first use."""
        if self._closed:
            raise AlreadyClosed("the cluster was closed")
        pid = os.getpid()
        if self._pid != pid:
            # A forked child: the parent's threads are gone, and its lock may have been held.
            self._lock, self._native, self._pid = threading.Lock(), None, pid
        native = self._native
        if native is None:
            with self._lock:
                native = self._native
                if native is None:
                    native = self._native = _evershard.Connection(list(self._endpoints), **self._options)
        return native

    def _groups(self, native: _evershard.Connection, items: Sequence[tuple], lr: Optional[float]) -> list:
        """Pushes as the native module takes them: one for each learning rate, each table once in it."""
        groups: Dict[Optional[float], Dict[int, list]] = {}
        for item in items:
            if len(item) == 2:
                item = (item[0], None, item[1])
            table, ids, grads = item[:3]
            rate = item[3] if len(item) > 3 and item[3] is not None else lr
            handle = table._in(self, native)
            group = groups.setdefault(rate, {})
            if isinstance(table, Tensor):
                if handle.number in group:
                    raise InvalidArgument(f"tensor {table.name!r} is twice in one push")
                group[handle.number] = [handle, [table._item(native, grads, *(ids or (0, None)))[1:]]]
                continue
            parts = group.setdefault(handle.number, [handle, []])
            if parts[0].encoding != handle.encoding:
                encodings = f"{parts[0].encoding} and {handle.encoding}"
                raise InvalidArgument(f"table {table.name!r} is twice in one push, as {encodings}")
            parts[1].append(table._checked(ids, grads))
        return [([_joined(handle, parts) for handle, parts in group.values()], rate) for rate, group in groups.items()]


def _joined(handle: _evershard.TableHandle, parts: list) -> tuple:
    if len(parts) == 1:
        return (handle, *parts[0])
    ids, rows = zip(*parts)
    return handle, np.concatenate(ids), np.concatenate(rows)


def _definition(value: Any) -> Optional[Tuple[str, Dict[str, float]]]:
    """An optimizer, an initialiser or a rule as its kind and its numbers, those of its schedule among them."""
    if value is None:
        return None
    if not hasattr(value, "__dataclass_fields__"):
        raise TypeError(f"expected a value of evershard.definitions, not {value!r}")
    numbers = {name: getattr(value, name) for name in value.__dataclass_fields__}
    schedule = numbers.pop("schedule", None)
    if schedule is not None:
        if not isinstance(schedule, (WarmUp, StepDecay, Cosine)):
            raise TypeError(f"expected a schedule of evershard.schedules, not {schedule!r}")
        numbers.update(schedule.numbers())
    return type(value).__name__, numbers


def _unpickle(endpoints: Tuple[str, ...], options: Dict[str, Any]) -> Cluster:
    return Cluster(endpoints, **options)
