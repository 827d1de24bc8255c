"""What compressed gradients cost in accuracy: the demo's training in each encoding, in step, from the same seeds.

One server and memory durability: neither replicas nor disks change a bit of a model that is trained in step, and so a run
needs less of the machine. Prints one line a run, and the mean distance to f32 for each encoding; exit code 1 when that is
above what docs/encodings.md says (0.002 for bf16, 0.005 for int8).

Not here: the training (training.py, worker.py).
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile

import run  # noqa: F401 - first: it finds the server binary
import torch

import evershard as es

import data
from training import Training

WORKERS, SHARDS = 4, 8
AUC_AWAY_MAX = {"bf16": 0.002, "f16": 0.002, "int8": 0.005}


def main() -> int:
    """Trains every encoding with every seed; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encodings", nargs="+", default=["f32", "bf16", "int8"], choices=["f32", *AUC_AWAY_MAX])
    parser.add_argument("--seeds", nargs="+", type=int, default=[7, 8, 9])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    if options.encodings[0] != "f32":
        options.encodings.insert(0, "f32")

    torch.set_num_threads(1)
    data.ensure_wheel()
    auc: dict[str, list[float]] = {encoding: [] for encoding in options.encodings}
    print(f"{'encoding':<10}{'seed':>6}{'test AUC':>10}{'from f32':>10}{'steps':>8}{'seconds':>9}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="evershard-encodings-") as scratch,
        es.local(1, SHARDS, durability="memory") as cluster,
    ):
        for seed in options.seeds:
            for encoding in options.encodings:
                trained = train(cluster, pathlib.Path(scratch), encoding, seed, options)
                auc[encoding].append(trained["auc"])
                away = trained["auc"] - auc["f32"][-1]
                figures = f"{trained['auc']:>10.5f}{away:>+10.5f}{trained['steps']:>8}{trained['seconds']:>9.0f}"
                print(f"{encoding:<10}{seed:>6}{figures}", flush=True)
    return conclude(auc)


def train(cluster: es.Cluster, scratch: pathlib.Path, encoding: str, seed: int, options) -> dict:
    """One training: its figures."""
    name = f"{encoding}-{seed}"
    endpoints = ",".join(cluster.endpoints)
    training = Training(
        name, endpoints, WORKERS, options.epochs, options.batch, 0, scratch, encoding=encoding, seed=seed
    )
    try:
        training.begin()
        training.release()
        training.finish()
    finally:
        training.kill()
    if training.failure:
        raise SystemExit(f"encodings: {name}: {training.failure}")
    summary = training.summary()
    training.close()
    return summary


def conclude(auc: dict[str, list[float]]) -> int:
    """Prints mean AUC and the distance of its mean from that of f32; the exit code."""
    mean = {encoding: sum(values) / len(values) for encoding, values in auc.items()}
    worst = 0
    print(f"\n{'encoding':<10}{'mean AUC':>10}{'from f32':>10}{'allowed':>10}")
    for encoding, value in mean.items():
        away, allowed = value - mean["f32"], AUC_AWAY_MAX.get(encoding, 0.0)
        is_met = abs(away) <= allowed
        worst = worst if is_met else 1
        print(f"{encoding:<10}{value:>10.5f}{away:>+10.5f}{allowed:>10.3f}{'' if is_met else '  NOT MET'}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
