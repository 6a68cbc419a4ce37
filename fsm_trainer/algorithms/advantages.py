"""Advantages from rewards: how much better a completion was than the others of its prompt group.

Pure arithmetic on plain numbers; knows nothing of tokens, models or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

AdvantageFn = Callable[[Sequence[Sequence[float]]], "tuple[tuple[float, ...], ...]"]
"""Maps the rewards of each prompt group to the advantages of each prompt group."""


def group_advantages(
    rewards: Sequence[Sequence[float]], *, normalize_std: bool = True, eps: float = 1e-4
) -> tuple[tuple[float, ...], ...]:
    """Group-relative advantages: `(reward - mean) / (std + eps)` within each prompt group.

    This is the outcome reward of GRPO (Shao et al. 2024, DeepSeekMath, section 4.1). The standard deviation is the
    sample one (divisor n - 1), as `torch.std` and TRL have it. A group without spread, and so a group of one, gets
    exact zeros. Raises ValueError for a reward that is not finite, naming it.
    """
    return tuple(_one_group(group, index, normalize_std, eps) for index, group in enumerate(rewards))


def mean_centred_advantages(rewards: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """`reward - mean` within each prompt group: Dr. GRPO (Liu et al. 2025), which does not divide by the spread.

    Dividing gives groups that are nearly all right or all wrong a larger weight. Raises as `group_advantages` does.
    """
    return group_advantages(rewards, normalize_std=False)


AdvantageStd = Literal["group", "none"]
ADVANTAGES: dict[AdvantageStd, AdvantageFn] = {"group": group_advantages, "none": mean_centred_advantages}
"""Choice of `--advantage-std` -> advantage function."""


def _one_group(group: Sequence[float], index: int, normalize_std: bool, eps: float) -> tuple[float, ...]:
    for position, reward in enumerate(group):
        if not math.isfinite(reward):
            raise ValueError(
                f"reward of sample {position} of prompt group {index} is {reward}, expected a finite number; "
                f"check the reward function"
            )
    # Compared as given: the mean of equal numbers may differ from them in the last bit.
    if len(group) < 2 or min(group) == max(group):
        return (0.0,) * len(group)
    mean = math.fsum(group) / len(group)
    centred = [reward - mean for reward in group]
    if not normalize_std:
        return tuple(centred)
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(group) - 1))
    return tuple(value / (std + eps) for value in centred)
