"""Workers of a job, in processes of their own where that matters."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import evershard as es

IDS = np.array([7], dtype=np.uint64)
ONES = -np.ones((1, 4), dtype=np.float32)


def test_two_workers_stay_within_the_staleness(cluster, sgd, name):
    job = cluster.job(name, workers=2, staleness=1)
    seen = [[], []]

    def run(rank):
        with job.worker(rank) as worker:
            for step in range(20):
                rows = worker.pull(sgd, [0, 1])
                seen[rank].append(rows[1 - rank, 0] - step)
                worker.push(sgd, [rank], ONES)
                if rank == 1:
                    time.sleep(0.002)
                worker.tick(cursor=b"%d" % step)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen[0]) == len(seen[1]) == 20
    assert min(seen[0] + seen[1]) >= -1 and max(seen[0] + seen[1]) <= 2
    assert np.all(sgd.pull([0, 1]) == 20)
    described = job.describe()
    assert [worker["state"] for worker in described["workers"]] == ["done", "done"]
    assert described["workers"][0]["cursor"] == b"19"
    cluster.remove_job(name)
    with pytest.raises(es.UnknownJob):
        job.describe()


PAUSED = """
import sys, time, numpy as np, evershard as es
cluster = es.connect(sys.argv[1])
table = cluster.table(sys.argv[2])
worker = cluster.job(sys.argv[2], workers=1, staleness=None, lease=2.0).worker(0)
try:
    while True:
        worker.push(table, np.array([7], dtype=np.uint64), -np.ones((1, 4), dtype=np.float32))
        worker.tick(b"paused")
        print("stepped", flush=True)
except es.Fenced as error:
    print("fenced", error, flush=True)
"""


def test_a_paused_worker_wakes_up_fenced_and_its_pushes_count_once_or_not_at_all(cluster, sgd):
    """SIGSTOP in the middle of its steps, for longer than its lease; its replacement goes on where its last tick was."""
    command = [sys.executable, "-c", PAUSED, ",".join(cluster.endpoints), sgd.name]
    paused = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(20):
            assert paused.stdout.readline().strip() == "stepped"
        os.kill(paused.pid, signal.SIGSTOP)
        time.sleep(6)
        with cluster.job(sgd.name, workers=1, staleness=None, lease=2.0).worker(0) as worker:
            clock, rows = worker.clock, sgd.pull(IDS)
            assert worker.cursor == b"paused"
            # The step that was under way may have been pushed, and not ticked.
            assert rows[0, 0] - clock in (0, 1) and clock >= 20
            os.kill(paused.pid, signal.SIGCONT)
            for line in paused.stdout:
                if line.startswith("fenced"):
                    break
            else:
                raise AssertionError("it was not told")
            assert np.all(sgd.pull(IDS) == rows), "what it pushed since is not there"
            worker.push(sgd, IDS, ONES)
            worker.tick(b"next")
        assert np.all(sgd.pull(IDS) == rows + 1)
        assert paused.wait(30) == 0
    finally:
        paused.kill()


def test_ranks_come_from_the_environment_and_errors_say_what_is_wrong(cluster, name, monkeypatch):
    job = cluster.job(name, workers=1)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(es.InvalidArgument, match="RANK"):
        job.worker()
    monkeypatch.setenv("RANK", "0")
    with job.worker() as worker:
        assert (worker.rank, worker.clock, worker.cursor) == (0, 0, b"")
        worker.barrier()
    with pytest.raises(es.AlreadyClosed):
        worker.tick()
    with pytest.raises(es.Conflict, match="staleness 0"):
        cluster.job(name, workers=1, staleness=3).worker(0)
    with pytest.raises(es.InvalidArgument, match="on_dead_worker"):
        cluster.job(name + "x", workers=1, on_dead_worker="panic").worker(0)


@pytest.mark.parametrize("aggregate, expected", [("sum", 6.0), ("mean", 2.0)])
def test_a_step_of_all_workers_is_applied_once_at_its_end(cluster, sgd, name, aggregate, expected):
    """Gradients 1, 2, 3 of one id; the ids of another worker's step may be none."""
    job = cluster.job(name, workers=3, aggregate=aggregate)
    before = []

    def run(rank):
        with job.worker(rank) as worker:
            if rank == 1:
                worker.push_async(sgd, IDS, ONES * 2)
            else:
                worker.push(sgd, IDS, ONES * (rank + 1))
            before.append(sgd.pull(IDS)[0, 0])
            worker.barrier()
            worker.tick(b"one")
            after = worker.pull(sgd, IDS)
            if rank == 0:
                worker.push(sgd, IDS, ONES * 3)
            worker.tick(b"two")
            results[rank] = (after, worker.pull(sgd, IDS), worker.clock)

    results = {}
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert before == [0, 0, 0], "nothing is applied before the step's end"
    for after, later, clock in results.values():
        assert np.all(after == expected)
        assert np.all(later == expected + (3 if aggregate == "sum" else 1)) and clock == 2
    assert job.describe()["workers"][2]["cursor"] == b"two"
    with pytest.raises(es.InvalidArgument, match="aggregate"):
        cluster.job(name + "x", workers=1, aggregate="most").worker(0)
    with pytest.raises(es.InvalidArgument, match="staleness 0"):
        cluster.job(name + "x", workers=1, staleness=1, aggregate="mean").worker(0)
