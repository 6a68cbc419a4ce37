"""How long simulated operations take: numbers, distributions, stragglers, or what a recorded run took.

It says nothing of what operations do; see `recorded.py` for durations from a log.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsm_trainer.core.events import CommandKind
from fsm_trainer.engines.fake_behaviour import Amount, Lognormal, Pareto, Uniform

__all__ = ["Amount", "Durations", "Lognormal", "Pareto", "Stragglers", "Uniform", "parse_amount"]


@dataclass(frozen=True)
class Stragglers:
    """A batch takes as long as its slowest prompt: each of `prompts` takes `usual` seconds, or, with probability
    `share`, `factor` times that.
    """

    usual: float
    share: float = 0.02
    factor: float = 8.0
    prompts: int = 16

    def draw(self, rng: random.Random) -> float:
        """One value."""
        straggles = rng.random() < 1.0 - (1.0 - self.share) ** self.prompts
        return self.usual * (self.factor if straggles else 1.0)


@dataclass(frozen=True)
class Durations:
    """Seconds of each kind of operation, and of its hand-over either way. What is not given takes no time."""

    operations: Mapping[CommandKind, Amount] = field(default_factory=dict)
    before: Mapping[CommandKind, Amount] = field(default_factory=dict)
    """From the decision, or the end of what ran before on the same thread, to the start of the operation."""
    after: Mapping[CommandKind, Amount] = field(default_factory=dict)
    """From the end of the operation to the moment the loop takes its completion."""
    tokens: Amount = 64
    """Tokens of a generated batch."""
    serial_engines: bool = False
    """Each engine generates one batch at a time, so that workers who share it wait for each other; otherwise they do
    not even slow each other down."""
    held_up: Amount = 0.0
    """Share of a reward's time in which a train step beside it stands still, as they share an interpreter."""

    @classmethod
    def of(
        cls,
        *,
        rollout_s: Amount = 1.0,
        train_s: Amount = 0.5,
        reward_s: Amount = 0.0,
        sync_s: Amount = 0.0,
        tokens: Amount = 64,
    ) -> Durations:
        """Durations of a step's parts; `sync_s` is the engine's load of new weights, the export is free."""
        return cls(
            {
                CommandKind.GENERATE: rollout_s,
                CommandKind.TRAIN: train_s,
                CommandKind.REWARD: reward_s,
                CommandKind.LOAD_WEIGHTS: sync_s,
            },
            tokens=tokens,
        )


LONGEST_S = 1e9
"""Seconds that a given duration may have, some thirty years."""
MOST_SIGMA, LEAST_ALPHA = 50.0, 0.1
"""Beyond these a draw may exceed what a float holds."""
_PARAMETERS = {"lognormal": ("median", "sigma"), "pareto": ("scale", "alpha"), "uniform": ("low", "high")}


def parse_amount(text: str) -> Amount:
    """Seconds as people write them: `1.5`, `lognormal:median,sigma`, `pareto:scale,alpha` or `uniform:low,high`.

    Raises ValueError that says what is wrong.
    """
    name, colon, arguments = text.strip().partition(":")
    if not colon:
        return _number(name, text)
    if name not in _PARAMETERS:
        raise ValueError(f"{text!r} names no distribution; give a number, or one of {_forms()}")
    values = [_number(part, text) for part in arguments.split(",")]
    if len(values) != 2:
        raise ValueError(f"{text!r} has {len(values)} parameter(s), expected {_form(name)}")
    if name == "uniform":
        if values[0] > values[1]:
            raise ValueError(f"{text!r} has its low above its high; expected {_form(name)}")
        return Uniform(*values)
    if name == "pareto" and values[1] < LEAST_ALPHA:
        raise ValueError(
            f"{text!r} has alpha {values[1]:g}, expected at least {LEAST_ALPHA:g}: the smaller, the heavier the tail"
        )
    if name == "lognormal" and values[1] > MOST_SIGMA:
        raise ValueError(f"{text!r} has sigma {values[1]:g}, expected at most {MOST_SIGMA:g}")
    return Lognormal(*values) if name == "lognormal" else Pareto(*values)


def _form(name: str) -> str:
    return f"{name}:{','.join(_PARAMETERS[name])}"


def _forms() -> str:
    return ", ".join(map(_form, _PARAMETERS))


def _number(part: str, text: str) -> float:
    try:
        value = float(part)
    except ValueError:
        raise ValueError(f"{text!r} is no duration; give seconds as a number, or one of {_forms()}") from None
    if not 0 <= value <= LONGEST_S:
        raise ValueError(f"{text!r} holds {part}, expected a number of at least 0 and at most {LONGEST_S:g}")
    return value
