"""Ends of steps that are under way while the next steps are computed: ``job.worker(rank, steps_in_flight=n)``.

A thread makes a worker's asynchronous pushes and its ticks, in the order in which they were called: the next step's pushes begin
when the last step's tick is over, as without it. So whatever holds up a push or a tick (a leader that died, a worker that is
slow) holds up the thread, and the worker only when *n* ends of steps are under way.

Invariants:

* at most `limit` steps are ended and not over when :meth:`StepsInFlight.tick` returns;
* nothing is done after something failed: what failed is raised by every later call, and the rank's cursor is that of the last
  step that is over.

Not here: what the calls do (the native worker), and what they are called with (job.py).
"""

from __future__ import annotations

import atexit
import collections
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Deque, Optional, Tuple

import numpy as np

from evershard.errors import AlreadyClosed

if TYPE_CHECKING:
    from evershard import _evershard

__all__ = ["StepsInFlight"]

#: A call of the native worker, and whether it ends a step.
_Call = Tuple[Callable[["_evershard.WorkerHandle"], None], bool]


class StepsInFlight:
    """The thread of one worker, and what it has yet to do."""

    def __init__(self, handle: "_evershard.WorkerHandle", limit: int):
        #: How many steps may be under way.
        self.limit = limit
        self._handle = handle
        self._calls: Deque[_Call] = collections.deque()
        #: Ticks that were called and are not over; and whether any call is.
        self._ending = 0
        self._is_busy = False
        self._is_over = False
        self._is_abandoned = False
        self._has_ended = False
        self._error: Optional[BaseException] = None
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="evershard-steps", daemon=True)
        _all.add(self)
        self.thread.start()

    def push(self, group: list) -> None:
        """Gradients as part of the step that is being computed; their arrays may be changed when this returns."""
        group = _copied(group)
        self._add((lambda handle: handle.push_many(group, False), False))

    def tick(self, cursor: bytes) -> None:
        """Ends the step; returns when at most `limit` are under way."""
        self._add((lambda handle: handle.tick(cursor), True))
        self._wait(lambda: self._ending <= self.limit)

    def drain(self) -> None:
        """Returns when everything is done."""
        self._wait(lambda: not self._calls and not self._is_busy)

    def stop(self) -> None:
        """The thread ends after the call that it is at. What it has not done is forgotten."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """The same, and then the worker stops without a word. Waits for nothing: the call may wait for other workers."""
        with self._changed:
            self._is_over = self._is_abandoned = True
            self._changed.notify_all()
            if not self._has_ended:
                return
        self._handle.abandon()

    def join(self) -> None:
        """Waits for the thread, which was stopped."""
        if self.thread is not threading.current_thread():
            self.thread.join()

    def _add(self, call: _Call) -> None:
        with self._changed:
            self._raise()
            if self._is_over:
                raise AlreadyClosed("the worker has left its job")
            self._calls.append(call)
            self._ending += call[1]
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._error is not None or self._is_over)
            self._raise()
            if not condition():
                raise AlreadyClosed("the worker has left its job with steps in flight, which are forgotten")

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (call := self._next()) is not None:
            error = None
            try:
                call[0](self._handle)
            except BaseException as failed:  # noqa: BLE001 - raised by the worker's next call
                error = failed
            with self._changed:
                self._is_busy = False
                self._ending -= call[1]
                self._error = error
                self._is_over = self._is_over or error is not None
                self._changed.notify_all()
            # What was pushed is not needed any more.
            del call
        if self._is_abandoned:
            self._handle.abandon()

    def _next(self) -> Optional[_Call]:
        """The next call; None when there shall be none any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._is_over)
            self._has_ended, self._is_busy = self._is_over, not self._is_over
            return None if self._is_over else self._calls.popleft()


def _copied(value: Any) -> Any:
    """The same with arrays of its own: gradients may be autograd's own memory."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return type(value)(_copied(part) for part in value) if isinstance(value, (list, tuple)) else value


#: Those whose thread may run: a daemon thread inside a native call must not meet the end of the interpreter.
_all: "weakref.WeakSet[StepsInFlight]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for steps in list(_all):
        steps.stop()
        steps.join()
