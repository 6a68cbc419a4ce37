"""Runs with real threads, real time and random faults: each must end by itself, verify from its log, and leave nothing.

`python tools/live_runs.py [--runs 200] [--from SEED]`. A third of the runs have fake operations behind the lanes, a
third fake engines in this process behind the trainers' real operations, a third the same with an engine process each,
which may be killed. The seed decides what goes wrong; what the threads do in between is up to the machine.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil
import structlog

from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.core.config import Deadlines, SchedulerConfig
from fsm_trainer.core.events import NOTICES, CommandKind, Input, InputKind, Record
from fsm_trainer.core.monitor import Monitor
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.data.prompts import PromptSource
from fsm_trainer.data.rewards import RewardRecord
from fsm_trainer.engines.fake import Effect, FakeBehaviour, FakeOperations, FakeRolloutEngine, FakeTrainEngine, Fault
from fsm_trainer.engines.fake_behaviour import Lognormal, Uniform
from fsm_trainer.eventlog.reader import records
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.replay.verify import VerifyResult, verify
from fsm_trainer.runtime.clock import MonotonicClock
from fsm_trainer.runtime.host import EngineHost, InlineHost, ProcessHost
from fsm_trainer.runtime.inbox import ThreadInbox
from fsm_trainer.runtime.lanes import Lanes
from fsm_trainer.runtime.loop import EventLoop
from fsm_trainer.simulate.swarm import draw_config
from fsm_trainer.trainers.rollout_operations import RolloutOperations
from fsm_trainer.trainers.run_directory import RunDirectory
from fsm_trainer.trainers.scoring import Scorer

C, K = CommandKind, InputKind
WORLDS = ("threads", "inline", "process")
CLOSE_S = 10.0
GONE_S = 10.0
"""How long a thread or process that is about to end may take to be gone."""
STUCK_S = 120.0
"""A run that takes longer than this is stuck: all stacks are printed and the tool ends."""
DEADLINES = Deadlines(
    start_s=30.0,
    load_prompts_s=0.4,
    generate_s=0.4,
    reward_s=0.4,
    train_s=0.4,
    sync_s=0.4,
    save_s=0.4,
    queue_s=0.6,
    shutdown_s=1.0,
    interrupt_s=0.2,
)
FAULTS: dict[str, list[tuple[CommandKind, Effect]]] = {
    # Fake operations heed every abort, so anything may hang there.
    "threads": [(kind, effect) for kind in C if kind not in NOTICES for effect in (Effect.RAISE, Effect.HANG)],
    # A call that hangs in this process could only be abandoned; the abort of a generation is heeded.
    "inline": [
        (kind, Effect.RAISE) for kind in (C.START_ENGINE, C.GENERATE, C.LOAD_WEIGHTS, C.TRAIN, C.EXPORT, C.SAVE)
    ],
    "process": [
        (kind, effect)
        for kind in (C.START_ENGINE, C.GENERATE, C.LOAD_WEIGHTS)
        for effect in (Effect.RAISE, Effect.DIE, Effect.HANG)
    ],
}
ANYWHERE = [
    (C.TRAIN, Effect.NAN),
    (C.TRAIN, Effect.NO_STEP),
    (C.TRAIN, Effect.WRONG_VERSION),
    (C.GENERATE, Effect.WRONG_VERSION),
    (C.LOAD_WEIGHTS, Effect.WRONG_VERSION),
]
KILL = Input(K.ENGINE_DIED, message="kill -9")
"""As a happening in a run with engine processes: one of them is really killed."""


@dataclass
class LiveCase:
    """What one seed stands for."""

    seed: int
    world: str
    config: SchedulerConfig
    behaviour: FakeBehaviour
    happenings: dict[int, Input] = field(default_factory=dict)
    """By the number of the input that each precedes."""
    log_fails_at: int | None = None
    reward_fails_at: int | None = None


@dataclass(frozen=True)
class LiveResult:
    """How one run went."""

    case: LiveCase
    outcome: str
    error: str | None
    wall_s: float
    events: int
    decisions: int
    problems: tuple[str, ...]
    """What should not be; empty if all is well."""


def draw_live_case(seed: int, world: str | None = None) -> LiveCase:
    """Configuration, durations of a few milliseconds, and up to three things that go wrong."""
    rng = random.Random(f"live/{seed}")
    world = world or WORLDS[seed % len(WORLDS)]
    config = replace(draw_config(rng, raise_stale=True), deadlines=DEADLINES, max_no_step_batches=20)
    if config.max_steps is None or config.admission == "greedy":
        config = replace(config, max_steps=rng.choice((5, 12)))
    if world == "process":
        config = replace(config, engines=min(config.engines, 2))
    faults = [_draw_fault(rng, world) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    if any(f.kind in (C.START_ENGINE, C.START_TRAINER) and f.effect is Effect.HANG for f in faults):
        config = replace(config, deadlines=replace(DEADLINES, start_s=1.0))
    amounts = (0.0, 0.002, Uniform(0.0, 0.006), Lognormal(0.002, 0.8))
    durations = {kind: rng.choice(amounts) for kind in C if kind not in NOTICES}
    behaviour = FakeBehaviour(durations, faults=faults, batches=rng.choice((None, None, 6)), seed=seed)
    happenings = {rng.randint(1, 80): _draw_happening(rng, world, config) for _ in range(rng.choice((0, 0, 1, 2)))}
    case = LiveCase(seed, world, config, behaviour, happenings)
    case.log_fails_at = rng.randint(0, 300) if rng.random() < 0.06 else None
    case.reward_fails_at = rng.randint(1, 40) if rng.random() < 0.06 else None
    return case


def _draw_fault(rng: random.Random, world: str) -> Fault:
    kind, effect = rng.choice(FAULTS[world] + ANYWHERE)
    nth = 1 if kind in (C.START_TRAINER, C.START_ENGINE) else rng.randint(1, 8)
    return Fault(kind, effect, nth=nth)


def _draw_happening(rng: random.Random, world: str, config: SchedulerConfig) -> Input:
    stop = Input(K.STOP, reason="user")
    strange = Input(rng.choice((K.TRAINED, K.GENERATED)), op=10**9, train_version=1)
    failure = Input(K.FAILED, reason="OSError", message="metrics")
    death = replace(KILL, engine=rng.randrange(config.engines))
    return rng.choice((stop, stop, strange, failure, death if world == "process" else stop))


class _Inbox(ThreadInbox):
    """Lets what the case says happen before the input of its number, and a completion come twice now and then."""

    def __init__(self, clock: MonotonicClock, case: LiveCase) -> None:
        super().__init__(clock)
        self.taken = 0
        self.kill: Callable[[int], None] = lambda engine: None
        self._happenings = dict(case.happenings)

    def get(self, deadline_ns: int | None) -> Input | None:
        self.taken += 1
        event = self._happenings.pop(self.taken, None)
        if event is not None and event.message == KILL.message and event.engine is not None:
            self.kill(event.engine)
        elif event is not None:
            self.put(event)
        return super().get(deadline_ns)


class _Sink(EventLogWriter):
    """A log whose disk is full from some row on."""

    fail_at: int | None = None

    def append(self, record: Record) -> None:
        if self.fail_at is not None and record.seq >= self.fail_at:
            raise OSError(28, "No space left on device")
        super().append(record)


class _Tokenizer:
    """As much of a tokenizer as prompts and rewards need: a token is a character's number."""

    eos_token_id = 0
    bos_token_id = None
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return " ".join(str(token) for token in tokens if token or not skip_special_tokens)


def _source(batches: int | None) -> PromptSource:
    rows = [{"prompt": str(number)} for number in range(2 * (batches or 8))]
    epochs = 1 if batches else 1000
    return PromptSource(rows, _Tokenizer(), batch_size=2, epochs=epochs, seed=0, max_prompt_tokens=8)


class _Reward:
    def __init__(self, fails_at: int | None) -> None:
        self._fails_at = fails_at
        self._calls = 0

    def __call__(self, record: RewardRecord) -> float:
        self._calls += 1
        if self._calls == self._fails_at:
            raise KeyError("answer")
        # Every fourth batch has nothing to learn from.
        return float(record.metadata["sample"] if record.metadata["batch_id"] % 4 else 0)


def _hosted(case: LiveCase, directory: Path, clock: MonotonicClock, inbox: _Inbox) -> RolloutOperations:
    hosts: dict[int, EngineHost] = {}
    make = ProcessHost if case.world == "process" else InlineHost

    def make_host(engine: int) -> EngineHost:
        hosts[engine] = make(partial(FakeRolloutEngine, case.behaviour, engine=engine), f"engine-{engine}")
        return hosts[engine]

    def kill(engine: int) -> None:
        host = hosts.get(engine)
        if host is not None and host.alive and host.pid is not None:
            os.kill(host.pid, signal.SIGKILL)

    inbox.kill = kill
    return RolloutOperations(
        source=_source(case.behaviour.batches),
        scorer=Scorer(_Tokenizer(), _Reward(case.reward_fails_at), get_algorithm("async-grpo")),
        train_engine=FakeTrainEngine(case.behaviour.fresh()),
        make_host=make_host,
        run=RunDirectory(directory, directory / "checkpoints"),
        seed=case.seed,
        clock=clock,
        post=inbox.put,
        always_steps=False,
    )


def live_run(case: LiveCase, directory: Path) -> LiveResult:
    """One run, from the first thread to the last; what is wrong with it is in the result."""
    threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
    begin = time.monotonic()
    clock = MonotonicClock()
    inbox = _Inbox(clock, case)
    log = _Sink(directory / LOG_NAME, metadata=log_metadata(case.config, {"seed": case.seed}))
    log.fail_at = case.log_fails_at
    operations: FakeOperations | RolloutOperations
    if case.world == "threads":
        operations = FakeOperations(case.behaviour.fresh(), post=inbox.put)
    else:
        operations = _hosted(case, directory, clock, inbox)
    lanes = Lanes(operations, inbox.put, clock)
    observers = [operations] if isinstance(operations, RolloutOperations) else []
    loop = EventLoop(Scheduler(case.config), log, inbox, lanes.dispatch, clock, observers)
    outcome = loop.run()
    problems = [f"lane {lane} never ended" for lane in lanes.close(CLOSE_S)]
    if isinstance(operations, RolloutOperations):
        try:
            operations.close(CLOSE_S)
        except RuntimeError as error:
            # An engine that was killed, or died, says so when it is closed: a run may be over before it hears of it.
            problems += [] if outcome == "failed" or _may_die(case) else [f"closing: {error}"]
    log.close()
    found = verify(directory)
    problems += [*_check_log(case, found, outcome, loop), *_check_gone(threads, children)]
    wall_s = time.monotonic() - begin
    return LiveResult(case, outcome, loop.error, wall_s, found.log.table.num_rows, found.decisions, tuple(problems))


def _may_die(case: LiveCase) -> bool:
    killed = any(event.message == KILL.message for event in case.happenings.values())
    return killed or any(fault.effect is Effect.DIE for fault in case.behaviour.faults)


def _check_log(case: LiveCase, found: VerifyResult, outcome: str, loop: EventLoop) -> list[str]:
    """The log verifies, keeps every invariant, and says how the run ended."""
    if not found.ok:
        return [f"the log does not verify: {found.divergence}"]
    rows = list(records(found.log.table))
    monitor = Monitor(case.config).see_all(rows)
    if case.log_fails_at is not None and loop.log_failure is not None:
        return [] if outcome == "failed" and not found.complete else ["a log that failed did not fail the run"]
    if not found.complete:
        return ["the log has no end"]
    monitor.finish()
    return [] if rows[-1].reason == outcome else [f"the log says {rows[-1].reason}, the run {outcome}"]


def _check_gone(threads: set[threading.Thread], children: set[psutil.Process]) -> list[str]:
    for thread in set(threading.enumerate()) - threads:
        thread.join(GONE_S)
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - children, timeout=GONE_S)
    return [f"thread {name} is left" for name in left] + [f"process {process.pid} is left" for process in alive]


def main() -> int:
    """Run them all and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed (default 0)")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    outcomes: Counter[str] = Counter()
    worlds: Counter[str] = Counter()
    events = decisions = bad = 0
    slowest, begin = 0.0, time.monotonic()
    for seed in range(options.first, options.first + options.runs):
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        with tempfile.TemporaryDirectory(prefix="fsm-live-") as directory:
            result = live_run(draw_live_case(seed), Path(directory))
        outcomes[result.outcome] += 1
        worlds[result.case.world] += 1
        events += result.events
        decisions += result.decisions
        slowest = max(slowest, result.wall_s)
        for problem in result.problems:
            bad += 1
            print(f"seed {seed} ({result.case.world}, {result.outcome}: {result.error}): {problem}\n  {result.case}")
    faulthandler.cancel_dump_traceback_later()
    print(
        f"{options.runs} live runs in {time.monotonic() - begin:.0f} s (slowest {slowest:.1f} s): "
        f"{', '.join(f'{n} {name}' for name, n in sorted(worlds.items()))}; "
        f"{', '.join(f'{n} {name}' for name, n in sorted(outcomes.items()))}; "
        f"{events} events, {decisions} decisions verified from the logs; {bad} problems"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
