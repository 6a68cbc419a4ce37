"""The flags of `fsm-train --simulate`, which say nothing of the run itself and so are no settings of it.

Light enough for `--help`: the simulator is imported only when it is asked for.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fsm_trainer.config.errors import ConfigError, flag

FLAGS = {
    "simulate_rollout_s": "Seconds of one batch's generation",
    "simulate_train_s": "Seconds of one optimiser step",
    "simulate_reward_s": "Seconds of one batch's reward",
    "simulate_sync_s": "Seconds of an engine's load of new weights",
}
"""Durations by flag; each a number or a distribution."""
DEFAULTS = {"simulate_rollout_s": "1", "simulate_train_s": "0.5", "simulate_reward_s": "0", "simulate_sync_s": "0"}

_DESCRIPTION = "Seconds are a number, lognormal:median,sigma, pareto:scale,alpha or uniform:low,high."


@dataclass(frozen=True)
class SimulationRequest:
    """What the `--simulate` flags ask for."""

    given: dict[str, str]
    """Durations by flag name, as written."""
    run: str | None = None
    """A recorded run to take durations from."""


def add_simulation_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser a section of its own for them."""
    section = parser.add_argument_group("Simulate", _DESCRIPTION)
    section.add_argument("--simulate", action="store_true", help="Predict what this run would do, start nothing")
    for name, meaning in FLAGS.items():
        section.add_argument(flag(name), metavar="SECONDS", help=f"{meaning} [default {DEFAULTS[name]}]")
    section.add_argument("--simulate-from", metavar="RUN", help="A recorded run to take durations from")


def take_simulation_flags(flags: dict[str, Any]) -> SimulationRequest | None:
    """Take the simulation's flags out of `flags`; ConfigError for one without --simulate."""
    wanted = bool(flags.pop("simulate", False))
    run = flags.pop("simulate_from", None)
    given = {name: flags.pop(name) for name in FLAGS if name in flags}
    if wanted:
        return SimulationRequest(given, run)
    if run is not None or given:
        extra = next(iter(given), "simulate_from")
        raise ConfigError(f"{flag(extra)} has no meaning without --simulate; give --simulate or leave it out")
    return None
