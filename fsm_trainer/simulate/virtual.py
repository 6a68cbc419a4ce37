"""A whole run in virtual time: the real event loop and scheduler over a world that is a heap of completions.

Nothing waits and nothing runs beside the caller, so thousands of steps take seconds and every run repeats exactly.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import NOTICES, Command, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.engines.fake_behaviour import FakeBehaviour
from fsm_trainer.runtime.clock import VirtualClock
from fsm_trainer.runtime.lanes import lane_of
from fsm_trainer.runtime.loop import EventLoop, Observer, Sink
from fsm_trainer.simulate.sink import MemorySink

SECOND_NS = 1_000_000_000


class Starved(RuntimeError):  # noqa: N818
    """The run waits for ever: nothing is in flight and no deadline is armed."""


class VirtualWorld:
    """Executes commands in virtual time, one at a time on each lane; it is the loop's inbox as well."""

    def __init__(self, behaviour: FakeBehaviour, clock: VirtualClock, *, max_inputs: int = 1_000_000) -> None:
        """`max_inputs` ends a run that makes no end of events."""
        self.notices: list[Command] = []
        self._behaviour = behaviour
        self._clock = clock
        self._left = self._max_inputs = max_inputs
        self._heap: list[tuple[int, int, Input]] = []
        self._pushed = 0
        self._lanes: dict[str, deque[Command]] = {}
        self._posted: dict[int, int] = {}
        self._started: dict[int, int] = {}
        self._aborted: set[int] = set()

    def put(self, event: Input) -> None:
        """Let an input come now."""
        self.put_at(self._clock.now_ns(), event)

    def put_at(self, t_ns: int, event: Input) -> None:
        """Let an input come at a moment."""
        heapq.heappush(self._heap, (t_ns, self._pushed, event))
        self._pushed += 1

    def get(self, deadline_ns: int | None) -> Input | None:
        """Move the clock to the next input, or to the deadline if that comes first."""
        self._left -= 1
        if self._left < 0:
            raise Starved(f"no end of the run after {self._max_inputs} inputs")
        if deadline_ns is not None and (not self._heap or deadline_ns < self._heap[0][0]):
            self._clock.advance_to(max(deadline_ns, self._clock.now_ns()))
            return None
        if not self._heap:
            raise Starved("nothing is in flight and no deadline is armed, but the run is not finished")
        t_ns, _, event = heapq.heappop(self._heap)
        self._clock.advance_to(max(t_ns, self._clock.now_ns()))
        return self._arrived(event)

    def dispatch(self, command: Command) -> None:
        """Put a command on its lane; deliver a notice."""
        if command.kind in NOTICES:
            self._notice(command)
            return
        self._posted[command.op] = self._clock.now_ns()
        lane = self._lanes.setdefault(lane_of(command), deque())
        lane.append(command)
        if len(lane) == 1:
            self._start(command)

    def in_flight(self) -> list[Command]:
        """Commands that have not completed."""
        return [command for lane in self._lanes.values() for command in lane]

    def _arrived(self, event: Input) -> Input:
        """Free the lane of a completed command; the times of the operation are now known."""
        lane = next((lane for lane in self._lanes.values() if lane and lane[0].op == event.op), None)
        if lane is None or event.op is None:
            return event
        op = lane.popleft().op
        if lane:
            self._start(lane[0])
        posted_ns, started_ns = self._posted.pop(op), self._started.pop(op)
        return replace(event, posted_ns=posted_ns, started_ns=started_ns, finished_ns=self._clock.now_ns())

    def _start(self, command: Command) -> None:
        now = self._clock.now_ns()
        self._started[command.op] = now
        if command.op in self._aborted:
            self._give_up(command)
            return
        outcome = self._behaviour.outcome(command)
        end = now + round(outcome.duration_s * SECOND_NS)
        if outcome.death is not None:
            self.put_at(end, outcome.death)
        if outcome.completion is not None:
            self.put_at(end, outcome.completion)

    def _notice(self, command: Command) -> None:
        self.notices.append(command)
        if command.kind is not CommandKind.ABORT:
            return
        assert command.target is not None, command
        self._aborted.add(command.target)
        running = next((lane[0] for lane in self._lanes.values() if lane and lane[0].op == command.target), None)
        if running is not None:
            self._heap = [entry for entry in self._heap if entry[2].op != command.target]
            heapq.heapify(self._heap)
            self._give_up(running)

    def _give_up(self, command: Command) -> None:
        message = f"{command.kind.value} was aborted"
        self.put(Input(InputKind.FAILED, op=command.op, reason="OperationAborted", message=message))


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
    """One run of a configuration in a fake world."""

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
        self.world = VirtualWorld(behaviour.fresh(), self.clock, max_inputs=max_inputs)
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
