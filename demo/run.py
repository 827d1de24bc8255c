"""`make demo`: train a recommender on a replicated cluster, kill its leaders, and prove that nothing was lost.

Starts three servers with eight shards and trains MovieLens 100k on them with four worker processes, twice: while the node
that leads the most shards is killed with SIGKILL, three times, and the same steps again, undisturbed. The workers go in step
(BSP: their gradients are summed, `--staleness 0`), unless they are told to go ahead of each other. Then it compares the two
models bit by bit, the audit table with what was acknowledged, and all replicas with each other, and writes
`demo/report.json` and `demo/report.png`.

Exit code 0 only when at least the wanted leaders were killed, no acknowledged push was lost or doubled, all replicas are
bit-identical, the test AUC is at least 0.76, and, of workers that go in step, both models have the same bits.

Not here: everything else is in the files beside this one.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("EVERSHARD_BIN", str(HERE.parent / "bin" / "evershard"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

import evershard as es  # noqa: E402

import data  # noqa: E402
import display  # noqa: E402
import kills  # noqa: E402
import report as reports  # noqa: E402
from training import Training  # noqa: E402

NODES, SHARDS, WORKERS = 3, 8, 4


def main() -> int:
    """Runs the demo; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128, help="ratings of one worker's step")
    parser.add_argument(
        "--staleness",
        type=staleness,
        default=0,
        metavar="N|any",
        help="steps that a worker may be ahead of the slowest: 0 (default) sums the gradients of all, any: nobody waits",
    )
    parser.add_argument("--encoding", choices=["f32", "bf16", "f16", "int8"], default="f32", help="how gradients travel")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--skip-undisturbed", action="store_true", help="only the run with kills")
    parser.add_argument("--durability", choices=["fsync", "memory"], default="fsync")
    options = parser.parse_args()

    torch.set_num_threads(1)
    began = time.monotonic()
    # A run that breaks off must not leave the report of an earlier one.
    for old in ("report.json", "report.png"):
        (HERE / old).unlink(missing_ok=True)
    data.ensure_wheel()
    directory = HERE / "cluster"
    shutil.rmtree(directory, ignore_errors=True)
    print(f"Starting {NODES} servers with {SHARDS} shards in {directory} ({options.durability})", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="evershard-demo-") as scratch,
        es.local(NODES, SHARDS, str(directory), durability=options.durability) as cluster,
    ):
        ctl = pathlib.Path(os.environ["EVERSHARD_BIN"]).with_name("evershardctl")
        result = demo(cluster, ctl, pathlib.Path(scratch), options)
    if result is None:
        return 1
    result["seconds"] = round(time.monotonic() - began, 1)
    result["problems"] = reports.verdict(result)
    reports.write_json(result, HERE / "report.json")
    reports.write_picture(result, HERE / "report.png")
    print(reports.text(result))
    print(f"\n  {HERE / 'report.json'}\n  {HERE / 'report.png'}\n", flush=True)
    return 1 if result["problems"] else 0


def staleness(text: str) -> int | None:
    """`any` is None."""
    return None if text == "any" else int(text)


def demo(cluster: es.LocalCluster, ctl: pathlib.Path, scratch: pathlib.Path, options) -> dict[str, Any] | None:
    """Both runs and the checks after them; None when a run broke off (said on stderr)."""
    screen = display.Display(cluster, NODES)
    training, killer = train(
        "kills", "Training while leaders are killed", cluster, ctl, screen, scratch, options, options.kills
    )
    if training is None:
        return None
    calm = None
    if not options.skip_undisturbed:
        steps = training.steps_by_rank()
        undisturbed, _ = train(
            "undisturbed", "The same steps, undisturbed", cluster, ctl, screen, scratch, options, 0, steps
        )
        if undisturbed is None:
            return None
        calm = {**undisturbed.summary(), "audit": undisturbed.audit(), "bits": undisturbed.bits()}
        undisturbed.close()
    print("Comparing the models, the audit table with what was acknowledged, and the replicas with each other", flush=True)
    result = {
        "nodes": NODES,
        "shards": SHARDS,
        "workers": WORKERS,
        "durability": options.durability,
        "staleness": options.staleness,
        "encoding": options.encoding,
        "kills_wanted": options.kills,
        "with_kills": {**training.summary(), "bits": training.bits()},
        "undisturbed": calm,
        "kills": [describe(kill, training) for kill in killer.kills],
        "audit": training.audit(),
        "scrub": scrub(ctl, ",".join(cluster.endpoints)),
    }
    if calm is not None:
        # The undisturbed run is audited as well; whatever is wrong there counts.
        for name in ("lost_rows", "lost_units", "doubled_rows", "doubled_units"):
            result["audit"][name] += calm["audit"][name]
        result["audit"]["errors"] += calm["audit"]["errors"]
    result["gaps"] = reports.gap_figures(result["kills"])
    training.close()
    return result


def train(
    name, title, cluster, ctl, screen, scratch, options, kill_count, steps=None
) -> tuple[Training | None, kills.Killer]:
    """One training, shown while it runs."""
    endpoints = ",".join(cluster.endpoints)
    training = Training(
        name, endpoints, WORKERS, options.epochs, options.batch, options.staleness, scratch, steps, options.encoding
    )
    killer = kills.Killer(cluster, ctl, training, kill_count)
    try:
        training.begin()
        killer.start()
        if kill_count == 0:
            training.release()
        else:
            release_after(killer, training)
        screen.show(title, training, killer if kill_count else None)
        training.finish()
        killer.join()
    finally:
        training.kill()
    failure = training.failure or killer.failure
    if failure:
        print(f"demo: {title.lower()}: {failure}", file=sys.stderr)
        return None, killer
    return training, killer


def release_after(killer: kills.Killer, training: Training) -> None:
    """Lets the workers end once the last kill is over, however that came about."""
    def wait() -> None:
        killer.join()
        training.release()

    threading.Thread(target=wait, daemon=True).start()


def describe(kill: kills.Kill, training: Training) -> dict[str, Any]:
    """A kill for the report; times in seconds of the run, gaps in milliseconds."""
    gaps = {rank: training.gap(rank, kill.at, kill.at + display.GAP_WINDOW_S) for rank in range(training.workers)}
    gaps_ms = {str(rank): round(gap * 1000, 1) for rank, gap in gaps.items() if gap is not None}

    def since(moment: float | None) -> float | None:
        return None if moment is None else round(moment - training.began, 3)

    return {
        "node": kill.node,
        "led": kill.led,
        "at_s": since(kill.at),
        "leaders_back_at_s": since(kill.leaders_back_at),
        "started_at_s": since(kill.started_at),
        "caught_up_at_s": since(kill.caught_up_at),
        "gaps_ms": gaps_ms,
        "gap_max_ms": max(gaps_ms.values(), default=0.0),
    }


def scrub(ctl: pathlib.Path, endpoints: str) -> dict[str, Any]:
    """Digests of all replicas: equal when every shard is, and evershardctl says so by its exit code too."""
    try:
        found = kills.ctl_json(ctl, endpoints, "scrub")
    except RuntimeError as error:
        return {"equal": False, "shards": 0, "different": [], "problem": str(error), "details": []}
    different = [shard["id"] for shard in found["shards"] if not shard["equal"] or len(shard["digests"]) != NODES]
    equal = not different and found["exit_code"] == 0 and len(found["shards"]) == SHARDS
    return {
        "equal": equal,
        "shards": len(found["shards"]),
        "different": different,
        "problem": "" if equal else f"evershardctl scrub: exit {found['exit_code']}",
        "details": found["shards"],
    }


if __name__ == "__main__":
    sys.exit(main())
