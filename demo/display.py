"""The demo's live display: one block, redrawn in place on a terminal; plain lines now and then elsewhere.

Not here: where the figures come from.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import Callable

import evershard as es

from kills import Kill, Killer, leaders
from training import Training

REDRAW_S = 0.25
LINE_EVERY_S = 5.0
BAR_WIDTH = 30
BOLD, DIM, RED, GREEN, RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[0m"


class Display:
    """Shows a training until it ends; afterwards the last block stays on the screen."""

    def __init__(self, cluster: es.Cluster, nodes: int):
        self._cluster = cluster
        self._nodes = nodes
        self._live = sys.stdout.isatty()
        self._drawn = 0
        self._leaders: dict[int, int] = {}

    def show(self, title: str, training: Training, killer: Killer | None) -> None:
        """Draws until the workers have ended."""
        threading.Thread(target=self._watch_leaders, args=(training,), daemon=True).start()
        self._drawn, told, last_line = 0, 0, 0.0
        while training.running():
            if self._live:
                self._redraw(self._block(title, training, killer))
            else:
                told = self._tell_kills(training, killer, told)
                if time.monotonic() - last_line >= LINE_EVERY_S:
                    last_line = time.monotonic()
                    print(f"{title}: {self._figures(training)}, {self._leader_words(str)}", flush=True)
            time.sleep(REDRAW_S)
        if self._live:
            self._redraw(self._block(title, training, killer))
        else:
            self._tell_kills(training, killer, told)

    def _block(self, title: str, training: Training, killer: Killer | None) -> list[str]:
        done = min(training.progress(), 1.0)
        filled = round(done * BAR_WIDTH)
        bar = "█" * filled + "·" * (BAR_WIDTH - filled)
        seconds = (training.ended or time.monotonic()) - training.began if training.began else 0
        lines = [
            f"{BOLD}{title}{RESET}  {seconds:5.1f} s  {bar} {done:4.0%}",
            f"  {self._figures(training)}",
            f"  leaders  {self._leader_words(lambda text: f'{RED}{text}{RESET}')}",
        ]
        if killer is not None:
            lines += [f"  {self._kill_words(n, kill, training)}" for n, kill in enumerate(killer.kills, 1)]
        return lines

    def _figures(self, training: Training) -> str:
        return (
            f"step {training.steps}/{training.steps_planned}  loss {training.loss:.4f}  AUC {training.auc:.4f}  "
            f"{training.rows_per_s():,.0f} rows/s  {training.audit_pushes():,} audit pushes acknowledged"
        )

    def _leader_words(self, mark_dead: Callable[[str], str]) -> str:
        led = {node: 0 for node in range(1, self._nodes + 1)}
        for node in self._leaders.values():
            led[node] = led.get(node, 0) + 1
        unknown = led.pop(0, 0)
        words = [f"node {node}: {count}" if count else mark_dead(f"node {node}: 0") for node, count in led.items()]
        return "  ".join(words + ([f"none: {unknown}"] if unknown else []))

    def _kill_words(self, number: int, kill: Kill, training: Training) -> str:
        gap = kill_gap(training, kill)
        words = f"kill {number}: node {kill.node} (led {kill.led}) at {kill.at - training.began:.1f} s"
        words += f", gap seen by workers {gap * 1000:.0f} ms" if gap is not None else ""
        if kill.caught_up_at is not None:
            return f"{words}, back and caught up after {kill.caught_up_at - kill.at:.1f} s"
        if kill.started_at is not None:
            return f"{words}, started again, catching up"
        return f"{words}, dead"

    def _tell_kills(self, training: Training, killer: Killer | None, told: int) -> int:
        """One line for a kill, when its story is complete."""
        kills = [] if killer is None else killer.kills
        while told < len(kills) and (kills[told].caught_up_at is not None or not training.running()):
            print(self._kill_words(told + 1, kills[told], training), flush=True)
            told += 1
        return told

    def _redraw(self, lines: list[str]) -> None:
        width = shutil.get_terminal_size().columns
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        # Cut to the width (a few bytes more for colours): a wrapped line would break the redraw.
        sys.stdout.write(up + "".join(f"\x1b[2K{_cut(line, width)}\n" for line in lines))
        sys.stdout.flush()
        self._drawn = len(lines)

    def _watch_leaders(self, training: Training) -> None:
        while training.running():
            try:
                self._leaders = leaders(self._cluster)
            except es.EvershardError:
                pass  # A node is down; the next look asks another.
            time.sleep(REDRAW_S)


def kill_gap(training: Training, kill: Kill) -> float | None:
    """The longest gap that any worker saw around a kill, in seconds; None while nothing is known."""
    gaps = [training.gap(rank, kill.at, kill.at + GAP_WINDOW_S) for rank in range(training.workers)]
    return max((gap for gap in gaps if gap is not None), default=None)


GAP_WINDOW_S = 5.0


def _cut(line: str, width: int) -> str:
    shown, out, at = 0, [], 0
    while at < len(line):
        if line[at] == "\x1b":
            end = line.index("m", at) + 1
            out.append(line[at:end])
            at = end
            continue
        if shown < width - 1:
            out.append(line[at])
        shown, at = shown + 1, at + 1
    return "".join(out)
