"""Exhaustive search over all orders of completions of a small run, on the real `Scheduler`.

Breadth first over canonical states (`explore_state`). From every state each thing that can happen next
(`explore_moves`) is tried on a scheduler thawed from that state; every step is held against the live invariants, a
`Monitor` put into the account it would have by then, and `explore_checks`.

Why the reduction is sound: a step depends on the state alone, and `freeze` keeps all of it that decisions or checks
depend on, so schedules that meet in one frozen state have the same continuations (a bisimulation), and all orders of n
independent completions collapse from n! schedules into at most 2^n states. Nothing else is pruned. What needs history
is either carried by the state (versions, counts, what is consumed) or checked as a property of each step.

No cycle among the states means that no schedule is endless; the longest path is the longest schedule. Being breadth
first, a violation comes with a shortest schedule that leads to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, Input, InputKind, RecordKind
from fsm_trainer.core.invariants import InvariantViolation, hold
from fsm_trainer.core.monitor import Monitor
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.simulate import explore_checks as checks
from fsm_trainer.simulate.explore_monitor import check_account, monitor_of
from fsm_trainer.simulate.explore_moves import Move, World, apply, heals, is_fault, moves
from fsm_trainer.simulate.explore_state import check_shape, freeze, supported, thaw

BEGIN = Move("begin")


@dataclass(frozen=True)
class Case:
    """One search: a configuration in a world, with so many faults and stop requests at any moment."""

    config: SchedulerConfig
    world: World = World()
    faults: int = 0
    stops: int = 0
    healed: bool = False
    """Only faults that restarting an engine heals, so that the run must complete for all that."""

    @property
    def disturbances(self) -> int:
        """Events that may come besides those of a run that nobody disturbs: an engine started anew takes two more."""
        restarts = self.faults if self.config.on_engine_failure == "restart" else 0
        return self.faults + self.stops + 1 + 2 * restarts

    def faults_after(self, faults: int, move: Move) -> int:
        """How many there were after a move; that an operation outlasts the shutdown counts, and needs no budget."""
        return min(faults + is_fault(move), max(self.faults, 1))


@dataclass
class Found:
    """What a search has seen; `violation` is None if every rule held in every state."""

    case: Case
    states: int = 0
    steps: int = 0
    ends: int = 0
    longest: tuple[Move, ...] = ()
    violation: str | None = None
    schedule: tuple[Move, ...] = ()
    """The shortest schedule that leads to the violation."""
    outcomes: dict[str, int] = field(default_factory=dict)
    after_stop: int = 0
    """Most events that followed once the run was stopping."""
    after_drain: int = 0
    """Most events that followed once it admitted nothing more."""


class _Broken(Exception):  # noqa: N818 - carries a violation out of the search
    """A rule broke on the move from a state."""

    def __init__(self, rule: str, node: int, move: Move) -> None:
        super().__init__(rule)
        self.node = node
        self.move = move


def explore(case: Case, *, limit: int = 10_000_000) -> Found:
    """Search until nothing new is found or a rule breaks; ValueError if the case is larger than `limit` states."""
    check_shape()
    check_account()
    assert supported(case.config), "more workers or engines than the canonical form allows"
    search = _Search(case, limit)
    found = search.found
    try:
        search.run()
        _check_graph(search)
    except _Broken as broken:
        found.violation = str(broken)
        found.schedule = (*search.path_to(broken.node), broken.move)
    except InvariantViolation as violation:
        found.violation = str(violation)
    found.states = len(search.parents)
    return found


class _Search:
    """Frozen states numbered as found; their edges are kept for the check of cycles."""

    def __init__(self, case: Case, limit: int) -> None:
        self.case = case
        self.limit = limit
        self.found = Found(case)
        self.number: dict[bytes, int] = {}
        self.parents = array("q")
        self.moves: list[Move] = []
        self.edges: list[array[int]] = []
        self.most_admitted = 0
        self.ending: dict[int, tuple[str, int]] = {}
        """Draining and stopping states: which, and how many events may follow."""

    def run(self) -> None:
        scheduler = Scheduler(self.case.config)
        try:
            records, _ = scheduler.step(Input(InputKind.BEGIN))
            Monitor(self.case.config).see_all(records)
        except AssertionError as error:
            raise _Broken(f"{error}", -1, BEGIN) from error
        frontier = [self._add(freeze(scheduler), 0, -1, BEGIN)]
        while frontier:
            frontier = [new for node in frontier for new in self._expand(*node)]
            if len(self.parents) > self.limit:
                raise ValueError(f"more than {self.limit} states in {self.case}")

    def _add(self, frozen: bytes, faults: int, parent: int, move: Move) -> tuple[int, bytes, int]:
        number = len(self.parents)
        self.number[frozen + bytes((faults,))] = number
        self.parents.append(parent)
        self.moves.append(move)
        self.edges.append(array("q"))
        return number, frozen, faults

    def _expand(self, node: int, frozen: bytes, faults: int) -> Iterator[tuple[int, bytes, int]]:
        scheduler = thaw(self.case.config, frozen)
        if scheduler.finished:
            self._end(scheduler, node, faults)
            return
        bound = checks.ending_bound(scheduler.state, self.case.disturbances)
        if bound is not None:
            self.ending[node] = (scheduler.state.run.state.value, bound)
        if self.case.faults:
            self._check_strays(scheduler, frozen, node)
        left = self.case.faults - faults
        for move in moves(scheduler.state, faults=left, stops=self.case.stops):
            if self.case.healed and is_fault(move) and not heals(scheduler.state, move):
                continue
            after = self._step(frozen, move, node)
            now = self.case.faults_after(faults, move)
            known = self.number.get(after + bytes((now,)))
            self.edges[node].append(len(self.parents) if known is None else known)
            if known is None:
                yield self._add(after, now, node, move)

    def _step(self, frozen: bytes, move: Move, node: int) -> bytes:
        scheduler = thaw(self.case.config, frozen)
        monitor = monitor_of(scheduler)
        self.found.steps += 1
        try:
            records, _ = apply(scheduler, move, self.case.world)
            monitor.see_all(records)
            if scheduler.finished:
                monitor.finish()
            hold(move.action != "give_up" or scheduler.finished, "the shutdown deadline ends the run at once", move)
            checks.check_step(scheduler.state, records, self.case.world)
            checks.check_state(scheduler.state)
        except Exception as error:  # noqa: BLE001 - whatever it is, the schedule that caused it is what counts
            raise _Broken(f"{type(error).__name__}: {error}", node, move) from error
        return freeze(scheduler)

    def _check_strays(self, scheduler: Scheduler, frozen: bytes, node: int) -> None:
        """A completion nobody waits for, one of another kind and an early tick change nothing."""
        for event in strays(scheduler):
            records, commands = scheduler.step(event)
            waits = [r for r in records[1:] if r.kind is not RecordKind.WAIT]
            ignored = all(r.kind is RecordKind.IGNORED for r in waits)
            if commands or not ignored or freeze(scheduler) != frozen:
                raise _Broken(f"a stray input changes nothing: {event}", node, Move("stray"))

    def _end(self, scheduler: Scheduler, node: int, faults: int) -> None:
        outcome = str(scheduler.outcome)
        self.found.ends += 1
        self.found.outcomes[outcome] = self.found.outcomes.get(outcome, 0) + 1
        self.most_admitted = max(self.most_admitted, scheduler.state.counts["admitted"])
        try:
            lost = faults * self.case.config.workers
            faulted = faults > 0 and not self.case.healed
            checks.check_end(scheduler.state, self.case.world, faulted=faulted, lost=lost)
        except AssertionError as error:
            raise _Broken(str(error), *self.reached(node)) from error

    def reached(self, node: int) -> tuple[int, Move]:
        """From where, and by which move, a state was first reached."""
        return self.parents[node], self.moves[node]

    def path_to(self, node: int) -> tuple[Move, ...]:
        """The moves that first led to a state."""
        path = []
        while node >= 0:
            path.append(self.moves[node])
            node = self.parents[node]
        return tuple(reversed(path))


def strays(scheduler: Scheduler) -> list[Input]:
    """Inputs that must not change anything in this state."""
    events = [Input(InputKind.TRAINED, op=10**9, train_version=1), Input(InputKind.TICK)]
    events.append(Input(InputKind.ENGINE_DIED, op=10**9, engine=0, message="one that was replaced"))
    for op in scheduler.state.ops.values():
        wrong = InputKind.SAVED if op.kind is not CommandKind.SAVE else InputKind.EXPORTED
        events.append(Input(wrong, op=op.seq, train_version=0))
    return events


def _check_graph(search: _Search) -> None:
    """No cycle, so no endless schedule; every end is near once it has begun, and the longest schedule is bounded."""
    order = _topological(search.edges)
    hold(len(order) == len(search.edges), "no livelock: no state is met twice in one schedule", len(order))
    height = array("q", [0] * len(order))
    for node in reversed(order):
        height[node] = max((height[target] + 1 for target in search.edges[node]), default=0)
    found, case = search.found, search.case
    for node, (phase, bound) in search.ending.items():
        if height[node] > bound:
            raise _Broken(f"{phase} ends within {bound} events, not {height[node]}", *search.reached(node))
        name = "after_stop" if phase == "stopping" else "after_drain"
        setattr(found, name, max(getattr(found, name), height[node]))
    found.longest = _descend(search, height)
    checks.check_longest(case.config, len(found.longest), search.most_admitted, case.disturbances)


def _topological(edges: list[array[int]]) -> list[int]:
    incoming = array("q", [0] * len(edges))
    for targets in edges:
        for target in targets:
            incoming[target] += 1
    ready = [node for node, count in enumerate(incoming) if not count]
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        for target in edges[node]:
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    return order


def _descend(search: _Search, height: array[int]) -> tuple[Move, ...]:
    """The moves of a longest schedule: from the first state always to the highest next one."""
    nodes = [0]
    while search.edges[nodes[-1]]:
        nodes.append(max(search.edges[nodes[-1]], key=lambda target: height[target]))
    wanted = set(nodes)
    keys = {number: key for key, number in search.number.items() if number in wanted}
    return (BEGIN, *(_move_between(search, keys[a], keys[b]) for a, b in zip(nodes, nodes[1:], strict=False)))


def _move_between(search: _Search, source: bytes, target: bytes) -> Move:
    start, faults, case = source[:-1], source[-1], search.case
    for move in moves(thaw(case.config, start).state, faults=case.faults - faults, stops=case.stops):
        scheduler = thaw(case.config, start)
        apply(scheduler, move, case.world)
        if freeze(scheduler) + bytes((case.faults_after(faults, move),)) == target:
            return move
    raise AssertionError("an edge without a move")
