"""Pickling, fork, Ctrl-C, wrong addresses, close: what a client meets in real programs."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import evershard as es

ONES = np.ones((1, 4), np.float32)


def run_python(code, *arguments, **options):
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_a_pickled_table_connects_by_itself(sgd):
    copy = pickle.loads(pickle.dumps(sgd))
    copy.push([1], ONES)
    sgd.push([1], ONES)
    assert sgd.pull([1])[0, 0] == copy.pull([1])[0, 0] == -2
    assert copy.cluster.endpoints == sgd.cluster.endpoints
    copy.cluster.close()


def test_a_pickled_table_works_in_another_process(sgd):
    code = """
        import pickle, sys
        import numpy as np
        pickle.loads(bytes.fromhex(sys.argv[1])).push([1], np.ones((1, 4)))
    """
    done = run_python(code, pickle.dumps(sgd).hex())
    assert done.returncode == 0, done.stderr
    assert sgd.pull([1])[0, 0] == -1


def test_a_pickled_table_that_was_dropped_is_unknown(cluster, sgd):
    data = pickle.dumps(sgd)
    cluster.drop_table(sgd.name)
    cluster.create_table(sgd.name, dim=4, optimizer=es.SGD(lr=1.0))
    with pytest.raises(es.UnknownTable):
        pickle.loads(data).pull([1])


def test_errors_can_be_pickled():
    error = pickle.loads(pickle.dumps(es.PartialPush("half", applied=[1], refused=[2], unknown=[3])))
    assert (str(error), error.applied, error.refused, error.unknown) == ("half", [1], [2], [3])
    assert str(pickle.loads(pickle.dumps(es.UnknownTable("no table 'x'")))) == "no table 'x'"


def test_a_forked_child_has_a_session_of_its_own(sgd):
    sgd.push([1], ONES)
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for _ in range(5):
                    sgd.push([1], ONES)
                code = 0 if sgd.pull([1])[0, 0] <= -6 else 2
            finally:
                os._exit(code)
        children.append(pid)
    sgd.push([1], ONES)
    for pid in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sgd.push([1], ONES)
    assert sgd.pull([1])[0, 0] == -(3 + 15)


@pytest.mark.parametrize("address", ["http://127.0.0.1:{port}", "http://127.0.0.1:{port},http://[::1]:{port}"])
def test_nobody_listens(address):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(es.Unavailable, match=str(port)):
        es.connect(address.format(port=port), connect_timeout=1.0)


def test_somebody_listens_who_does_not_answer():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(es.Unavailable, match=str(port)):
            es.connect(f"http://127.0.0.1:{port}", connect_timeout=1.0)


@pytest.mark.parametrize("address", ["", "not a url", "http://", [], "http://127.0.0.1:99999"])
def test_bad_addresses(address):
    with pytest.raises(es.EvershardError):
        es.connect(address, connect_timeout=1.0)


def test_ctrl_c_interrupts_a_wait():
    """The server never answers; the signal comes while the call waits inside the native module."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        code = """
            import signal, sys
            import evershard as es
            # A shell's background job starts with SIGINT ignored, and so would this child.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            print("waiting", flush=True)
            try:
                es.connect(sys.argv[1], connect_timeout=60)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        """
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), f"http://127.0.0.1:{silent.getsockname()[1]}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout.readline() == "waiting\n"
            time.sleep(0.3)
            child.send_signal(signal.SIGINT)
            assert child.communicate(timeout=20)[0] == "interrupted\n"
        finally:
            child.kill()
            child.wait()


def test_other_threads_run_while_a_call_waits():
    """The GIL is released: a thread counts while connect() waits for its deadline."""
    code = """
        import socket, threading
        import evershard as es
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        count, done = 0, threading.Event()
        def work():
            global count
            while not done.wait(0.01):
                count += 1
        thread = threading.Thread(target=work)
        thread.start()
        try:
            es.connect(f"http://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=1)
        except es.Unavailable:
            pass
        done.set()
        thread.join()
        print(count)
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    # About 100 in the second that connect() takes; one at most when it holds the GIL.
    assert int(done.stdout) > 20


def test_a_signal_handler_may_use_evershard():
    """The handler runs while a call waits, and makes a call itself."""
    code = """
        import os, signal, socket, threading
        import evershard as es
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        def handler(*_):
            try:
                es.connect(address, connect_timeout=0.2)
            except es.Unavailable:
                print("handled", flush=True)
        signal.signal(signal.SIGTERM, handler)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        try:
            es.connect(address, connect_timeout=1.5)
        except es.Unavailable:
            print("went on", flush=True)
    """
    done = run_python(code)
    assert done.stdout.splitlines() == ["handled", "went on"], done.stderr


def test_servers_end_with_the_process_that_owns_them(binary, tmp_path):
    """Even when it is killed, and cannot clean up."""
    code = """
        import os, signal, sys
        import evershard as es
        cluster = es.local(1, 1, sys.argv[1])
        print(cluster.process.pid, cluster.pid(1), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run_python(code, str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.05)


def alive(pid):
    """A zombie that nobody reaps is dead."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_close(cluster, name):
    with es.connect(",".join(cluster.endpoints)) as other:
        table = other.create_table(name, dim=4, optimizer=es.SGD(lr=1.0))
    for call in (lambda: table.pull([1]), lambda: table.push([1], ONES), other.routing, other.stats):
        with pytest.raises(es.AlreadyClosed):
            call()
    other.close()  # Again: nothing.


def test_routing_and_stats(cluster, sgd):
    routing = cluster.routing()
    assert len(routing["nodes"]) == 3 and len(routing["shards"]) == 8
    assert {shard["leader"] for shard in routing["shards"]} <= {0, 1, 2, 3}
    assert sgd.name in [table["name"] for table in routing["tables"]]
    before = cluster.stats()
    sgd.push([1], ONES)
    after = cluster.stats()
    assert all(isinstance(value, int) for value in after.values())
    assert sum(after.values()) > sum(before.values())


def test_local_ends_its_servers(binary, tmp_path):
    with es.local(1, 1, str(tmp_path)) as cluster:
        table = cluster.create_table("t", dim=1, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
        table.push([1], [[3.0]])
        pid = cluster.pid(1)
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with es.local(dir=str(tmp_path)) as cluster:  # The same directory: the same data.
        assert cluster.table("t").pull([1]).tolist() == [[-3]]


def test_local_tells_what_went_wrong(binary, tmp_path):
    with pytest.raises(es.EvershardError, match="ended with code"):
        es.local(1, 1, str(tmp_path), server_args=["--no-such-flag"])
