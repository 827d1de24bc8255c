"""Everything Evershard raises, by kind. Each is an :class:`EvershardError`; the message names the table, node or id.

Some are also the built-in exception that Python code would expect (``ValueError``, ``KeyError``, ``TimeoutError``).

Not here: programming errors such as a wrong argument type, which raise ``TypeError``.
"""

from __future__ import annotations

from typing import Any, Sequence

__all__ = [
    "AlreadyClosed",
    "Conflict",
    "Corrupt",
    "DeadlineExceeded",
    "EvershardError",
    "Exhausted",
    "Fenced",
    "Internal",
    "InvalidArgument",
    "JobAborted",
    "LengthMismatch",
    "NoOptimizer",
    "NonFiniteGradient",
    "OutOfRange",
    "PartialPush",
    "SessionExpired",
    "TooLarge",
    "Unavailable",
    "UnknownJob",
    "UnknownTable",
    "WrongCluster",
    "WrongDim",
]


class EvershardError(Exception):
    """Base of all errors of a cluster."""


class InvalidArgument(EvershardError, ValueError):
    """The request can never succeed as it is; nothing was changed."""


class UnknownTable(EvershardError, KeyError):
    """No table of that name (or it was dropped); nothing was changed."""

    __str__ = Exception.__str__


class WrongDim(InvalidArgument):
    """Rows as wide as the table's dim were expected; nothing was changed."""


class LengthMismatch(InvalidArgument):
    """Ids and gradients (or values) differ in number; nothing was changed."""


class NonFiniteGradient(InvalidArgument):
    """A gradient holds NaN or an infinity; nothing was changed."""


class OutOfRange(InvalidArgument, IndexError):
    """Rows that a dense tensor does not have; nothing was changed."""


class NoOptimizer(InvalidArgument):
    """The table has no optimizer: it takes ``assign`` and ``add``, but no gradients; nothing was changed."""


class TooLarge(InvalidArgument):
    """Over a limit that the message names; nothing was changed."""


class Conflict(EvershardError):
    """A table of that name exists with another definition; nothing was changed."""


class Corrupt(EvershardError):
    """Bytes changed on their way or at rest, and a checksum told."""


class WrongCluster(EvershardError):
    """The node that answered belongs to another cluster."""


class Unavailable(EvershardError, ConnectionError):
    """Nobody answered, or no leader; the message names what was tried.

    Raised by a push, nothing of it was applied: one that may have reached a server raises :class:`PartialPush` instead.
    Creating or dropping a table may have happened all the same; doing it again is safe.
    """


class DeadlineExceeded(Unavailable, TimeoutError):
    """Not done within the timeout."""


class Exhausted(EvershardError):
    """A server is out of some resource (memory, disk); another try may succeed later."""


class SessionExpired(EvershardError):
    """The session ended: the outcome of pushes that were not acknowledged is unknown, the others are safe."""


class UnknownJob(EvershardError, KeyError):
    """No job of that name (or it was removed); nothing was changed."""

    __str__ = Exception.__str__


class Fenced(EvershardError):
    """Another incarnation of the worker has its rank, or its lease ended: nothing that it pushes is taken any more.

    Join the job again for the rank: the new worker's ``clock`` and ``cursor`` say where to go on.
    """


class JobAborted(EvershardError):
    """A worker of the job died, and the job was made with ``on_dead_worker="abort"``."""


class PartialPush(EvershardError):
    """Some messages of a push were applied, others were refused or their outcome is unknown.

    A push is cut into messages by shard and size, each applied whole or not at all. :meth:`retry` sends again what was
    not acknowledged. The ids are ``uint64`` arrays, without repetitions.
    """

    def __init__(
        self, message: str, applied: Sequence[int] = (), refused: Sequence[int] = (), unknown: Sequence[int] = ()
    ):
        super().__init__(message)
        #: Ids whose gradients were applied.
        self.applied = applied
        #: Ids whose gradients were certainly not applied.
        self.refused = refused
        #: Ids whose outcome is not known, or that were not sent in time; `retry` settles both.
        self.unknown = unknown
        self._resume: Any = None

    def retry(self) -> None:
        """Sends again what was not acknowledged, under its old numbers: each id ends up applied exactly once.

        Possible once, in the process that pushed, while this error is alive. Raises a new :class:`PartialPush`, which can
        be retried again, when it still cannot be acknowledged; ids that were refused are not sent again.
        """
        if self._resume is None:
            raise InvalidArgument("nothing of this push can be sent again")
        self._resume.retry()

    def __reduce__(self) -> Any:
        return type(self), (self.args[0], self.applied, self.refused, self.unknown)


class AlreadyClosed(EvershardError, ValueError):
    """The cluster was closed by ``close()``."""


class Internal(EvershardError):
    """A bug, or a state that should not occur; please report it."""
