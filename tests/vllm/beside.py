"""Calls beside the test, and a vLLM that stands still when the test says so: no thread needs to be the faster one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

import pytest

from fsm_trainer.engines.base import Rollout, RolloutRequest, Snapshot
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine

T = TypeVar("T")
LIMIT_S = 100.0
"""After which a test gives up."""
_LOOK_S = 0.005
_TRIES = 20


def beside(call: Callable[[], T]) -> Future[T]:
    """A call on a thread of its own, which a test that fails may leave behind."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def generating(engine: VLLMRolloutEngine, request: RolloutRequest) -> Future[Rollout]:
    """A generation beside the test, which the engine has begun when this returns."""
    return begun(engine, partial(engine.generate, request))


def begun(engine: VLLMRolloutEngine, call: Callable[[], T]) -> Future[T]:
    before = engine._busy
    future = beside(call)
    while engine._busy <= before:
        wait([future], _LOOK_S)
        if future.done():
            pytest.fail(f"it is over already, and was to go on: {future.exception() or future.result()}")
    return future


def stand_still(engine: VLLMRolloutEngine) -> None:
    """Let vLLM draw nothing until weights are loaded amid what it is given, or `go_on`."""
    engine._call(engine._backend.pause(clear_cache=False))


def go_on(engine: VLLMRolloutEngine) -> None:
    engine._call(engine._backend.resume())


def amid(engine: VLLMRolloutEngine, *requests: RolloutRequest) -> list[Future[Rollout]]:
    """Generations of which vLLM has drawn some, and which stand still.

    A pause that a busy machine holds up may find nothing left to draw: then they begin anew.
    """
    for _ in range(_TRIES):
        stand_still(engine)
        running = [generating(engine, request) for request in requests]
        _in_order(engine)
        engine._call(_draw(engine))
        _in_order(engine)
        if not any(future.done() for future in running):
            return running
        go_on(engine)
        wait(running, LIMIT_S)
    pytest.fail(f"in {_TRIES} tries no generation was left to stand still")


async def _draw(engine: VLLMRolloutEngine) -> None:
    # On the event loop, so that what it is at need not outlast what the test's thread does.
    await engine._backend.resume()
    await engine._backend.pause(clear_cache=False)


def _in_order(engine: VLLMRolloutEngine) -> None:
    """What was asked before has reached vLLM, and what it has ended has come back: it does one thing after another."""
    for _ in range(5):
        stand_still(engine)


def load_amid(
    engine: VLLMRolloutEngine, publish: Callable[[int], Snapshot], request: RolloutRequest, newest: int
) -> Rollout:
    """A generation that began with version 0, amid which the later ones were loaded, so that all drew of each sample.

    It goes on for a moment between two loads, and begins anew if nothing was left to draw then.
    """
    for _ in range(_TRIES):
        engine.load_weights(publish(0))
        (running,) = amid(engine, request)
        for version in range(1, newest + 1):
            engine.load_weights(publish(version))
            stand_still(engine)
        go_on(engine)
        rollout = running.result(LIMIT_S)
        if versions_of(rollout) == {tuple(range(newest + 1))}:
            return rollout
    pytest.fail(f"in {_TRIES} tries no generation was amid its work when weights came")


def versions_of(rollout: Rollout) -> set[tuple[int, ...]]:
    """Which versions drew a sample, in order; of all samples."""
    return {tuple(span.version for span in sample.spans) for group in rollout.groups for sample in group}
