"""DAPO's two pieces that are no loss: reward lost by completions near the length limit, and groups that are left out.

Both are from Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale". Pure arithmetic; knows
nothing of tokens, rewards' functions or where prompts come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OverlongPenalty:
    """Soft overlong punishment (DAPO, eq. 13): reward falls over the last `buffer` tokens before `longest`.

    The paper's L_max is `longest`, its L_cache `buffer`, its -1 at and beyond L_max `-penalty`. Raises ValueError
    for a buffer that is not part of the length, or a penalty that is not positive.
    """

    longest: int
    """Most tokens a completion can have."""
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 < self.buffer < self.longest:
            raise ValueError(f"buffer is {self.buffer}, expected 1 to {self.longest - 1}")
        if not self.penalty > 0:
            raise ValueError(f"penalty is {self.penalty}, expected a positive number")

    def reward(self, length: int) -> float:
        """What is added to the reward of a completion of `length` tokens: 0 down to `-penalty`."""
        over = length - (self.longest - self.buffer)
        return -self.penalty * min(over, self.buffer) / self.buffer if over > 0 else 0.0


@dataclass(frozen=True)
class GroupChoice:
    """Which prompt groups of a generated batch are trained on."""

    used: tuple[int, ...]
    """Their positions, in the order they were generated in."""
    informative: int
    """How many groups had a gradient; the surplus of them over `used` is left out."""


def choose_groups(informative: Sequence[bool], wanted: int) -> GroupChoice:
    """Dynamic sampling (DAPO, section 3.2): the first `wanted` groups that have a gradient.

    Where there are fewer, the batch is smaller. Where there is none at all, the first `wanted` groups are kept as they
    are: what becomes of a batch without a gradient is not decided here.
    """
    having = tuple(index for index, has in enumerate(informative) if has)
    used = having[:wanted] if having else tuple(range(min(wanted, len(informative))))
    return GroupChoice(used, len(having))
