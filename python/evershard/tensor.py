"""A dense tensor of a cluster: a shape, a dtype, and an optimizer that runs on the servers.

A tensor lies in blocks of 16 Ki elements over all shards. Whole tensors, and slices along the first dimension ("rows"),
come and go as numpy arrays of the tensor's own shape and dtype. ``float16`` comes as numpy's; ``bfloat16``, which numpy does
not have, as ``float32``. The servers keep and compute ``float32``, whatever the dtype: it says what the users of a tensor have
it in, and loses nothing between two steps. (A ``float32`` array given as ``out`` gets the values as they are kept.)

Not here: several tensors and tables at once, see :class:`evershard.Cluster`; PyTorch, see :mod:`evershard.torch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

import numpy as np

from evershard.arrays import as_rows
from evershard.errors import InvalidArgument, LengthMismatch, UnknownTable

if TYPE_CHECKING:
    from evershard import _evershard
    from evershard.cluster import Cluster
    from evershard.definitions import Optimizer

__all__ = ["Tensor"]

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.float32}


def dtype_name(dtype: Any) -> str:
    """``"float32"``, ``"float16"`` or ``"bfloat16"``, of a name or of a dtype of numpy or PyTorch.

    Raises:
        TypeError: it is another one.
    """
    # PyTorch's are printed as torch.float32.
    name = str(dtype).rpartition(".")[2] if type(dtype).__module__.partition(".")[0] == "torch" else dtype
    if not isinstance(name, str):
        name = np.dtype(dtype).name
    if name not in _NUMPY:
        raise TypeError(f"a tensor is of float32, float16 or bfloat16, not of {dtype}")
    return name


class Tensor:
    """Made by :meth:`evershard.Cluster.create_tensor` or :meth:`evershard.Cluster.tensor`. May be pickled."""

    def __init__(self, cluster: "Cluster", handle: "_evershard.TensorHandle", native: "_evershard.Connection"):
        #: The cluster it belongs to.
        self.cluster = cluster
        #: Its name.
        self.name: str = handle.name
        #: Its sizes; ``()`` of a single value.
        self.shape: Tuple[int, ...] = tuple(handle.shape)
        #: What its users have it in: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        self.dtype: str = handle.dtype
        #: Its permanent number, never used again after a drop.
        self.number: int = handle.number
        #: Blocks that it lies in.
        self.blocks: int = handle.blocks
        #: Multiples of this many rows (and the last row) are borders of blocks: see :meth:`assign`.
        self.aligned_rows: int = handle.aligned_rows
        #: How gradients travel and are logged unless a push says otherwise, see :meth:`with_encoding`.
        self.encoding: str = handle.encoding
        self._handle = handle
        self._native = native

    @property
    def size(self) -> int:
        """All elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def numpy_dtype(self) -> np.dtype:
        """What :meth:`pull` gives."""
        return np.dtype(_NUMPY[self.dtype])

    def with_encoding(self, encoding: str) -> "Tensor":
        """The same tensor; gradients pushed through the handle returned travel and are logged as ``encoding``.

        As for :meth:`evershard.Table.with_encoding`; ``"int8"`` has one scale a block.
        """
        native = self.cluster._connection()
        return Tensor(self.cluster, self._in(self.cluster, native).with_encoding(encoding), native)

    def pull(self, out: Optional[np.ndarray] = None) -> np.ndarray:
        """Reads the whole tensor. Writes nothing.

        Args:
            out: ``[*shape]``, C-contiguous, of ``float32`` or of the tensor's dtype, to read into; a new array by default.
        """
        return self.pull_rows(0, self._rows, out=out) if self.shape else self._pull((0, 1), (), out)

    def pull_rows(self, start: int, stop: int, out: Optional[np.ndarray] = None) -> np.ndarray:
        """Reads ``tensor[start:stop]``: only blocks that hold something of it travel.

        Args:
            start, stop: rows, from 0 on; a row that is not there is an error, and negative ones are not there.
            out: as for :meth:`pull`, of shape ``[stop - start, *shape[1:]]``.

        Raises:
            OutOfRange: the tensor has fewer rows.
        """
        span = self._span(start, stop)
        return self._pull(span, (max(span[1] - span[0], 0), *self.shape[1:]), out)

    def pull_if_newer(
        self, out: np.ndarray, version: Optional["_evershard.TensorVersion"] = None
    ) -> "_evershard.TensorVersion":
        """Brings ``out``, which holds the tensor as of ``version``, up to date: only blocks changed since then travel.

        Args:
            out: as for :meth:`pull`. When the call fails some of it may be newer already, and ``version`` is still right.
            version: what the last call for this array returned; None reads everything. One that means nothing any more
                (the tensor's shards were rebuilt) reads everything, too.

        Returns:
            The version of ``out`` now; its ``changed`` says how many blocks travelled: 0 when nothing was changed.

        Example::

            weights, version = np.empty(w.shape, np.float32), None
            while evaluating:
                version = w.pull_if_newer(weights, version)
                if version.changed:
                    evaluate(weights)
        """
        self._check_out(out, self.shape)
        native = self.cluster._connection()
        handle = self._in(self.cluster, native)
        if out.dtype == np.float32:
            return native.pull_if_newer(handle, version, out.reshape(-1))
        kept = np.ascontiguousarray(out, np.float32).reshape(-1)
        now = native.pull_if_newer(handle, version, kept)
        if now.changed:
            out[...] = kept.reshape(self.shape)
        return now

    def push(
        self, grad: Any, *, start: int = 0, stop: Optional[int] = None, lr: Optional[float] = None, encoding: Optional[str] = None
    ) -> None:
        """Applies a gradient with the tensor's optimizer, exactly once; returns when a quorum of replicas has it.

        Args:
            grad: of the tensor's shape, or of that of its rows ``start`` to ``stop``; cast to ``float32`` when it is not.
            start, stop: the gradient of these rows only; blocks without any of them are left alone. Rows that share a block
                with others can be pushed with SGD and Adagrad, without momentum and weight decay, for which a gradient of
                zero is none; with the other optimizers they begin and end at multiples of :attr:`aligned_rows` (or at the
                last row).
            lr: learning rate for this push, in place of the tensor's.
            encoding: how the gradient travels, as for :meth:`with_encoding`; this handle's own by default.

        Raises:
            LengthMismatch, OutOfRange, NonFiniteGradient, NoOptimizer, InvalidArgument: nothing was changed.
            DeadlineExceeded, SessionExpired, PartialPush: some blocks may have been changed; ids in the error are of blocks.
        """
        native = self.cluster._connection()
        native.push_many([self._item(native, grad, start, stop, encoding)], lr)

    def push_async(
        self, grad: Any, *, start: int = 0, stop: Optional[int] = None, lr: Optional[float] = None, encoding: Optional[str] = None
    ) -> "_evershard.PendingPush":
        """As :meth:`push`, but returns at once with a handle whose ``wait()`` returns or raises."""
        native = self.cluster._connection()
        return native.push_begin([([self._item(native, grad, start, stop, encoding)], lr)])

    def assign(self, values: Any, *, start: int = 0, stop: Optional[int] = None) -> None:
        """Sets the tensor, or its rows ``start`` to ``stop``, to ``values``; optimizer state is kept. Exactly once.

        Blocks change one by one, and whole: rows begin and end at multiples of :attr:`aligned_rows` (or at the last row).
        Whoever pulls meanwhile may see some blocks of the one and some of the other.
        """
        self._store(values, start, stop, False)

    def add(self, values: Any, *, start: int = 0, stop: Optional[int] = None) -> None:
        """Adds ``values`` to the tensor, or to its rows ``start`` to ``stop``, past the optimizer. Exactly once."""
        self._store(values, start, stop, True)

    def set_optimizer(self, optimizer: "Optimizer") -> None:
        """Gives the tensor other hyper-parameters, see :meth:`evershard.Table.set_optimizer`."""
        self.cluster._set_optimizer(self, optimizer)

    def __repr__(self) -> str:
        return f"evershard.Tensor({self.name!r}, shape={list(self.shape)}, dtype={self.dtype})"

    def __reduce__(self) -> Any:
        own = ("cluster", "name", "shape", "dtype", "number", "blocks", "aligned_rows", "encoding")
        return _unpickle, ({field: getattr(self, field) for field in own},)

    def __copy__(self) -> "Tensor":
        return self

    def __deepcopy__(self, memo: Any) -> "Tensor":
        return self

    @property
    def _rows(self) -> int:
        """The size of the first dimension; a single value is one row."""
        return self.shape[0] if self.shape else 1

    def _span(self, start: int, stop: Optional[int]) -> Tuple[int, int]:
        stop = self._rows if stop is None else stop
        if start < 0 or stop < 0:
            raise InvalidArgument(f"tensor {self.name!r}: rows are counted from 0, not {start} to {stop}")
        return int(start), int(stop)

    def _pull(self, span: Tuple[int, int], shape: Tuple[int, ...], out: Optional[np.ndarray]) -> np.ndarray:
        native = self.cluster._connection()
        handle, target = self._in(self.cluster, native), None
        if out is not None:
            self._check_out(out, shape)
            target = out.reshape(-1) if out.dtype == np.float32 else None
        kept = native.pull_many([(handle, span, target)])[0].reshape(shape)
        if out is None:
            return kept.astype(self.numpy_dtype, copy=False)
        if target is None:
            out[...] = kept
        return out

    def _item(
        self, native: "_evershard.Connection", grad: Any, start: int = 0, stop: Optional[int] = None, encoding: Optional[str] = None
    ) -> tuple:
        """A push as the native module takes it."""
        handle = self._in(self.cluster, native)
        span = self._span(start, stop)
        return handle if encoding is None else handle.with_encoding(encoding), span, self._checked(grad, span)

    def _store(self, values: Any, start: int, stop: Optional[int], is_added: bool) -> None:
        native = self.cluster._connection()
        span = self._span(start, stop)
        native.store_tensor(self._in(self.cluster, native), span, self._checked(values, span), is_added)

    def _checked(self, values: Any, span: Tuple[int, int]) -> np.ndarray:
        """Flat values that fit these rows."""
        array, shape = as_rows(_float32(values))
        expected = (max(span[1] - span[0], 0), *self.shape[1:]) if self.shape else ()
        if shape != expected:
            raise LengthMismatch(f"tensor {self.name!r}: values of shape {list(expected)} are needed, not {list(shape)}")
        return array

    def _check_out(self, out: np.ndarray, shape: Tuple[int, ...]) -> None:
        if not isinstance(out, np.ndarray) or out.dtype not in (np.float32, self.numpy_dtype):
            raise TypeError(f"out must be a numpy array of float32 or {self.numpy_dtype.name}")
        if out.shape != shape:
            raise LengthMismatch(f"out has shape {list(out.shape)}, not {list(shape)}")
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise InvalidArgument("out must be C-contiguous and writeable")

    def _in(self, cluster: "Cluster", native: "_evershard.Connection") -> "_evershard.TensorHandle":
        """The native handle on this connection: looked up again after a fork or unpickling."""
        if cluster is not self.cluster:
            raise InvalidArgument(f"tensor {self.name!r} belongs to another cluster object")
        if self._native is not native:
            handle = native.tensor(self.name)
            if handle.number != self.number:
                raise UnknownTable(f"tensor {self.name!r} was dropped; the one of that name now is another")
            self._handle, self._native = handle.with_encoding(self.encoding), native
        return self._handle


def _float32(values: Any) -> Any:
    """Tensors of PyTorch as float32: numpy knows no bfloat16."""
    if type(values).__module__.partition(".")[0] == "torch" and hasattr(values, "detach"):
        return values.detach().cpu().float()
    return values


def _unpickle(fields: Dict[str, Any]) -> Tensor:
    tensor = Tensor.__new__(Tensor)
    tensor.__dict__.update(fields, _handle=None, _native=None)
    return tensor
