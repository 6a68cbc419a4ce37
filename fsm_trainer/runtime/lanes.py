"""Worker threads: each command runs on the lane of the machine it belongs to, and its completion goes to the inbox.

Whatever an operation raises becomes a FAILED input that names the user's line. This module knows nothing of what the
operations do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import structlog

from fsm_trainer.core.events import COMPLETIONS, NOTICES, Command, CommandKind, Input, InputKind
from fsm_trainer.runtime.clock import Clock
from fsm_trainer.runtime.failures import describe
from fsm_trainer.runtime.threads import LaneThread

_TRAINER = frozenset({CommandKind.START_TRAINER, CommandKind.TRAIN, CommandKind.EXPORT, CommandKind.SAVE})
_log = structlog.get_logger(__name__)


class Operations(Protocol):
    """What the commands of the scheduler do in the world."""

    def execute(self, command: Command) -> Input:
        """Do it, blocking, on the command's lane, and return what happened.

        `op` and the times of the input may be left unset. Raise for a failure.
        """

    def notice(self, command: Command) -> None:
        """Take note of a command that nothing completes (`events.NOTICES`).

        Called on the loop thread, so it must not block.
        """


def lane_of(command: Command) -> str:
    """The lane a command runs on; commands of one lane never overlap."""
    kind = command.kind
    if kind in _TRAINER:
        return "trainer"
    if kind is CommandKind.LOAD_PROMPTS:
        return "loader"
    if kind in (CommandKind.GENERATE, CommandKind.REWARD):
        assert command.worker is not None, command
        return f"{'rollout' if kind is CommandKind.GENERATE else 'reward'}-{command.worker}"
    assert kind in (CommandKind.START_ENGINE, CommandKind.LOAD_WEIGHTS) and command.engine is not None, command
    return f"engine-{command.engine}"


class Lanes:
    """The lane threads of one run, each started when it gets its first command."""

    def __init__(self, operations: Operations, post: Callable[[Input], None], clock: Clock) -> None:
        """`post` takes completions, from any thread."""
        self._operations = operations
        self._post = post
        self._clock = clock
        self._lanes: dict[str, LaneThread] = {}
        self._aborted: set[int] = set()

    def dispatch(self, command: Command) -> None:
        """Hand a command to its lane; called by the loop thread only. A notice is delivered at once."""
        if command.kind in NOTICES:
            if command.target is not None:
                self._aborted.add(command.target)
            self._notify(command)
            return
        name = lane_of(command)
        if name not in self._lanes:
            self._lanes[name] = LaneThread(f"fsm-{name}")
        self._lanes[name].post(partial(self._run, command, self._clock.now_ns()))

    def stuck(self) -> list[str]:
        """Lanes with an unfinished command."""
        return [name for name, lane in self._lanes.items() if lane.busy]

    def close(self, timeout_s: float) -> list[str]:
        """End the threads after what they have, waiting at most so long; the lanes that still have not."""
        for lane in self._lanes.values():
            lane.close()
        deadline = time.monotonic() + timeout_s
        joined = {name: lane.join(max(0.0, deadline - time.monotonic())) for name, lane in self._lanes.items()}
        return [name for name, ended in joined.items() if not ended]

    def _notify(self, command: Command) -> None:
        try:
            self._operations.notice(command)
        except Exception as error:
            self._post(replace(failed(command, error), op=None))

    def _run(self, command: Command, posted_ns: int) -> None:
        started_ns = self._clock.now_ns()
        try:
            done = _checked(command, self._operations.execute(command))
        except BaseException as error:
            # SystemExit too: user code on a worker thread must fail the run, not vanish with the thread.
            done = failed(command, error, expected=command.op in self._aborted)
        finished_ns = self._clock.now_ns()
        self._post(replace(done, op=command.op, posted_ns=posted_ns, started_ns=started_ns, finished_ns=finished_ns))


def failed(command: Command, error: BaseException, *, expected: bool = False) -> Input:
    """The input for a command that raised; a traceback goes to people's log, quietly if it was aborted."""
    failure = describe(error)
    # Where people's log goes may be gone or closed; the run must hear of the failure all the same.
    with suppress(OSError, ValueError):
        (_log.debug if expected else _log.error)(
            "operation_aborted" if expected else "operation_failed",
            command=command.kind.value,
            worker=command.worker,
            engine=command.engine,
            batch_id=command.batch_id,
            reason=failure.type,
            **failure.for_log,
        )
    return Input(InputKind.FAILED, op=command.op, reason=failure.type, message=failure.summary)


def _checked(command: Command, done: object) -> Input:
    expected = COMPLETIONS[command.kind]
    if not isinstance(done, Input) or done.kind not in (*expected, InputKind.FAILED):
        names = " or ".join(sorted(kind.value for kind in expected))
        raise TypeError(f"operation {command.kind.value} returned {done!r}, expected an Input of kind {names}")
    return done
