"""For your own tests: simulated runs, the contract of engines, fake engines, virtual time, an event log in memory.

A test built on these never sleeps, and repeats exactly.

>>> result = simulate(SchedulerConfig(max_steps=100, max_staleness=2), seed=3, durations=Durations.of(rollout_s=2.0))
>>> result.outcome, result.wall_s, result.shares.trainer_idle, result.events()
"""

from fsm_trainer.core.config import Deadlines, SchedulerConfig
from fsm_trainer.core.events import CommandKind, Input, InputKind, Record, RecordKind
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
from fsm_trainer.simulate.durations import Durations, Stragglers, parse_amount
from fsm_trainer.simulate.faults import Delivery, Disturbance, FaultPlan, Happening, LogFault
from fsm_trainer.simulate.recorded import Recorded, recorded
from fsm_trainer.simulate.shares import Shares
from fsm_trainer.simulate.simulator import NO_DEADLINES, SimResult, SimulationError, simulate
from fsm_trainer.simulate.sink import MemorySink
from fsm_trainer.simulate.virtual import VirtualResult, VirtualRun
from fsm_trainer.simulate.world import Starved, VirtualWorld
from fsm_trainer.testing.contract import Check, engine_contract

__all__ = [
    "NO_DEADLINES",
    "Check",
    "CommandKind",
    "Deadlines",
    "Delivery",
    "Disturbance",
    "Durations",
    "Effect",
    "FakeBehaviour",
    "FakeOperations",
    "FakeOutcome",
    "FakeRolloutEngine",
    "FakeTrainEngine",
    "Fault",
    "FaultPlan",
    "Happening",
    "Input",
    "InputKind",
    "LogFault",
    "Lognormal",
    "MemorySink",
    "OperationAborted",
    "Pareto",
    "Record",
    "RecordKind",
    "Recorded",
    "SchedulerConfig",
    "Shares",
    "SimResult",
    "SimulationError",
    "Starved",
    "Stragglers",
    "Uniform",
    "VirtualClock",
    "VirtualResult",
    "VirtualRun",
    "VirtualWorld",
    "engine_contract",
    "parse_amount",
    "recorded",
    "simulate",
]
