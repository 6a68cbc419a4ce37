"""A whole run in virtual time: the real event loop and scheduler over a world that is a heap of completions.

Nothing waits and nothing runs beside the caller, so thousands of steps take seconds and every run repeats exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsm_trainer.core.config import SECOND_NS, SchedulerConfig
from fsm_trainer.core.events import Input, Record, RecordKind
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.engines.fake_behaviour import FakeBehaviour
from fsm_trainer.runtime.clock import VirtualClock
from fsm_trainer.runtime.loop import EventLoop, Observer, Sink
from fsm_trainer.simulate.sink import MemorySink
from fsm_trainer.simulate.world import VirtualWorld


@dataclass(frozen=True)
class VirtualResult:
    """What a virtual run left."""

    records: list[Record]
    outcome: str
    error: str | None
    end_ns: int
    inputs: int

    def of_kind(self, kind: RecordKind) -> list[Record]:
        """The records of one kind, in order."""
        return [record for record in self.records if record.kind is kind]


class VirtualRun:
    """One run of a configuration in a fake world, with what a test may want to put in its place.

    `simulate` is the simpler way in, and checks every invariant on the way.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        behaviour: FakeBehaviour,
        *,
        events: Sequence[tuple[float, Input]] = (),
        sink: Sink | None = None,
        observers: Sequence[Observer] = (),
        max_inputs: int = 1_000_000,
    ) -> None:
        """`events` come from outside (a STOP, say), each at its second; `sink` may see the records as they come."""
        self.scheduler = Scheduler(config)
        self.clock = VirtualClock()
        self.world = VirtualWorld(behaviour.fresh(), self.clock, max_inputs=max_inputs, inflight=config.inflight)
        self._memory = MemorySink()
        self.loop = EventLoop(
            self.scheduler, sink or self._memory, self.world, self.world.dispatch, self.clock, observers
        )
        for at_s, event in events:
            self.world.put_at(round(at_s * SECOND_NS), event)

    def run(self) -> VirtualResult:
        """Run to the end. The result has no records when a sink was given."""
        outcome = self.loop.run()
        return VirtualResult(self._memory.records, outcome, self.loop.error, self.clock.now_ns(), self.loop.inputs)
