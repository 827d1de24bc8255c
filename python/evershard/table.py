"""A table of a cluster: rows of ``float32`` under 64-bit ids.

Ids may be any integers (numpy array, tensor, list) of any shape; they are taken as 64 bits, so -1 and 2**64-1 are the
same id, and every id is ordinary. Rows come and go as ``float32[*ids.shape, dim]``.

Not here: operations over several tables, see :class:`evershard.Cluster`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, Optional, Tuple, Union

import numpy as np

from evershard.arrays import as_ids, as_rows
from evershard.errors import InvalidArgument, LengthMismatch, UnknownTable, WrongDim

if TYPE_CHECKING:
    from evershard import _evershard
    from evershard.cluster import Cluster
    from evershard.definitions import Optimizer

__all__ = ["Table"]


class Table:
    """Made by :meth:`evershard.Cluster.create_table` or :meth:`evershard.Cluster.table`. May be pickled."""

    def __init__(self, cluster: "Cluster", handle: "_evershard.TableHandle", native: "_evershard.Connection"):
        #: The cluster it belongs to.
        self.cluster = cluster
        #: Its name.
        self.name: str = handle.name
        #: Values a row.
        self.dim: int = handle.dim
        #: Its permanent number, never used again after a drop.
        self.number: int = handle.number
        self._handle = handle
        self._native = native
        #: How gradients travel and are logged unless a push says otherwise, see :meth:`with_encoding`.
        self.encoding: str = handle.encoding

    def with_encoding(self, encoding: str) -> "Table":
        """The same table; gradients pushed through the handle returned travel and are logged as ``encoding``.

        Args:
            encoding: ``"f32"``; ``"bf16"`` or ``"f16"``: half the bytes, rounded to nearest, ties to even; ``"int8"``: about a
                quarter, with one scale a row, and what was rounded away added to the id's next gradient by this process.

        Repeated ids are summed in float32 before they are encoded, and the optimizer computes in float32. A gradient that is
        finite and too large for the encoding (``f16``: 65520 and above) goes by the table's policy, as an infinity would.
        """
        native = self.cluster._connection()
        return Table(self.cluster, self._in(self.cluster, native).with_encoding(encoding), native)

    def pull(
        self,
        ids: Any,
        out: Optional[np.ndarray] = None,
        *,
        create: bool = True,
        return_exists: bool = False,
        consistency: str = "leader",
        max_staleness_ms: Optional[int] = None,
        node: Optional[int] = None,
    ) -> Union[np.ndarray, Tuple[np.ndarray, np.ndarray]]:
        """Reads rows. Writes nothing: an id never pushed reads as the table's initial value, the same every time.

        Args:
            ids: integers of any shape; repeats are fine.
            out: ``float32[*ids.shape, dim]``, C-contiguous, to read into; a new array by default.
            create: False for evaluation: rows that do not exist read as zeros, not as the initial values that their first
                push would begin with, and the flags of ``return_exists`` are returned too.
            return_exists: also tell which rows were ever pushed or assigned, and not removed.
            consistency: ``"leader"`` reads every acknowledged push; ``"linearizable"`` the same, whatever the servers' clocks
                do, for one more round trip between them; ``"bounded"`` reads from followers everything that was acknowledged
                ``max_staleness_ms`` before the call, and this connection's own acknowledged pushes; ``"any"`` takes the answer
                of a replica that may lag. The last two go to the leader when no follower answers.
            max_staleness_ms: with ``"bounded"``, which needs it.
            node: with ``"any"`` or ``"bounded"``: the node whose replicas answer, and no others.

        Returns:
            ``float32[*ids.shape, dim]``; with ``return_exists``, or ``create=False``, that and ``bool[*ids.shape]``.
        """
        bound = _checked_bound(consistency, max_staleness_ms)
        if node is not None and consistency not in ("any", "bounded"):
            raise InvalidArgument('node= needs consistency="any" or "bounded": only the leader answers the others')
        with_exists = return_exists or not create
        array, shape = as_ids(ids)
        row_shape = shape + (self.dim,)
        if out is not None:
            self._check_out(out, row_shape)
        native = self.cluster._connection()
        target = None if out is None else out.reshape(-1)
        handle = self._in(self.cluster, native)
        rows, exists = native.pull(handle, array, target, with_exists, not create, consistency, bound, node)
        result = rows.reshape(row_shape) if out is None else out
        return (result, exists.reshape(shape)) if with_exists else result

    def push(self, ids: Any, grads: Any, *, lr: Optional[float] = None, encoding: Optional[str] = None) -> None:
        """Applies gradients with the table's optimizer, exactly once; returns when a quorum of replicas has them.

        Gradients of repeated ids are summed first: the optimizer runs once for each distinct id.

        Args:
            ids: integers of any shape.
            grads: ``[*ids.shape, dim]``; cast to ``float32`` when it is not.
            lr: learning rate for this push, in place of the table's.
            encoding: how the gradients travel, as for :meth:`with_encoding`; this handle's own by default.

        Raises:
            WrongDim, LengthMismatch, NonFiniteGradient, NoOptimizer: nothing was changed.
            DeadlineExceeded, SessionExpired, PartialPush: some of it may have been applied; the error says.
        """
        native = self.cluster._connection()
        array, rows = self._checked(ids, grads)
        native.push_many([(self._encoded(native, encoding), array, rows)], lr)

    def push_async(
        self, ids: Any, grads: Any, *, lr: Optional[float] = None, encoding: Optional[str] = None
    ) -> "_evershard.PendingPush":
        """As :meth:`push`, but returns at once with a handle whose ``wait()`` returns or raises.

        The arrays are copied, and may be changed at once. Pushes apply in the order sent.
        """
        native = self.cluster._connection()
        array, rows = self._checked(ids, grads)
        return native.push_begin([([(self._encoded(native, encoding), array, rows)], lr)])

    def push_pull(self, ids: Any, grads: Any, *, lr: Optional[float] = None) -> np.ndarray:
        """Reads rows, then pushes gradients to them: a pull and a push in one call.

        Returns:
            The rows as they were before this push, ``float32[*ids.shape, dim]``.
        """
        native = self.cluster._connection()
        array, rows = self._checked(ids, grads)
        shape = np.shape(grads)
        return native.push_pull(self._in(self.cluster, native), array, rows, lr).reshape(shape)

    def assign(self, ids: Any, values: Any) -> None:
        """Sets the rows' weights to ``values`` ``[*ids.shape, dim]``; optimizer state is kept. Exactly once."""
        native = self.cluster._connection()
        array, rows = self._checked(ids, values)
        native.assign(self._in(self.cluster, native), array, rows)

    def add(self, ids: Any, values: Any) -> None:
        """Adds ``values`` ``[*ids.shape, dim]`` to the rows' weights, past the optimizer. Exactly once."""
        native = self.cluster._connection()
        array, rows = self._checked(ids, values)
        native.add(self._in(self.cluster, native), array, rows)

    def remove(self, ids: Any) -> None:
        """Removes rows, optimizer state included: they read as initial values again."""
        native = self.cluster._connection()
        native.remove(self._in(self.cluster, native), as_ids(ids)[0])

    def clear(self) -> None:
        """Removes all rows, optimizer state included, on each shard at once. Exactly once.

        In order with this connection's own pushes: rows pushed before are gone, rows pushed after it stay. Pushes of others
        that are under way meanwhile come before it on some shards, and after it on others.
        """
        native = self.cluster._connection()
        native.clear(self._in(self.cluster, native))

    def size(
        self,
        *,
        consistency: str = "leader",
        max_staleness_ms: Optional[int] = None,
        node: Optional[int] = None,
    ) -> int:
        """How many rows exist: pushed or assigned, and not removed. The other arguments are those of :meth:`pull`."""
        bound = _checked_bound(consistency, max_staleness_ms)
        native = self.cluster._connection()
        return native.size(self._in(self.cluster, native), consistency, bound, node)

    def scan(
        self,
        *,
        consistency: str = "leader",
        max_staleness_ms: Optional[int] = None,
        node: Optional[int] = None,
    ) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        """The rows that exist, in pieces of about a megabyte: ``uint64[n]`` ids and ``float32[n, dim]`` weights.

        Memory is that of one piece, on both sides. In no particular order. Each piece is its shard as of one moment, the
        pieces of a shard are of ever later ones: a row that exists all the time comes exactly once, one that is made or
        removed meanwhile may come or not. The arguments are those of :meth:`pull`; failovers are waited for.
        """
        bound = _checked_bound(consistency, max_staleness_ms)
        native = self.cluster._connection()
        pieces = native.scan(self._in(self.cluster, native), consistency, bound, node)
        while (piece := pieces.next_piece()) is not None:
            ids, values = piece
            yield ids, values.reshape(len(ids), self.dim)

    def export(self, **options: Any) -> Tuple[np.ndarray, np.ndarray]:
        """All rows that exist, as two arrays: ``uint64[n]`` ids, in no particular order, and ``float32[n, dim]`` weights.

        What :meth:`scan` gives, with its options, put together: takes twice the memory of the rows for a moment.
        """
        pieces = list(self.scan(**options))
        if not pieces:
            return np.empty(0, np.uint64), np.empty((0, self.dim), np.float32)
        ids, values = zip(*pieces)
        return np.concatenate(ids), np.concatenate(values)

    def set_optimizer(self, optimizer: "Optimizer") -> None:
        """Gives the table other hyper-parameters: all of them as ``optimizer`` says, its defaults included.

        They are in force for every push, of any client, that begins after this returned; a push under way may be applied
        with the ones or the others on each shard. Weights and optimizer state stay. Setting what is set already is fine.

        Args:
            optimizer: of the kind that the table has: ``es.Adagrad(lr=0.01)`` for a table of ``es.Adagrad(...)``.

        Raises:
            Conflict: another kind of optimizer, which would keep other state in the rows.
            InvalidArgument: numbers that make no sense.
            UnknownTable: the table was dropped.

        After this, :meth:`evershard.Cluster.create_table` with the old optimizer raises ``Conflict``.
        """
        self.cluster._set_optimizer(self, optimizer)

    #: TensorFlow's words for the same.
    lookup = pull
    apply_gradients = push

    def __repr__(self) -> str:
        return f"evershard.Table({self.name!r}, dim={self.dim})"

    def __reduce__(self) -> Any:
        return _unpickle, (self.cluster, self.name, self.dim, self.number, self.encoding)

    def __copy__(self) -> "Table":
        return self

    def __deepcopy__(self, memo: Any) -> "Table":
        return self

    def _in(self, cluster: "Cluster", native: "_evershard.Connection") -> "_evershard.TableHandle":
        """The native handle on this connection: looked up again after a fork or unpickling."""
        if cluster is not self.cluster:
            raise InvalidArgument(f"table {self.name!r} belongs to another cluster object")
        if self._native is not native:
            handle = native.table(self.name)
            if handle.number != self.number or handle.dim != self.dim:
                raise UnknownTable(f"table {self.name!r} was dropped; the one of that name now is another")
            self._handle, self._native = handle.with_encoding(self.encoding), native
        return self._handle

    def _encoded(self, native: "_evershard.Connection", encoding: Optional[str]) -> "_evershard.TableHandle":
        handle = self._in(self.cluster, native)
        return handle if encoding is None else handle.with_encoding(encoding)

    def _checked(self, ids: Any, values: Any) -> Tuple[np.ndarray, np.ndarray]:
        """Flat ids and values that fit each other and the table."""
        id_array, id_shape = as_ids(ids)
        rows, shape = as_rows(values)
        if id_array.size == 0 and rows.size == 0:
            return id_array, rows
        if not shape or shape[-1] != self.dim:
            raise WrongDim(f"table {self.name!r} has dim {self.dim}, but the values have shape {list(shape)}")
        if shape[:-1] != id_shape:
            raise LengthMismatch(
                f"table {self.name!r}: ids of shape {list(id_shape)} need values of shape "
                f"{[*id_shape, self.dim]}, not {list(shape)}"
            )
        return id_array, rows

    def _check_out(self, out: np.ndarray, shape: Tuple[int, ...]) -> None:
        if not isinstance(out, np.ndarray) or out.dtype != np.float32:
            raise TypeError("out must be a numpy array of float32")
        if out.shape != shape:
            raise LengthMismatch(f"out has shape {list(out.shape)}, not {list(shape)}")
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise InvalidArgument("out must be C-contiguous and writeable")


def _checked_bound(consistency: str, max_staleness_ms: Optional[int]) -> int:
    """What the servers are asked for: 0 when nothing is."""
    if consistency != "bounded":
        if max_staleness_ms is not None:
            raise InvalidArgument('max_staleness_ms= needs consistency="bounded"')
        return 0
    if max_staleness_ms is None or not 0 < max_staleness_ms < 2**32:
        raise InvalidArgument(f'consistency="bounded" needs max_staleness_ms= above 0, not {max_staleness_ms}')
    return int(max_staleness_ms)


def _unpickle(cluster: "Cluster", name: str, dim: int, number: int, encoding: str) -> Table:
    table = Table.__new__(Table)
    table.cluster, table.name, table.dim, table.number = cluster, name, dim, number
    table.encoding = encoding
    table._handle = table._native = None
    return table
