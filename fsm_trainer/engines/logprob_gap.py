"""How far the logprobs of two engines for the same tokens lie apart, and the limit past which that is no rounding.

Plain numbers only. Where the logprobs come from, and what follows from a gap that is too large, is for others to know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SINGLE_PER_MEAN = 25.0
"""How much more than the mean one token may be off: rounding has a heavy tail, above all on unlikely tokens."""


@dataclass(frozen=True)
class LogprobGap:
    """Differences `trainer - rollout` of natural-log probabilities, added up over tokens."""

    tokens: int
    absolute: float
    """Sum of |difference|; not finite if one of the logprobs is not."""
    signed: float
    """Sum of the differences: over the tokens, the mean log-ratio."""
    largest: float
    """Largest |difference|."""

    @classmethod
    def between(cls, trainer: Sequence[Sequence[float]], rollout: Sequence[Sequence[float]]) -> LogprobGap:
        """Compare token by token. ValueError when the two do not have the same shape."""
        if [len(row) for row in trainer] != [len(row) for row in rollout]:
            raise ValueError(
                f"the trainer scored rows of {[len(row) for row in trainer]} tokens and the rollout engine "
                f"{[len(row) for row in rollout]}, expected the same; look at the engine's score"
            )
        pairs = [pair for rows in zip(trainer, rollout, strict=True) for pair in zip(*rows, strict=True)]
        differences = [ours - theirs for ours, theirs in pairs]
        sizes = [abs(difference) for difference in differences]
        largest = math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)
        return cls(len(pairs), sum(sizes), sum(differences), largest)

    @property
    def mean(self) -> float:
        """Mean |difference| of a token; 0 without tokens."""
        return self.absolute / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        """The numbers, for a message."""
        return f"mean |difference| {self.mean:.3g}, largest {self.largest:.3g}, over {self.tokens} tokens"


@dataclass(frozen=True)
class GapLimit:
    """What a gap may be at most."""

    mean: float

    @property
    def single(self) -> float:
        """Limit of one token's |difference|."""
        return SINGLE_PER_MEAN * self.mean

    def admits(self, gap: LogprobGap) -> bool:
        """Whether rounding may explain the gap; what is not a number never passes."""
        return gap.mean <= self.mean and gap.largest <= self.single

    def __str__(self) -> str:
        """The numbers, for a message."""
        return f"mean {self.mean:g} and largest {self.single:g}"


class LogprobMismatch(RuntimeError):  # noqa: N818 - what was found, like EngineDied
    """Two engines that should have the same weights give the same tokens other logprobs."""

    def __init__(self, message: str, gap: LogprobGap) -> None:
        """The message says whose logprobs, the numbers and the limit."""
        super().__init__(message)
        self.gap = gap
