"""What torchrun tells, and a real torchrun whose worker dies and is started again."""

import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import evershard as es
from evershard.torch import Launch, from_environment, job_from_environment

STEPS, DIES_AT = 12, 5


def test_the_environment_of_a_launcher():
    whole = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert from_environment(whole) == Launch(rank=3, world_size=4, local_rank=1, restart_count=2)
    assert from_environment({"RANK": "3", "WORLD_SIZE": "4"}) == Launch(3, 4, 3, 0)
    assert from_environment({}) == Launch(0, 1, 0, 0)
    for wrong, name in [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "1"}, "RANK"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "'one'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({**whole, "TORCHELASTIC_RESTART_COUNT": "x"}, "RESTART_COUNT"),
    ]:
        with pytest.raises(es.InvalidArgument, match=name):
            from_environment(wrong)


def test_a_process_started_by_itself_is_a_job_of_one(cluster, name, monkeypatch):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    job = job_from_environment(cluster, name)
    assert (job.workers, job.staleness) == (1, 0)
    with job.worker(from_environment().rank) as worker:
        worker.tick(b"1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert job_from_environment(cluster, name, staleness=None).workers == 3


SCRIPT = f"""
import os, sys
import torch
import evershard as es
from evershard.torch import Embedding, from_environment, job_from_environment

here = from_environment()
cluster = es.connect(sys.argv[1])
module = Embedding(table=cluster.table(sys.argv[2]))
job = job_from_environment(cluster, sys.argv[2])
with job.worker(here.rank) as worker:
    module.worker = worker
    begins_at = int(worker.cursor or b"0")
    print("rank", here.rank, "restart", here.restart_count, "begins at", begins_at, flush=True)
    for step in range(begins_at, {STEPS}):
        module(torch.tensor([here.rank, 9])).sum().backward()
        if (here.rank, here.restart_count, step) == (1, 0, {DIES_AT}):
            # Its gradients of this step may be with the leaders already.
            os._exit(3)
        worker.tick(b"%d" % (step + 1))
"""


def test_torchrun_restarts_a_worker_that_dies_and_every_step_counts_once(cluster, sgd, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["--max_restarts", "2", "--monitor_interval", "0.2", str(script), ",".join(cluster.endpoints), sgd.name]
    # Said, because torch 1.13 under Python 3.11 cannot read its own defaults of these: Std(0) is no member to it.
    command[3:3] = ["--redirects", "1", "--tee", "1", "--log_dir", str(tmp_path / "logs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} restart 0 begins at 0" in done.stdout
    # Both are started again. A step ends for all or for none; but rank 0 may have ended its part of this one before it was
    # stopped, and what it contributed counts if its other half comes before it is back itself.
    assert f"rank 1 restart 1 begins at {DIES_AT}" in done.stdout
    assert re.search(rf"rank 0 restart 1 begins at ({DIES_AT}|{DIES_AT + 1})\b", done.stdout)
    assert "restart 2" not in done.stdout
    assert np.all(sgd.pull([0, 1, 9]) == [[-STEPS], [-STEPS], [-2 * STEPS]]), "once each, to the bit"
    workers = cluster.job(sgd.name, workers=2).describe()["workers"]
    assert [(worker["state"], worker["clock"], worker["cursor"]) for worker in workers] == [("done", STEPS, b"12")] * 2
