"""The Rust half: flat arrays in, flat arrays out. Use `evershard.Cluster` and `evershard.Table`, which wrap it."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

__version__: str

_Kind = Tuple[str, Dict[str, Any]]
_Ids = NDArray[np.uint64]
_Floats = NDArray[np.float32]
_Push = Tuple["TableHandle", _Ids, _Floats]

class TableHandle:
    """A table of one connection."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def encoding(self) -> str: ...
    def with_encoding(self, encoding: str) -> "TableHandle": ...

class PendingPush:
    """A push that was begun."""

    def wait(self) -> None:
        """Returns when a quorum of replicas has all of the push; raises what went wrong. May be called again."""

    def done(self) -> bool:
        """Whether `wait()` would return (or raise) at once."""

class Resume:
    """What `PartialPush.retry()` goes on with."""

    def retry(self) -> None: ...

class Connection:
    """The client of one `Cluster` in one process."""

    def __init__(
        self, endpoints: Sequence[str], timeout: float = 30.0, connect_timeout: float = 10.0
    ) -> None: ...
    def create_table(
        self, name: str, dim: int, optimizer: Optional[_Kind], initializer: Optional[_Kind]
    ) -> TableHandle: ...
    def table(self, name: str) -> TableHandle: ...
    def drop_table(self, name: str) -> None: ...
    def pull(
        self,
        table: TableHandle,
        ids: _Ids,
        out: Optional[_Floats],
        want_exists: bool,
        consistency: str,
        node: Optional[int],
    ) -> Tuple[_Floats, Any]: ...
    def pull_many(self, requests: Sequence[Tuple[TableHandle, _Ids]]) -> List[_Floats]: ...
    def push_many(self, items: Sequence[_Push], lr: Optional[float]) -> None: ...
    def push_begin(self, groups: Sequence[Tuple[Sequence[_Push], Optional[float]]]) -> PendingPush: ...
    def push_pull(self, table: TableHandle, ids: _Ids, grads: _Floats, lr: Optional[float]) -> _Floats: ...
    def assign(self, table: TableHandle, ids: _Ids, values: _Floats) -> None: ...
    def add(self, table: TableHandle, ids: _Ids, values: _Floats) -> None: ...
    def remove(self, table: TableHandle, ids: _Ids) -> None: ...
    def routing(self) -> Dict[str, Any]: ...
    def stats(self, reset_gap: bool = False) -> Dict[str, int]: ...
    def close(self) -> None: ...
