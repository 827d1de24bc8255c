"""Figures of the durable core: `make bench-storage`.

- budget: pull, push and step of one node (R = 1, fsync) when 100, 50, 20 and 10 % of a table's rows fit its memory budget, with ids
  drawn from Zipf 1.05 and uniformly; memory a row; disk bytes written per pushed byte.
- restart: from the start of the process of a killed node to its first answered pull, for tables of several sizes; killed at rest, and
  while rows drawn uniformly are pushed as fast as it takes them.
- snapshot: how fast a replica of some GiB is sent to a node that lacks it, and what becomes of pushes meanwhile (R = 3, fsync).
- hours: the resident memory of a node while a table of five times its budget is stepped, pushed and pulled in turn, by Zipf 1.05 and
  uniformly, sampled until the time is over.

Rates are medians of several runs by `bin/evershard-bench`, over real sockets, against `bin/evershard dev`. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

BIN = pathlib.Path(__file__).resolve().parents[2] / "bin"
DIM = 64
# Adagrad: weights, accumulators, and what a row has beside its floats.
ROW_BYTES = 2 * DIM * 4 + 36


class Dev:
    """A cluster in a folder."""

    def __init__(self, folder: pathlib.Path, shards: int, *flags: str, nodes: int = 1):
        self.folder = folder
        command = [BIN / "evershard", "dev", "--nodes", str(nodes), "--shards", str(shards), "--dir", folder]
        self.process = subprocess.Popen(
            [*map(str, command), "--", *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in self.process.stdout:
            if line.strip() == "ready":
                return
        raise SystemExit(f"the cluster in {folder} did not start; see {folder}/node-1/log")

    @property
    def endpoints(self) -> str:
        return (self.folder / "endpoints").read_text().strip()

    @property
    def pid(self) -> int:
        return int((self.folder / "node-1" / "pid").read_text())

    def metrics(self, node: int = 1) -> dict[str, float]:
        """Sums over labels, and each part of what was written."""
        log = (self.folder / f"node-{node}" / "log").read_text()
        http = re.findall(r"http[\"=: ]+(127\.0\.0\.1:\d+)", re.sub(r"\x1b\[[0-9;]*m", "", log))[-1]
        found: dict[str, float] = {}
        for line in urllib.request.urlopen(f"http://{http}/metrics").read().decode().splitlines():
            if not line.startswith("#") and " " in line:
                name, value = line.rsplit(" ", 1)
                for key in {name, name.split("{")[0]}:
                    found[key] = found.get(key, 0.0) + float(value)
        return found

    def rss(self) -> int:
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) << 10

    def control(self, *command: str) -> None:
        subprocess.run([str(BIN / "evershard"), "dev", "--dir", str(self.folder), *command], stdout=subprocess.DEVNULL, check=True)

    def ask(self, *command: str) -> dict:
        whole = [BIN / "evershardctl", "--endpoints", self.endpoints, "--output", "json", *command]
        return json.loads(subprocess.run(list(map(str, whole)), stdout=subprocess.PIPE, text=True, check=True).stdout)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def bench_command(dev: Dev, rows: int, zipf: float, cases: str, seconds: float, repeats: int) -> list[str]:
    command = [BIN / "evershard-bench", "--endpoints", dev.endpoints, "--workers", "1", "--cases", cases]
    command += ["--rows", rows, "--zipf", zipf, "--batches", 2000, "--seconds", seconds, "--repeats", repeats, "--json"]
    return list(map(str, command))


def bench(dev: Dev, rows: int, zipf: float, cases: str, seconds: float, repeats: int) -> list[dict]:
    done = subprocess.run(bench_command(dev, rows, zipf, cases, seconds, repeats), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def budget(args, folder: pathlib.Path) -> None:
    print(f"budget: {args.rows} rows x {DIM} Adagrad, R = 1, fsync, 1 worker; rates in thousand rows/s")
    print(f"{'in memory':>9} {'zipf':>5} {'pull':>8} {'push':>8} {'step':>8} {'B/row':>6} {'RSS MiB':>8} {'log':>6} {'flush':>6} {'compact':>7}")
    for percent in args.percent:
        for zipf in args.zipf:
            home = folder / f"budget-{percent}-{zipf}"
            limit = 0 if percent == 100 else max(args.rows * ROW_BYTES * percent // 100, 16 << 20)
            dev = Dev(home, 4, "--memory-budget", str(limit))
            try:
                bench(dev, args.rows, zipf, "step", args.seconds, 1)
                before = dev.metrics()
                rates = {line["case"]: line["rows_per_s"] / 1e3 for line in bench(dev, args.rows, zipf, "pull,push,step", args.seconds, args.repeats)}
                after = dev.metrics()
                grown = lambda name: after.get(name, 0.0) - before.get(name, 0.0)
                pushed = max(grown("evershard_push_bytes_total"), 1.0)
                parts = [grown(f'evershard_disk_written_bytes_total{{part="{part}"}}') / pushed for part in ("log", "flush", "compaction")]
                shown = dev.ask("table", "show", "bench-adagrad")
                print(
                    f"{percent:>8}% {zipf:>5} {rates['pull']:>8.0f} {rates['push']:>8.0f} {rates['step']:>8.0f} "
                    f"{shown['overhead_bytes_per_row']:>6.1f} {dev.rss() / 2**20:>8.0f} {parts[0]:>6.2f} {parts[1]:>6.2f} {parts[2]:>7.2f}",
                    flush=True,
                )
            finally:
                dev.stop()
                shutil.rmtree(home, ignore_errors=True)


def restart(args, folder: pathlib.Path) -> None:
    print("restart: kill -9 of the one node, from the start of its process to the first answered pull; tail: log entries behind the last flush")
    print(f"{'GiB':>5} {'rows':>10} {'killed':>10} {'tail':>6} {'seconds':>8} {'RSS MiB':>8}")
    for size in args.gib:
        home = folder / f"restart-{size}"
        rows = int(size * 2**30 / ROW_BYTES)
        dev = Dev(home, args.restart_shards, "--memory-budget", str(1 << 30), "--flush-interval-ms", "500")
        try:
            bench(dev, rows, 0, "push", 1.0, 1)
            for killed in ("at rest", "pushing"):
                time.sleep(3)
                load = None
                if killed == "pushing":
                    command = bench_command(dev, rows, 0, "push", 60.0, 1)
                    load = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    # It looks for its rows first, which a restart may have pushed out of memory.
                    pushed = lambda: dev.metrics().get("evershard_push_bytes_total", 0.0)
                    first = pushed()
                    while pushed() - first < 256 * 2**20:
                        time.sleep(0.2)
                found = [shard["replicas"][0] for shard in dev.ask("status")["shards"]]
                tail = sum(replica["last_index"] - (replica["flushed"] or 0) for replica in found)
                os.kill(dev.pid, signal.SIGKILL)
                if load is not None:
                    load.kill()
                    load.wait()
                time.sleep(1)
                took = start_and_pull(dev)
                print(f"{size:>5} {rows:>10} {killed:>10} {tail:>6} {took:>8.2f} {dev.rss() / 2**20:>8.0f}", flush=True)
        finally:
            dev.stop()
            shutil.rmtree(home, ignore_errors=True)


def start_and_pull(dev: Dev) -> float:
    """Seconds from the start of the process to the first answer."""
    probe = [BIN / "evershardctl", "--endpoints", dev.endpoints, "table", "get", "bench-adagrad", "1"]
    began = time.monotonic()
    starter = subprocess.Popen(
        [str(BIN / "evershard"), "dev", "--dir", str(dev.folder), "start-node", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while subprocess.run(list(map(str, probe)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
        time.sleep(0.02)
    took = time.monotonic() - began
    starter.wait(60)
    return took


def snapshot(args, folder: pathlib.Path) -> None:
    print("snapshot: a follower comes back after the log behind it is gone; pushes of 1 worker, R = 3, fsync, one shard, in thousand rows/s")
    print("pushes of the followers' absence, of the transfer, and of after it")
    print(f"{'GiB':>5} {'sent':>5} {'seconds':>8} {'MiB/s':>7} {'before':>8} {'during':>8} {'after':>8} {'part':>6}")
    rows = int(args.snapshot_gib * 2**30 / ROW_BYTES)
    home = folder / "snapshot"
    dev = Dev(home, 1, "--log-retain-bytes", str(16 << 20), *args.server, nodes=3)
    try:
        pushes = lambda seconds: bench(dev, rows, 1.05, "push", seconds, 1)[0]["rows_per_s"] / 1e3
        replicas = lambda: {replica["node"]: replica for replica in dev.ask("status")["shards"][0]["replicas"]}
        pushes(1.0)
        leader = dev.ask("shard", "list")["shards"][0]["leader"]
        away = next(node for node in (3, 2) if node != leader)
        while (then := replicas()[away]["last_index"]) is None:
            time.sleep(1)
        dev.control("kill-node", str(away))
        while (replicas()[leader]["purged"] or 0) <= then:
            pushes(3.0)
        before = pushes(10.0)
        sent = lambda: dev.metrics(leader).get('evershard_snapshot_bytes_total{kind="sent"}', 0.0)
        first = sent()
        dev.control("start-node", str(away))
        began, during = time.monotonic(), []
        is_back = lambda now: now[leader]["applied"] and (now[away]["applied"] or 0) + 1000 > now[leader]["applied"]
        while not is_back(replicas()) and time.monotonic() - began < args.snapshot_patience:
            during.append(pushes(3.0))
        took, bytes_sent = time.monotonic() - began, sent() - first
        after = pushes(10.0)
        mean = sum(during) / max(len(during), 1)
        print(
            f"{args.snapshot_gib:>5.1f} {bytes_sent / 2**30:>5.2f} {took:>8.1f} {bytes_sent / 2**20 / took:>7.0f} "
            f"{before:>8.0f} {mean:>8.0f} {after:>8.0f} {2 * mean / (before + after):>6.2f}",
            flush=True,
        )
    finally:
        dev.stop()
        shutil.rmtree(home, ignore_errors=True)


def hours(args, folder: pathlib.Path) -> None:
    limit = args.rows * ROW_BYTES // 5
    loads = [(case, zipf) for case in ("step", "push", "pull") for zipf in (1.05, 0.0)]
    print(f"hours: {args.rows} rows x {DIM} Adagrad, R = {args.hours_nodes}, a budget of {limit >> 20} MiB, 1 worker, loads in turn, for {args.hours} h")
    print(f"{'minute':>6} {'load':>10} {'krows/s':>8} {'used MiB':>9} {'RSS MiB':>8} {'RSS - 1.2 x budget':>19}")
    home = folder / "hours"
    dev = Dev(home, 4, "--memory-budget", str(limit), nodes=args.hours_nodes)
    try:
        bench(dev, args.rows, 0.0, "push", 5.0, 1)
        began, turn = time.monotonic(), 0
        while time.monotonic() - began < args.hours * 3600:
            case, zipf = loads[turn % len(loads)]
            rate = bench(dev, args.rows, zipf, case, 30.0, 1)[0]["rows_per_s"] / 1e3
            used, rss = dev.metrics()["evershard_memory_used_bytes"] / 2**20, dev.rss() / 2**20
            minute = (time.monotonic() - began) / 60
            print(f"{minute:>6.1f} {case + ' ' + str(zipf):>10} {rate:>8.0f} {used:>9.0f} {rss:>8.0f} {rss - 1.2 * limit / 2**20:>19.0f}", flush=True)
            turn += 1
    finally:
        dev.stop()
        shutil.rmtree(home, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="budget,restart,snapshot", help="budget, restart, snapshot, hours (default: all but hours)")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--percent", type=int, nargs="+", default=[100, 50, 20, 10])
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.05, 0.0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0, 4.0, 10.0])
    parser.add_argument("--restart-shards", type=int, default=1)
    parser.add_argument("--snapshot-gib", type=float, default=5.0)
    parser.add_argument("--snapshot-patience", type=float, default=300.0, help="seconds after which a transfer is given up")
    parser.add_argument("--server", nargs="*", default=[], help="more flags of the servers of a snapshot, after all others")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--hours-nodes", type=int, default=1)
    parser.add_argument("--dir", help="where clusters live while they are measured (default: a temporary folder)")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="evershard-bench-", dir=args.dir))
    try:
        if "budget" in args.parts:
            budget(args, folder)
        if "restart" in args.parts:
            restart(args, folder)
        if "snapshot" in args.parts:
            snapshot(args, folder)
        if "hours" in args.parts:
            hours(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
