"""One training run of the demo: its worker processes, and what they report.

Not here: what a worker does (worker.py), kills (kills.py), verdicts (report.py).
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any, Optional

import numpy as np

import evershard as es

import data
import model
import worker

HERE = pathlib.Path(__file__).resolve().parent
EVALUATE_EVERY_S = 2.5
RATE_WINDOW_S = 2.0
READY_SECONDS = 120.0
#: Every id of every table of the model is below.
IDS_MAX = 2048


class Training:
    """Starts workers, gathers their lines, and evaluates the model beside them.

    Invariants: `acks[rank]` is in time order; all times are of the machine's monotonic clock, which processes share.
    """

    def __init__(
        self,
        name: str,
        endpoints: str,
        workers: int,
        epochs: int,
        batch: int,
        staleness: Optional[int],
        scratch: pathlib.Path,
        steps: Optional[dict[int, int]] = None,
        encoding: str = "f32",
        seed: int = model.SEED,
    ):
        """`steps` says how many each rank trains; by default whole epochs, and on until :meth:`release`."""
        self.name = name
        self.workers = workers
        self.endpoints = endpoints
        self.began = 0.0
        self.ended = 0.0
        self.steps = 0
        self.loss = float("nan")
        self.auc = float("nan")
        self.failure: Optional[str] = None
        self.acks: dict[int, list[float]] = {rank: [] for rank in range(workers)}
        self.done: dict[int, dict[str, Any]] = {}
        self._train, self._test = data.load()
        self.steps_planned = epochs * (len(self._train) // batch) if steps is None else sum(steps.values())
        self._audit_pushes: dict[int, int] = {}
        self._rows = 0
        self._recent: collections.deque = collections.deque()
        self._seconds: dict[int, list[float]] = {}
        self._lock = threading.Lock()
        self._cluster = es.connect(endpoints, timeout=worker.TIMEOUT_S)
        self._tables = model.create_tables(self._cluster, name, seed=seed)
        self._net = model.Recommender(self._tables, name, seed=seed)
        self._net.dense.initialize()
        self.audit_table = self._cluster.create_table(
            f"{name}.audit", dim=worker.AUDIT_DIM, optimizer=es.SGD(lr=1.0), initializer=es.Zeros()
        )
        self._accounts = [scratch / f"{name}-{rank}.npy" for rank in range(workers)]
        self._errors = [scratch / f"{name}-{rank}.err" for rank in range(workers)]
        common = ["--epochs", str(epochs), "--batch", str(batch), "--encoding", encoding, "--seed", str(seed)]
        common += [] if staleness is None else ["--staleness", str(staleness)]
        self._processes = [self._start(rank, common, (steps or {}).get(rank)) for rank in range(workers)]
        self._ready = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in range(workers)]
        for thread in self._threads:
            thread.start()
        self._evaluator = threading.Thread(target=self._evaluate_often, daemon=True)

    def begin(self) -> None:
        """Lets all workers go at once, when all are ready."""
        for _ in range(self.workers):
            if not self._ready.acquire(timeout=READY_SECONDS):
                self._fail(f"workers were not ready in {READY_SECONDS:.0f} s")
            if self.failure:
                return
        self.began = time.monotonic()
        for process in self._processes:
            self._say(process, "go")
        self._evaluator.start()

    def release(self) -> None:
        """Lets the workers end when their epochs are done."""
        for process in self._processes:
            self._say(process, "stop")

    def running(self) -> bool:
        """False when all workers ended, or one failed."""
        return self.failure is None and any(thread.is_alive() for thread in self._threads)

    def progress(self) -> float:
        """Steps done over steps planned; beyond 1 while the workers wait for the last kill."""
        return self.steps / self.steps_planned

    def rows_per_s(self) -> float:
        """Rows pulled and pushed, over the last moments."""
        now = time.monotonic()
        with self._lock:
            while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
                self._recent.popleft()
            return sum(rows for _, rows in self._recent) / RATE_WINDOW_S

    def audit_pushes(self) -> int:
        """Audit pushes acknowledged so far."""
        return sum(self._audit_pushes.values())

    def finish(self) -> None:
        """Waits for all workers, and evaluates the model a last time. After a failure nobody trains on."""
        if self.failure is not None:
            self.kill()
        for thread in self._threads:
            thread.join()
        for rank, process in enumerate(self._processes):
            if process.wait() != 0 and self.failure is None:
                self._fail(f"worker {rank} ended with code {process.returncode}")
        if self._evaluator.is_alive():
            self._evaluator.join()
        if self.failure is None:
            self.auc = self._evaluate()

    def kill(self) -> None:
        """Ends all workers at once."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def gap(self, rank: int, since: float, until: float) -> Optional[float]:
        """The longest a worker waited between two acknowledged operations, of the waits that touch this time."""
        acks = self.acks[rank]
        waits = [after - before for before, after in zip(acks, acks[1:]) if after > since and before < until]
        return max(waits, default=None)

    def summary(self) -> dict[str, Any]:
        """Figures and the series by second."""
        seconds = max(self.ended - self.began, 1e-9)
        with self._lock:
            # Seconds in which nothing was acknowledged are in the series, with rate 0.
            series = [(s, self._seconds.get(s, [0.0, 0, 0])) for s in range(max(self._seconds, default=-1) + 1)]
        return {
            "auc": round(self.auc, 5),
            "loss": round(self.loss, 5),
            "steps": self.steps,
            "seconds": round(seconds, 2),
            "steps_per_s": round(self.steps / seconds, 1),
            "rows_per_s": round(self._rows / seconds),
            "series": {
                "second": [second for second, _ in series],
                "loss": [round(loss / steps, 5) if steps else None for _, (loss, steps, _) in series],
                "rows_per_s": [round(rows) for _, (_, _, rows) in series],
            },
        }

    def audit(self) -> dict[str, Any]:
        """Compares the audit table with the accounts of what was acknowledged."""
        account = sum(np.load(path) for path in self._accounts)
        table = self.audit_table.pull(np.arange(worker.AUDIT_ROWS))
        applied = -table.astype(np.int64)
        exact = bool(np.array_equal(table, -applied.astype(np.float32)))
        missing = np.maximum(account - applied, 0)
        surplus = np.maximum(applied - account, 0)
        return {
            "pushes": sum(line["audit_pushes"] for line in self.done.values()),
            "rows": int(account[:, 0].sum()),
            "units": int(account.sum()),
            "lost_rows": int(missing[:, 0].sum()),
            "lost_units": int(missing.sum()),
            "doubled_rows": int(surplus[:, 0].sum()),
            "doubled_units": int(surplus.sum()),
            "errors": [line["audit_error"] for line in self.done.values() if line["audit_error"]]
            + ([] if exact else ["the audit table holds values that are not integers"]),
        }

    def steps_by_rank(self) -> dict[int, int]:
        """How many steps each worker has done, once it is done."""
        return {rank: line["steps"] for rank, line in self.done.items()}

    def bits(self) -> str:
        """SHA-256 of every weight of the model, to the bit."""
        digest = hashlib.sha256()
        for name in sorted(self._tables):
            digest.update(self._tables[name].pull(np.arange(IDS_MAX)).tobytes())
        for _, values in sorted(self._net.dense.state_dict().items()):
            digest.update(values.numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Disconnects."""
        self._cluster.close()

    def _start(self, rank: int, common: list[str], steps: Optional[int]) -> subprocess.Popen:
        command = [sys.executable, str(HERE / "worker.py"), "--endpoints", self.endpoints, "--prefix", self.name]
        command += ["--rank", str(rank), "--workers", str(self.workers), "--account", str(self._accounts[rank]), *common]
        command += [] if steps is None else ["--steps", str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with open(self._errors[rank], "wb") as errors:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )

    @staticmethod
    def _say(process: subprocess.Popen, word: str) -> None:
        try:
            process.stdin.write(word + "\n")
            process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # It ended; its reader says how.

    def _read(self, rank: int) -> None:
        process = self._processes[rank]
        for line in process.stdout:
            event = json.loads(line)
            if event["kind"] == "ready":
                self._ready.release()
            elif event["kind"] == "progress":
                self._progress(rank, event)
            else:
                self.done[rank] = event
                self.ended = time.monotonic()
        if rank not in self.done:
            process.wait()
            last = self._errors[rank].read_text(errors="replace").strip().splitlines()[-1:]
            self._fail(f"worker {rank} ended with code {process.returncode}: {''.join(last)}")
            self._ready.release()

    def _progress(self, rank: int, event: dict[str, Any]) -> None:
        with self._lock:
            self.acks[rank].extend(event["acks"])
            self.steps += event["steps"]
            self.loss = event["loss"] if np.isnan(self.loss) else 0.9 * self.loss + 0.1 * event["loss"]
            self._rows += event["rows"]
            self._audit_pushes[rank] = event["audit_pushes"]
            self._recent.append((event["at"], event["rows"]))
            second = self._seconds.setdefault(int(event["at"] - self.began), [0.0, 0, 0])
            second[0] += event["loss"] * event["steps"]
            second[1] += event["steps"]
            second[2] += event["rows"]

    def _evaluate(self) -> float:
        return data.auc(self._test.label, model.predict(self._net, self._test))

    def _evaluate_often(self) -> None:
        while self.running():
            try:
                self.auc = self._evaluate()
            except es.EvershardError as error:
                self._fail(f"evaluation: {type(error).__name__}: {error}")
                return
            time.sleep(EVALUATE_EVERY_S)

    def _fail(self, why: str) -> None:
        with self._lock:
            self.failure = self.failure or why
