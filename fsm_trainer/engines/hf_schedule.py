"""The learning rate as a function of optimiser steps taken: linear warm-up, then constant, linear or cosine.

Pure arithmetic, so a resumed run needs nothing but its step count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LR_DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class LRSchedule:
    """A learning rate for every optimiser step. Raises ValueError for an impossible combination."""

    lr: float
    style: str = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Steps, warm-up included, after which `min_lr` is reached and kept."""
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        """Check every value."""
        if self.style not in LR_DECAY_STYLES:
            raise ValueError(f"lr_decay_style is {self.style!r}, expected one of {', '.join(LR_DECAY_STYLES)}")
        if not (0.0 < self.lr < math.inf):
            raise ValueError(f"lr is {self.lr}, expected a positive number")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup is {self.warmup_steps}, expected at least 0")
        if self.style == "constant":
            return
        if not 0.0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr is {self.min_lr}, expected from 0 to lr, which is {self.lr}")
        if self.decay_steps is None or self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"lr_decay_steps is {self.decay_steps}, but lr_decay_style {self.style} needs more than the "
                f"{self.warmup_steps} warm-up steps"
            )

    def at(self, step: int) -> float:
        """Return the learning rate of the optimiser step that comes after `step` others."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.style == "constant" or self.decay_steps is None:
            return self.lr
        progress = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        share = 1.0 - progress if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr + (self.lr - self.min_lr) * share
