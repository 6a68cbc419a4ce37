"""What a scored batch says about itself, as numerator and denominator of each rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsm_trainer.algorithms.shaping import GroupChoice
from fsm_trainer.core.batch import TrainSequence

Rates = dict[str, tuple[float, float]]


def reward_rates(rewards: Sequence[float | None], by_function: Mapping[str, Sequence[float | None]]) -> Rates:
    """Mean reward of all samples that have one, also of groups not trained on; and of each of several functions.

    Added up as the batch's own `reward_mean` is, so that both are the same to the last bit.
    """
    columns = {"reward_mean": rewards}
    if len(by_function) > 1:
        columns |= {f"reward/{name}": column for name, column in by_function.items()}
    known = {name: [value for value in column if value is not None] for name, column in columns.items()}
    return {name: (sum(values), float(len(values))) for name, values in known.items()}


def advantage_rates(used: Sequence[TrainSequence]) -> Rates:
    """Mean, mean absolute value and mean square of the advantages that are trained on."""
    values = [sequence.advantage for sequence in used if any(sequence.loss_mask)]
    if not values:
        return {}
    count = float(len(values))
    return {
        "advantage_mean": (sum(values), count),
        "advantage_abs_mean": (sum(map(abs, values)), count),
        "advantage_square_mean": (sum(value * value for value in values), count),
    }


def group_rates(choice: GroupChoice, generated: int) -> Rates:
    """Of the prompt groups that were generated: without spread (and so without a gradient), and trained on."""
    return {
        "zero_variance_fraction": (float(generated - choice.informative), float(generated)),
        "groups_used_fraction": (float(len(choice.used)), float(generated)),
    }


def overlong_rates(added: Sequence[float]) -> Rates:
    """What the length penalty added to the rewards of all samples, and how many it touched."""
    count = float(len(added))
    return {
        "overlong_penalty_mean": (sum(added), count),
        "overlong_fraction": (float(sum(value < 0 for value in added)), count),
    }
