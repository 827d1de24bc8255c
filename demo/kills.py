"""Kills the busiest leader while the workers train, and brings it back; again and again.

Each round: wait for its moment in the training; SIGKILL the node that leads the most shards; wait until every shard has
a leader elsewhere; leave the node dead a while; start it again; wait until its replicas have caught up. A minority is
dead at any time, so nothing may be lost.

Not here: what the workers saw of it (training.py, report.py).
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import subprocess
import threading
import time
from typing import Any, Optional

import evershard as es

from training import Training

DEAD_S = 2.0
RECOVER_SECONDS = 90.0
POLL_S = 0.1
FIRST_AT, LAST_AT = 0.15, 0.75


@dataclasses.dataclass
class Kill:
    """One kill; times are of the monotonic clock."""

    node: int
    pid: int
    led: int
    at: float
    leaders_back_at: Optional[float] = None
    started_at: Optional[float] = None
    caught_up_at: Optional[float] = None


class Killer(threading.Thread):
    """Carries out the kills. `failure` says why it gave up, None when it did not."""

    def __init__(self, cluster: es.LocalCluster, ctl: pathlib.Path, training: Training, kills: int):
        super().__init__(name="killer", daemon=True)
        self.kills: list[Kill] = []
        self.failure: Optional[str] = None
        self._cluster = cluster
        self._ctl = ctl
        self._training = training
        self._wanted = kills

    def run(self) -> None:
        try:
            for number in range(self._wanted):
                moment = FIRST_AT + (LAST_AT - FIRST_AT) * number / max(self._wanted - 1, 1)
                self._wait("the training's next moment", lambda: self._training.progress() >= moment, None)
                if not self._training.running():
                    return
                self._round()
        except Exception as error:  # Whatever it is, the demo must say so.
            self.failure = f"{type(error).__name__}: {error}"

    def _round(self) -> None:
        node, led = self._busiest()
        kill = Kill(node, self._cluster.pid(node), led, time.monotonic())
        self._cluster.kill_node(node)
        self.kills.append(kill)
        self._wait("new leaders", lambda: self._leads_nothing(node), RECOVER_SECONDS)
        kill.leaders_back_at = time.monotonic()
        time.sleep(DEAD_S)
        self._cluster.start_node(node)
        kill.started_at = time.monotonic()
        self._wait(f"node {node} to catch up", self._caught_up, RECOVER_SECONDS)
        kill.caught_up_at = time.monotonic()

    def _busiest(self) -> tuple[int, int]:
        led = collections.Counter(leaders(self._cluster).values())
        led.pop(0, None)
        if not led:
            raise RuntimeError("no shard has a known leader")
        return led.most_common(1)[0]

    def _leads_nothing(self, node: int) -> bool:
        return all(leader not in (0, node) for leader in leaders(self._cluster).values())

    def _caught_up(self) -> bool:
        """Every replica of every shard has applied what its leader had committed when we looked."""
        before = self._status()
        committed = {shard["id"]: max(r["committed"] or 0 for r in shard["replicas"]) for shard in before["shards"]}
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            if all(
                sum((r["applied"] or -1) >= committed[shard["id"]] for r in shard["replicas"]) == len(before["nodes"])
                for shard in self._status()["shards"]
            ):
                return True
            time.sleep(POLL_S)
        return False

    def _status(self) -> dict[str, Any]:
        return ctl_json(self._ctl, ",".join(self._cluster.endpoints), "status", "--no-digest")

    def _wait(self, what: str, condition, seconds: Optional[float]) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._training.running():
            if condition():
                return
            if deadline is not None and time.monotonic() > deadline:
                raise RuntimeError(f"waited {seconds:.0f} s for {what}")
            time.sleep(POLL_S)
        if self._training.failure is None and deadline is not None:
            raise RuntimeError(f"the training ended before {what}")


def leaders(cluster: es.Cluster) -> dict[int, int]:
    """Leader node by shard, 0 where it is not known."""
    return {shard["id"]: shard["leader"] for shard in cluster.routing()["shards"]}


def ctl_json(ctl: pathlib.Path, endpoints: str, *command: str) -> dict[str, Any]:
    """Runs evershardctl and gives what it printed; `exit_code` is added to it.

    Raises:
        RuntimeError: it printed no JSON.
    """
    done = subprocess.run(
        [str(ctl), "--endpoints", endpoints, *command, "--output", "json"],
        capture_output=True,
        text=True,
        timeout=RECOVER_SECONDS,
        check=False,
    )
    try:
        return {**json.loads(done.stdout), "exit_code": done.returncode}
    except ValueError:
        raise RuntimeError(f"evershardctl {' '.join(command)}: exit {done.returncode}: {done.stderr.strip()}") from None
