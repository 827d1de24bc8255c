"""Learning-rate schedules: what an optimizer's ``lr`` is multiplied by, a function of the worker's clock.

They are the ``schedule=`` of any optimizer. The clock is :meth:`evershard.Worker.tick`'s, and travels with each push; outside
a job it is 0, so a table with a warm-up then stays at its first step. A push with an ``lr`` of its own is not scheduled.

Not here: their arithmetic, which runs on the servers (docs/optimizers.md).
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Union

__all__ = ["Cosine", "Schedule", "StepDecay", "WarmUp"]


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Linear warm-up: ``(step + 1) / steps`` before step ``steps``, then 1."""

    steps: int

    def numbers(self) -> Dict[str, float]:
        """As the native module takes them."""
        return {"warmup_steps": self.steps}


@dataclasses.dataclass(frozen=True)
class StepDecay:
    """``factor ** (step // every)``, as ``torch.optim.lr_scheduler.StepLR``; counted from the end of a warm-up, if any."""

    every: int
    factor: float = 0.1
    warmup_steps: int = 0

    def numbers(self) -> Dict[str, float]:
        """As the native module takes them."""
        return {"warmup_steps": self.warmup_steps, "step_every": self.every, "step_factor": self.factor}


@dataclasses.dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 to ``floor``, which holds from step ``steps`` on; counted from the end of a warm-up, if any."""

    steps: int
    floor: float = 0.0
    warmup_steps: int = 0

    def numbers(self) -> Dict[str, float]:
        """As the native module takes them."""
        return {"warmup_steps": self.warmup_steps, "cosine_steps": self.steps, "cosine_floor": self.floor}


Schedule = Union[WarmUp, StepDecay, Cosine]
