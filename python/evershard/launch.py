"""What a launcher such as ``torchrun`` tells a process: its rank among how many, and how often all were restarted.

::

    here = from_environment()
    job = job_from_environment(cluster, "ml", staleness=0)
    with job.worker(here.rank) as worker:
        for position, batch in data.resume(worker.cursor):
            ...
            worker.tick(cursor=str(position).encode())

``torchrun --nproc_per_node 4 train.py`` starts ``train.py`` four times. When one of them dies it ends all of them and starts
them again, ``--max-restarts`` times. Each takes its rank as a new incarnation: what is left of the former one is fenced, and
the cursor says where to go on. The model needs no reload: it is on the servers. In a job with a staleness of 0, the step that
broke off is made again, and counts once; with another, what the dead worker pushed since its last tick stays, and its
replacement pushes it again.

Not here: starting processes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Optional

from evershard.errors import InvalidArgument

if TYPE_CHECKING:
    from evershard.cluster import Cluster
    from evershard.job import Job

__all__ = ["Launch", "from_environment", "job_from_environment"]


class Launch(NamedTuple):
    """This process among those that were launched together."""

    #: 0 to ``world_size - 1``.
    rank: int
    #: Processes on all machines.
    world_size: int
    #: Rank among those on this machine: which device to take.
    local_rank: int
    #: How often the launcher has restarted them; 0: this is the first time.
    restart_count: int


def from_environment(environment: Optional[Mapping[str, str]] = None) -> Launch:
    """Reads ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``TORCHELASTIC_RESTART_COUNT``.

    A process that was started by itself, with neither ``RANK`` nor ``WORLD_SIZE``, is rank 0 of 1.

    Args:
        environment: by default that of the process.

    Raises:
        InvalidArgument: one of the two is missing, a number is none, or the rank is not below the world's size.
    """
    given = os.environ if environment is None else environment
    rank, world_size = _number(given, "RANK"), _number(given, "WORLD_SIZE")
    if (rank is None) != (world_size is None):
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise InvalidArgument(f"${missing} is not set, but the other of RANK and WORLD_SIZE is")
    if rank is None or world_size is None:
        rank, world_size = 0, 1
    if rank >= world_size:
        raise InvalidArgument(f"$RANK is {rank}, but $WORLD_SIZE is {world_size}")
    local_rank = _number(given, "LOCAL_RANK")
    restarts = _number(given, "TORCHELASTIC_RESTART_COUNT")
    return Launch(rank, world_size, rank if local_rank is None else local_rank, restarts or 0)


def job_from_environment(
    cluster: "Cluster",
    name: str,
    staleness: Optional[int] = 0,
    *,
    on_dead_worker: str = "wait",
    **options: Any,
) -> "Job":
    """A job of as many workers as were launched.

    Args:
        cluster: where the job is.
        name: the same in all processes, and after a restart. A name that was used before goes on from that job's cursors:
            :meth:`evershard.Cluster.remove_job` makes them forgotten.
        staleness: as for :meth:`evershard.Cluster.job`.
        on_dead_worker: by default the others wait, because the launcher brings a replacement.
        options: as for :meth:`evershard.Cluster.job`.

    Raises:
        InvalidArgument: as :func:`from_environment`.
    """
    workers = from_environment().world_size
    return cluster.job(name, workers, staleness, on_dead_worker=on_dead_worker, **options)


def _number(environment: Mapping[str, str], name: str) -> Optional[int]:
    text = environment.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise InvalidArgument(f"${name} is {text!r}, and should be a number of 0 or more")
    return int(text)
