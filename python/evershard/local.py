"""A whole cluster on this machine, as child processes of this one: for notebooks, tests and first steps.

Not here: what the processes do; this starts ``evershard dev`` and connects to it.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, List, Optional, Sequence

from evershard.cluster import Cluster
from evershard.errors import EvershardError, InvalidArgument, Unavailable

__all__ = ["LocalCluster", "find_binary", "local"]

READY_SECONDS = 120.0
STOP_SECONDS = 20.0


def local(
    nodes: int = 3,
    shards: int = 8,
    dir: Optional[str] = None,
    *,
    durability: str = "fsync",
    base_port: Optional[int] = None,
    server_args: Sequence[str] = (),
    **options: Any,
) -> "LocalCluster":
    """Starts a cluster of server processes on this machine and connects to it.

    Args:
        nodes: server processes.
        shards: shards, each with a replica on up to three of the nodes.
        dir: where its data live. A directory used before continues with its data; by default a temporary one, removed
            by ``close()``.
        durability: ``"fsync"`` or ``"memory"``.
        base_port: first port; by default free ones are found.
        server_args: more flags for every ``evershard server``.
        options: as for :func:`evershard.connect`.

    The servers end with ``close()``, the ``with`` block, or this process. The binary is ``$EVERSHARD_BIN``, or
    ``evershard`` on ``PATH``, or ``bin/evershard`` of the checkout around the working directory.

    Example::

        with es.local() as cluster:
            items = cluster.create_table("items", dim=16, optimizer=es.SGD(lr=0.1))
    """
    return LocalCluster(nodes, shards, dir, durability, base_port, server_args, options)


class LocalCluster(Cluster):
    """A :class:`~evershard.Cluster` that owns its servers. Made by :func:`evershard.local`."""

    def __init__(
        self,
        nodes: int,
        shards: int,
        dir: Optional[str],
        durability: str,
        base_port: Optional[int],
        server_args: Sequence[str],
        options: dict,
    ):
        self._binary = find_binary()
        self._temporary = dir is None
        #: Where the cluster's data live: ``node-<id>/{pid,log,data}`` and ``endpoints``.
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="evershard-") if dir is None else dir).absolute()
        self.dir.mkdir(parents=True, exist_ok=True)
        self._log = self.dir / "dev.log"
        # The servers end with this process, however it ends: the kernel closes the pipe.
        command = [self._binary, "dev", "--dir", str(self.dir), "--durability", durability, "--end-with-stdin"]
        if not (self.dir / "endpoints").exists():
            port = base_port or free_ports(2 * nodes)
            command += ["--nodes", str(nodes), "--shards", str(shards), "--base-port", str(port)]
        if server_args:
            command += ["--", *server_args]
        self._owner = os.getpid()
        with open(self._log, "ab") as log:
            #: The ``evershard dev`` process.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        atexit.register(self._stop)
        try:
            self._wait_ready()
            super().__init__((self.dir / "endpoints").read_text().strip(), **options)
            self._connection()
        except BaseException:
            self._stop()
            raise

    def pid(self, node: int) -> int:
        """The process id of a node."""
        return int((self.dir / f"node-{node}" / "pid").read_text())

    def kill_node(self, node: int) -> None:
        """Ends a node with SIGKILL, as a crash would. It stays dead until :meth:`start_node`."""
        os.kill(self.pid(node), signal.SIGKILL)

    def start_node(self, node: int) -> None:
        """Starts a dead node again; it keeps its data."""
        command = [self._binary, "dev", "--dir", str(self.dir), "start-node", str(node)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=READY_SECONDS, check=False)
        if done.returncode != 0:
            raise EvershardError(f"could not start node {node}: {done.stderr.strip()}")

    def close(self) -> None:
        """Disconnects and ends the servers; a temporary directory is removed."""
        super().close()
        self._stop()

    def __reduce__(self) -> Any:
        # A copy elsewhere is a client; this object alone owns the servers.
        return _client, (self._endpoints, self._options)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        pipe, seen = self.process.stdout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"ready" not in seen.splitlines():
                if time.monotonic() > deadline:
                    raise Unavailable(f"`evershard dev` was not ready in {READY_SECONDS:.0f} s{self._log_tail()}")
                if selector.select(0.2):
                    chunk = os.read(pipe.fileno(), 4096)
                    if not chunk:
                        code = self.process.wait()
                        raise EvershardError(f"`evershard dev` ended with code {code}{self._log_tail()}")
                    seen += chunk

    def _log_tail(self) -> str:
        text = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        return ": " + "\n".join(text.splitlines()[-8:]) if text else ""

    def _stop(self) -> None:
        if os.getpid() != self._owner:
            return
        atexit.unregister(self._stop)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                # Its children are in its process group.
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        if self._temporary:
            shutil.rmtree(self.dir, ignore_errors=True)


def find_binary() -> str:
    """The ``evershard`` binary.

    Raises:
        InvalidArgument: it was not found; the message says where it was looked for.
    """
    named = os.environ.get("EVERSHARD_BIN")
    if named:
        if not os.access(named, os.X_OK):
            raise InvalidArgument(f"EVERSHARD_BIN={named} is not an executable file")
        return named
    on_path = shutil.which("evershard")
    if on_path:
        return on_path
    for start in _checkouts():
        candidate = start / "bin" / "evershard"
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise InvalidArgument(
        "the evershard binary was not found: set EVERSHARD_BIN, put it on PATH, or run `make build` in the checkout"
    )


def _checkouts() -> List[pathlib.Path]:
    """Folders that may be a checkout: around the working directory, and the one whose .venv runs this."""
    here = pathlib.Path.cwd()
    return [here, *here.parents, pathlib.Path(sys.prefix).parent]


def free_ports(count: int) -> int:
    """The first of `count` successive free ports. Another process may still take one: `evershard dev` then says so.

    Below 32000: from 32768 on the kernel takes ports for outgoing connections, and a dead node's port must stay free.
    """
    first = 20000 + (os.getpid() * 37) % 11900
    for port in [*range(first, 32000 - count, count), *range(20000, first, count)]:
        if all(_free(port + i) for i in range(count)):
            return port
    raise Unavailable(f"no {count} successive free ports between 20000 and 32000")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _client(endpoints: tuple, options: dict) -> Cluster:
    return Cluster(endpoints, **options)
