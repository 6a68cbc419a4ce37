"""For your own tests: fake engines with programmable durations and faults, virtual time, an event log in memory.

A test built on these never sleeps, and repeats exactly.
"""

from fsm_trainer.engines.fake import (
    Effect,
    FakeBehaviour,
    FakeOperations,
    FakeOutcome,
    FakeRolloutEngine,
    FakeTrainEngine,
    Fault,
    Lognormal,
    OperationAborted,
    Pareto,
    Uniform,
)
from fsm_trainer.runtime.clock import VirtualClock
from fsm_trainer.simulate.sink import MemorySink
from fsm_trainer.simulate.virtual import VirtualResult, VirtualRun
from fsm_trainer.simulate.world import Starved, VirtualWorld

__all__ = [
    "Effect",
    "FakeBehaviour",
    "FakeOperations",
    "FakeOutcome",
    "FakeRolloutEngine",
    "FakeTrainEngine",
    "Fault",
    "Lognormal",
    "MemorySink",
    "OperationAborted",
    "Pareto",
    "Starved",
    "Uniform",
    "VirtualClock",
    "VirtualResult",
    "VirtualRun",
    "VirtualWorld",
]
