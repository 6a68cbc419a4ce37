"""The world of a simulated run: lanes that take virtual time, a heap of what is to come, and what goes wrong.

It carries out commands as a `FakeBehaviour` says and disturbs them as a `FaultPlan` says. It decides nothing: the
scheduler sees it only through its inputs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsm_trainer.core.config import SECOND_NS
from fsm_trainer.core.events import COMPLETIONS, NOTICES, Command, CommandKind, Input, InputKind
from fsm_trainer.engines.fake_behaviour import FakeBehaviour, FakeOutcome
from fsm_trainer.runtime.clock import VirtualClock
from fsm_trainer.runtime.lanes import lane_of
from fsm_trainer.simulate.contention import Interpreter
from fsm_trainer.simulate.durations import Amount
from fsm_trainer.simulate.faults import NO_FAULTS, OTHER_KIND, Delivery, Disturbance, FaultPlan
from fsm_trainer.simulate.inflight import Loads


def engine_lane_of(command: Command) -> str:
    """The lanes of a run whose engines generate one batch at a time: workers who share one wait for each other."""
    return f"generate-{command.engine}" if command.kind is CommandKind.GENERATE else lane_of(command)


class Starved(RuntimeError):  # noqa: N818
    """The run waits for ever: nothing is in flight and no deadline is armed, or events come without end."""


@dataclass(eq=False)
class _Running:
    """A command at the head of its lane."""

    command: Command
    lane: deque[tuple[Command, int]]
    started_ns: int
    disturbance: Disturbance | None
    outcome: FakeOutcome
    ends: bool = False
    """Its end is in the heap."""


@dataclass(frozen=True, eq=False)
class _End:
    """In the heap: a running operation ends and reports this."""

    running: _Running
    completion: Input


class VirtualWorld:
    """Executes commands in virtual time, one at a time on each lane; it is the loop's inbox as well."""

    def __init__(
        self,
        behaviour: FakeBehaviour,
        clock: VirtualClock,
        *,
        plan: FaultPlan = NO_FAULTS,
        before: Mapping[CommandKind, Amount] | None = None,
        after: Mapping[CommandKind, Amount] | None = None,
        max_inputs: int = 1_000_000,
        serial_engines: bool = False,
        held_up: Amount = 0.0,
        inflight: bool = False,
    ) -> None:
        """`before`, `after`, `serial_engines` and `held_up` are those of `Durations`; `max_inputs` ends a run that
        makes no end. `inflight`: what an engine generates stands still while it loads weights, and goes on with them.
        """
        self.notices: list[Command] = []
        self.inputs = 0
        """Inputs given so far, BEGIN included."""
        self._behaviour = behaviour
        self._before = FakeBehaviour(before, seed=behaviour.seed) if before else None
        self._after = FakeBehaviour(after or {}, seed=behaviour.seed + 1) if after else None
        self._clock = clock
        shares = FakeBehaviour({CommandKind.REWARD: held_up}, seed=behaviour.seed + 2)
        self._interpreter = Interpreter(shares.duration_s) if held_up else None
        self._loads = Loads() if inflight else None
        self._lane_of = engine_lane_of if serial_engines else lane_of
        self._max_inputs = max_inputs
        self._heap: list[tuple[int, int, Input | _End]] = []
        self._pushed = 0
        self._lanes: dict[str, deque[tuple[Command, int]]] = {}
        self._running: dict[int, _Running] = {}
        self._stuck: list[_Running] = []
        """Running, but held back or hanging."""
        self._aborted: set[int] = set()
        self._disturbances = plan.disturbances
        self._happenings = plan.happenings
        self._heal_at = plan.heal_at
        self._counts = dict.fromkeys(CommandKind, 0)

    def put(self, event: Input) -> None:
        """Let an input come now."""
        self.put_at(self._clock.now_ns(), event)

    def put_at(self, t_ns: int, event: Input) -> None:
        """Let an input come at a moment."""
        self._push(t_ns, event)

    def get(self, deadline_ns: int | None) -> Input | None:
        """Move the clock to the next input, or to the deadline if that comes first."""
        self.inputs += 1
        if self.inputs > self._max_inputs:
            raise Starved(f"no end of the run after {self._max_inputs} inputs")
        for event in self._happenings.pop(self.inputs, ()):
            self.put(self._aimed(event))
        if self._heal_at is not None and self.inputs >= self._heal_at:
            self._heal()
        while True:
            if not self._heap and self._stuck:
                self._go_on()
            if deadline_ns is not None and (not self._heap or deadline_ns < self._heap[0][0]):
                self._clock.advance_to(max(deadline_ns, self._clock.now_ns()))
                return None
            if not self._heap:
                raise Starved("nothing is in flight and no deadline is armed, but the run is not finished")
            t_ns, _, event_or_end = heapq.heappop(self._heap)
            self._clock.advance_to(max(t_ns, self._clock.now_ns()))
            arrived = self._end(event_or_end) if isinstance(event_or_end, _End) else event_or_end
            if arrived is not None and arrived.kind is InputKind.ENGINE_DIED:
                self._die(arrived)
            if arrived is not None:
                return arrived

    def dispatch(self, command: Command) -> None:
        """Put a command on its lane; deliver a notice."""
        if command.kind in NOTICES:
            self._notice(command)
            return
        name = self._lane_of(command)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = deque()
        lane.append((command, self._clock.now_ns()))
        if len(lane) == 1:
            self._start(command, lane)

    def in_flight(self) -> list[Command]:
        """Commands that have not ended."""
        return [command for lane in self._lanes.values() for command, _ in lane]

    def _aimed(self, event: Input) -> Input:
        """Put the operation's number in, where the plan leaves it open."""
        if event.op != OTHER_KIND:
            return event
        others = [command.op for command in self.in_flight() if event.kind not in COMPLETIONS[command.kind]]
        return replace(event, op=min(others, default=OTHER_KIND))

    def _push(self, t_ns: int, entry: Input | _End) -> None:
        heapq.heappush(self._heap, (t_ns, self._pushed, entry))
        self._pushed += 1

    def _start(self, command: Command, lane: deque[tuple[Command, int]]) -> None:
        started = self._clock.now_ns()
        if self._before is not None:
            started += round(self._before.duration_s(command) * SECOND_NS)
        self._counts[command.kind] += 1
        disturbance = self._disturbances.get((command.kind, self._counts[command.kind]))
        outcome = self._behaviour.outcome(command)
        if self._heal_at is not None and self.inputs >= self._heal_at:
            disturbance, outcome = None, self._behaviour.healthy(command)
        running = self._running[command.op] = _Running(command, lane, started, disturbance, outcome)
        if self._interpreter is not None:
            self._interpreter.begin(command, started)
        if self._loads is not None and command.kind is CommandKind.LOAD_WEIGHTS:
            self._begin_load(self._loads, running)
        if command.op in self._aborted:
            self._give_up(running)
        elif outcome.completion is None or (disturbance and disturbance.delivery is Delivery.HELD):
            self._stuck.append(running)
        else:
            self._let_end(running)

    def _begin_load(self, loads: Loads, running: _Running) -> None:
        outcome, version = running.outcome, running.command.version
        succeeds = outcome.completion is not None and outcome.completion.rollout_version_last == version
        loads.begin(running.command, running.started_ns, round(outcome.duration_s * SECOND_NS), succeeds=succeeds)

    def _let_end(self, running: _Running) -> None:
        """Let the operation take its time, from now on if it was stuck until now."""
        outcome, disturbance = running.outcome, running.disturbance
        begun = max(running.started_ns, self._clock.now_ns()) if running in self._stuck else running.started_ns
        end = begun + round(outcome.duration_s * SECOND_NS)
        if disturbance is not None and disturbance.delivery is Delivery.LATE:
            end += round(disturbance.delay_s * SECOND_NS)
        if outcome.death is not None:
            self._push(end, outcome.death)
        assert outcome.completion is not None
        running.ends = True
        self._push(end, _End(running, outcome.completion))

    def _end(self, end: _End) -> Input | None:
        """Free the lane of an operation that ends; its completion, if that arrives without delay."""
        running, command, now = end.running, end.running.command, self._clock.now_ns()
        completion = end.completion
        if completion is running.outcome.completion:
            if (due := self._due(running, now)) > now:
                self._push(due, end)
                return None
            completion = self._versions_used(running, completion, now)
        if self._interpreter is not None:
            self._interpreter.end(command, now)
        del self._running[command.op]
        _, posted_ns = running.lane.popleft()
        if running.lane:
            self._start(running.lane[0][0], running.lane)
        arrival = completion.stamped(posted_ns=posted_ns, started_ns=running.started_ns, finished_ns=now)
        disturbance = running.disturbance
        if disturbance is not None and disturbance.delivery is Delivery.TWICE:
            self._push(now + round(disturbance.delay_s * SECOND_NS), arrival)
        delay_ns = 0 if self._after is None else round(self._after.duration_s(command) * SECOND_NS)
        if not delay_ns:
            return arrival
        self._push(now + delay_ns, arrival)
        return None

    def _due(self, running: _Running, now: int) -> int:
        """When a train step or a generation is done, as far as it was held up until now."""
        command, begun = running.command, running.started_ns
        if command.kind is CommandKind.TRAIN and self._interpreter is not None:
            lost = self._interpreter.lost_ns(begun, now)
        elif command.kind is CommandKind.GENERATE and self._loads is not None:
            lost = self._loads.paused_ns(command.engine, begun, now)
        else:
            return now
        return begun + round(running.outcome.duration_s * SECOND_NS) + lost

    def _versions_used(self, running: _Running, done: Input, now: int) -> Input:
        """A generation that loads came into, stamped with what its engine had at its beginning and at its end."""
        named = running.command.version
        if self._loads is None or done.kind is not InputKind.GENERATED or named is None:
            return done
        assert done.rollout_version_first is not None
        wrong, engine = done.rollout_version_first - named, running.command.engine
        first = self._loads.version_at(engine, running.started_ns, named)
        last = self._loads.version_at(engine, now, first)
        return done.stamped(rollout_version_first=first + wrong, rollout_version_last=last + wrong)

    def _go_on(self) -> None:
        """All stands still: what was held back comes now, and what hangs if the world heals."""
        held = [r for r in self._stuck if r.outcome.completion is not None]
        if held:
            self._let_end(held[0])
            self._stuck.remove(held[0])
        elif self._heal_at is not None:
            self._heal()

    def _heal(self) -> None:
        """Nothing goes wrong any more."""
        self._heal_at = self.inputs
        for running in self._stuck:
            running.outcome = self._behaviour.healthy(running.command)
            self._let_end(running)
        self._stuck.clear()

    def _notice(self, command: Command) -> None:
        self.notices.append(command)
        if command.kind is not CommandKind.ABORT:
            return
        assert command.target is not None, command
        self._end_early(command.target)

    def _die(self, death: Input) -> None:
        """Calls to an engine that has died end with it."""
        for command in [c for c in self.in_flight() if c.engine == death.engine and death.op is None]:
            self._end_early(command.op)

    def _end_early(self, op: int) -> None:
        self._aborted.add(op)
        running = self._running.get(op)
        if running is None or (running.disturbance and running.disturbance.delivery is Delivery.LATE):
            return
        if running.ends:
            self._heap = [entry for entry in self._heap if not _is_end_of(entry[2], running)]
            heapq.heapify(self._heap)
        else:
            self._stuck.remove(running)
        self._give_up(running)

    def _give_up(self, running: _Running) -> None:
        if self._loads is not None:
            self._loads.forget(running.command)
        message = f"{running.command.kind.value} was aborted"
        completion = Input(InputKind.FAILED, op=running.command.op, reason="OperationAborted", message=message)
        running.ends = True
        self._push(self._clock.now_ns(), _End(running, completion))


def _is_end_of(entry: Input | _End, running: _Running) -> bool:
    return isinstance(entry, _End) and entry.running is running
