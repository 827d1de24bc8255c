"""Steps in flight: what holds up a push or a tick holds up nobody, as far as it says, and nothing is lost or out of order."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import evershard as es
from evershard.torch import Embedding, EmbeddingGroup, Prefetch

IDS = np.array([7], dtype=np.uint64)
ONES = -np.ones((1, 4), dtype=np.float32)


def until(condition):
    """Waits for a state; a test that hangs here is ended by its runner."""
    event = threading.Event()
    while not condition():
        event.wait(0.002)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "evershard-steps"]


def clocks(job):
    return [worker["clock"] for worker in job.describe()["workers"]]


def test_all_steps_are_there_when_the_worker_has_left(cluster, sgd, name):
    job = cluster.job(name, workers=1, staleness=1)
    with job.worker(0, steps_in_flight=5) as worker:
        for step in range(30):
            worker.push_async(sgd, IDS, ONES)
            worker.tick(b"%d" % step)
            assert sgd.pull(IDS)[0, 0] >= step + 1 - 5, "so many of its own are not under way any more"
        assert worker.clock == 30 and worker.cursor == b"29" and worker.steps_in_flight == 5
        worker.push_async(sgd, IDS, ONES)
        worker.push(sgd, IDS, ONES)
        assert sgd.pull(IDS)[0, 0] == 32, "a push that waits comes behind those in flight"
        worker.tick(b"last")
    assert np.all(sgd.pull(IDS) == 32) and threads() == []
    assert job.describe()["workers"][0]["cursor"] == b"last"
    for call in (worker.tick, lambda: worker.push_async(sgd, IDS, ONES), worker.barrier):
        with pytest.raises(es.AlreadyClosed):
            call()
    worker.leave()


def test_it_is_ahead_as_far_as_it_says_and_no_further(cluster, sgd, name):
    """Staleness 1 and 3 in flight: 4 steps ahead of one that waits, by what the servers know."""
    job = cluster.job(name, workers=2, staleness=1)
    done = []

    def run():
        with job.worker(0, steps_in_flight=3) as fast:
            for step in range(12):
                fast.push_async(sgd, IDS, ONES)
                fast.tick()
                done.append(step)
                assert clocks(job)[1] >= len(done) - 4
            done.append("all")

    with job.worker(1) as slow:
        runner = threading.Thread(target=run)
        runner.start()
        for ticks in range(9):
            until(lambda: len(done) >= min(ticks + 4, 12))
            slow.tick()
    # Who has left is waited for no more.
    runner.join(60)
    assert done[-1] == "all" and np.all(sgd.pull(IDS) == 12)


def test_arrays_may_be_changed_while_they_wait(cluster, sgd, name):
    tensor = cluster.create_tensor(name + "-whole", (2, 3), optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
    job = cluster.job(name, workers=2, staleness=1)
    with job.worker(1) as slow:
        with job.worker(0, steps_in_flight=4) as fast:
            for _ in range(4):
                ids, rows, whole = IDS.copy(), ONES.copy(), -np.ones((2, 3), np.float32)
                fast.push_many_async([(sgd, ids, rows), (tensor, whole)])
                fast.tick()
                ids[:], rows[:], whole[:] = 1, 50, 50
            # The others' clocks let two of the four pass: the rest waits in this process.
            for _ in range(4):
                slow.tick()
    assert np.all(sgd.pull(IDS) == 4) and np.all(sgd.pull([1]) == 0) and np.all(tensor.pull() == 4)


def test_what_failed_is_told_by_every_later_call(cluster, sgd, name):
    job = cluster.job(name, workers=1, staleness=2)
    with pytest.raises(es.Fenced):
        with job.worker(0, steps_in_flight=2) as worker:
            worker.push_async(sgd, IDS, ONES)
            worker.tick(b"1")
            assert worker.clock == 1
            with job.worker(0) as successor:
                assert successor.cursor == b"1"
                worker.push_async(sgd, IDS, ONES)
                with pytest.raises(es.Fenced):
                    while True:
                        worker.tick(b"2")
                for call in (worker.tick, lambda: worker.push_async(sgd, IDS, ONES), lambda: worker.clock):
                    with pytest.raises(es.Fenced):
                        call()
            worker.tick()
    assert np.all(sgd.pull(IDS) == 1) and threads() == []
    with pytest.raises(es.WrongDim), job.worker(0, steps_in_flight=2) as worker:
        worker.push_async(sgd, IDS, np.ones((1, 3), np.float32))
    until(lambda: threads() == [])


def test_an_exception_waits_for_nobody(cluster, sgd, name):
    job = cluster.job(name, workers=2, staleness=1)
    with job.worker(1) as slow:
        with pytest.raises(KeyError):
            with job.worker(0, steps_in_flight=3) as fast:
                for _ in range(4):
                    fast.push_async(sgd, IDS, ONES)
                    fast.tick()
                # Its second tick waits for the other worker.
                until(lambda: clocks(job)[0] == 2)
                assert len(threads()) == 1
                raise KeyError
        slow.tick()
        until(lambda: threads() == [])
    assert np.all(sgd.pull(IDS) == 2), "what was not begun is forgotten, and its step was not ticked"


def test_in_step_nothing_is_in_flight(cluster, sgd, name):
    for aggregate in ("sum", "apart"):
        with cluster.job(f"{name}-{aggregate}", workers=1, aggregate=aggregate).worker(0, steps_in_flight=3) as worker:
            assert worker.steps_in_flight == 0 and threads() == []
            before = sgd.pull(IDS)
            worker.push_async(sgd, IDS, ONES)
            worker.tick()
            assert np.all(sgd.pull(IDS) == before + 1)
    with pytest.raises(es.InvalidArgument, match="steps_in_flight"):
        cluster.job(name, workers=1).worker(0, steps_in_flight=-1)


def test_a_cluster_that_stands_still_holds_up_no_step_that_is_in_flight(binary, tmp_path):
    """The server is stopped, and so is everything but the worker: which trains what it has pulled ahead."""
    with es.local(1, 1, str(tmp_path)) as cluster:
        table = cluster.create_table("t", dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
        group = EmbeddingGroup({"e": Embedding(table=table)})
        with cluster.job("j", workers=1, staleness=1).worker(0, steps_in_flight=6) as worker:
            group.worker = worker
            batches = [{"e": torch.tensor([7])}] * 20
            with Prefetch(group, batches, depth=6) as ready:
                assert ready.staleness == 1 + 6 + 6
                for step, batch in enumerate(ready):
                    if step == 5:
                        until(lambda: ready.waiting == 6)
                        assert worker.clock == 5
                        os.kill(cluster.pid(1), signal.SIGSTOP)
                    if step == 11:
                        os.kill(cluster.pid(1), signal.SIGCONT)
                    (-group(batch)["e"].sum()).backward()
                    worker.tick(b"%d" % step)
            assert worker.clock == 20
        assert np.all(table.pull(IDS) == 20)


def test_a_program_that_ends_in_the_middle_ends(cluster, sgd):
    code = (
        "import sys, numpy as np, evershard as es\n"
        "cluster = es.connect(sys.argv[1])\n"
        "table = cluster.table(sys.argv[2])\n"
        "worker = cluster.job(sys.argv[2], workers=1, staleness=1).worker(0, steps_in_flight=50)\n"
        "for _ in range(50):\n"
        "    worker.push_async(table, [7], -np.ones((1, 4), np.float32))\n"
        "    worker.tick()\n"
        "sys.exit(7)\n"
    )
    command = [sys.executable, "-c", code, ",".join(cluster.endpoints), sgd.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (7, "")
