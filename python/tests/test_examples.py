"""The examples as a newcomer runs them: a few steps each, against the cluster of the session."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def movielens():
    """The data that two examples train on: in the cache, or downloaded to it."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import data; data.ensure_wheel()"
    command = [sys.executable, "-c", code, str(ROOT / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        pytest.skip(f"MovieLens 100k is neither cached nor downloadable: {done.stderr.strip().splitlines()[-1]}")


def run(example, cluster, *flags):
    """What it prints; it must end by itself, and have nothing to complain about."""
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), "--endpoints", ",".join(cluster.endpoints), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


def figure(name, output):
    """A figure of the last line."""
    last = output.strip().splitlines()[-1]
    found = re.search(rf"{name} (\d\.\d+)", last)
    assert found, last
    return float(found.group(1))


def test_matrix_factorization_in_step_is_the_same_each_time(cluster, name, movielens):
    outputs = [run("matrix_factorization", cluster, "--steps", "20", "--batch", "256", "--name", f"{name}-{n}") for n in "ab"]
    first, second = (figure("RMSE", output) for output in outputs)
    assert first == second, "in step, nothing depends on who is faster"
    assert 0.9 < first < 1.2
    assert re.search(r"means of films and people +0\.94", outputs[0])
    assert "10,240 ratings" in outputs[0]
    again = run("matrix_factorization", cluster, "--steps", "20", "--batch", "256", "--name", f"{name}-a")
    assert figure("RMSE", again) == first and "\n0 ratings" in again, "a job that is done has no steps left"


@pytest.mark.parametrize("flags", [[], ["--staleness", "0"]])
def test_dlrm_prints_its_figures(cluster, name, movielens, flags):
    output = run("dlrm", cluster, "--steps", "20", "--name", name, *flags)
    assert 0.5 < figure("test AUC", output) < 1.0
    assert "20,480 ratings" in output


def test_a_worker_of_dlrm_is_replaced(cluster, name, movielens):
    output = run("dlrm", cluster, "--steps", "60", "--name", name, "--kill-worker")
    assert "kill -9 of worker 0" in output
    assert [worker["clock"] for worker in cluster.job(name, workers=2).describe()["workers"]] == [60, 60]


@pytest.mark.parametrize("flags", [[], ["--staleness", "any", "--workers", "1"], ["--staleness", "0"]])
def test_click_model_prints_its_figures(cluster, name, flags):
    output = run("click_model", cluster, "--steps", "6", "--batch", "128", "--test", "2000", "--name", name, *flags)
    assert 0.4 < figure("test AUC", output) < 0.9
    assert re.search(r"^ +\d+ +\d+ +[\d,]+ +[\d,]+ +[\d,]+ +0\.\d{4} +0\.\d{4}$", output, re.MULTILINE), output


def test_ctrl_c_ends_an_example_with_one_line(cluster, name):
    """To the whole process group, as a terminal sends it, once training is under way."""
    command = [sys.executable, "-u", str(ROOT / "examples" / "click_model.py"), "--endpoints", ",".join(cluster.endpoints)]
    command += ["--name", name, "--batch", "64", "--test", "500", "--every", "0.1"]
    example = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        for line in example.stdout:
            if re.match(r" +\d+ +[1-9]", line):
                break
        os.killpg(example.pid, signal.SIGINT)
        _, errors = example.communicate(timeout=60)
    finally:
        example.kill()
    assert (example.returncode, errors.strip()) == (130, "interrupted")
    described = cluster.job(name, workers=2, staleness=2).describe()
    assert [worker["state"] for worker in described["workers"]] == ["done", "done"], "they left, and nobody waits for them"


def test_what_the_cluster_refuses_is_one_line():
    command = [sys.executable, str(ROOT / "examples" / "click_model.py"), "--endpoints", "localhost", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and re.fullmatch(r"InvalidArgument: .*http://host:port\n", done.stderr), done.stderr
