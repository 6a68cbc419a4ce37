"""The order in which the vLLM engine pauses, loads, resumes and gives up, on a vLLM that does what the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from fsm_trainer.engines.base import EngineLost, Rollout, RolloutRequest, SamplingParams, Snapshot, VersionSpan
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from tests.engines.fake_vllm import LIMIT_S, TOKENS, FakeVLLM

SAMPLING = SamplingParams(n_samples=2, max_new_tokens=TOKENS)
T = TypeVar("T")
ONE = RolloutRequest(0, ((5, 6),), seed=0)
TWO = RolloutRequest(1, ((5, 6), (7,)), seed=0)


def snapshot(version: int) -> Snapshot:
    return Snapshot(version, "somewhere", 100)


@pytest.fixture
def vllm() -> FakeVLLM:
    return FakeVLLM()


@pytest.fixture
def engine(vllm: FakeVLLM) -> Iterator[VLLMRolloutEngine]:
    engine = VLLMRolloutEngine(vllm, SAMPLING, (2,))
    engine.start()
    yield engine
    engine.close()


def beside(call: Callable[..., T], *args: Any) -> Future[T]:
    """A call on a thread of its own, which a test that fails may leave behind."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def calls_of(vllm: FakeVLLM) -> list[str]:
    """What was asked of vLLM since the last look."""
    calls, vllm.calls = vllm.calls, []
    return calls


def wait_until_queued(engine: VLLMRolloutEngine, running: Future[Any]) -> None:
    """Until what was called beside has come as far as it can."""
    while not engine._running:
        assert not running.done()
    # The event loop does what it was given in order, so it has been at that once this is done.
    engine._call(asyncio.sleep(0))


def failure(future: Future[Any]) -> str:
    error = future.exception(LIMIT_S)
    assert error is not None
    return f"{type(error).__name__}: {error}"


def test_an_idle_engine_loads_without_a_pause(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    assert calls_of(vllm) == ["open"]
    loaded = engine.load_weights(snapshot(3))
    assert (loaded.version, loaded.nbytes) == (3, 100)
    assert (loaded.pause_s, loaded.resume_s) == (0, 0)
    assert loaded.transfer_s > 0
    assert calls_of(vllm) == ["transfer", "weight_version"]
    rollout = engine.generate(TWO)
    assert (rollout.version_first, rollout.version_last) == (3, 3)
    assert [[sample.tokens for sample in group] for group in rollout.groups] == [
        [(5,) * 3, (6,) * 3],
        [(7,) * 3, (8,) * 3],
    ]
    assert all(sample.spans == () for group in rollout.groups for sample in group)


def test_what_runs_stands_still_while_weights_change(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(0))
    hold = vllm.hold("complete")
    running = beside(engine.generate, ONE)
    hold.wait_until_reached()
    calls_of(vllm)
    loaded = engine.load_weights(snapshot(1))
    assert loaded.version == 1
    assert min(loaded.pause_s, loaded.transfer_s, loaded.resume_s) > 0
    assert calls_of(vllm) == ["pause", "transfer", "weight_version", "resume"]
    hold.release()
    rollout: Rollout = running.result(LIMIT_S)
    assert (rollout.version_first, rollout.version_last) == (0, 1)
    assert rollout.groups[0][0].spans == (VersionSpan(0, 1), VersionSpan(1, TOKENS - 1))


def test_what_begins_during_a_load_waits_for_it(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(0))
    hold = vllm.hold("transfer")
    load = beside(engine.load_weights, snapshot(1))
    hold.wait_until_reached()
    running = beside(engine.generate, ONE)
    wait_until_queued(engine, running)
    assert "complete" not in vllm.calls
    hold.release()
    assert load.result(LIMIT_S).version == 1
    rollout: Rollout = running.result(LIMIT_S)
    assert (rollout.version_first, rollout.version_last) == (1, 1)


def test_scoring_stands_still_while_weights_change(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(0))
    hold = vllm.hold("prompt_logprobs")
    scoring = beside(engine.score, [(1, 2)], 1.0)
    hold.wait_until_reached()
    calls_of(vllm)
    engine.load_weights(snapshot(1))
    # A transport may leave the model without weights between two of its calls, so that vLLM must take no step then.
    assert calls_of(vllm) == ["pause", "transfer", "weight_version", "resume"]
    hold.release()
    assert scoring.result(LIMIT_S) == [(-0.25,)]


def test_scoring_that_begins_during_a_load_waits_for_it(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(0))
    hold = vllm.hold("transfer")
    load = beside(engine.load_weights, snapshot(1))
    hold.wait_until_reached()
    scoring = beside(engine.score, [(1, 2)], 1.0)
    wait_until_queued(engine, scoring)
    assert "prompt_logprobs" not in vllm.calls
    hold.release()
    assert load.result(LIMIT_S).version == 1
    assert scoring.result(LIMIT_S) == [(-0.25,)]


def test_what_begins_during_a_load_that_fails_draws_nothing(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(0))
    hold = vllm.hold("transfer")
    vllm.fail("transfer", ValueError("released"))
    load = beside(engine.load_weights, snapshot(1))
    hold.wait_until_reached()
    running = beside(engine.generate, ONE)
    wait_until_queued(engine, running)
    hold.release()
    assert failure(load) == "ValueError: released"
    # Whether the end of the load or the abort behind it comes first is the threads' affair.
    assert failure(running) in (
        "EngineLost: no weights loaded: load_weights must succeed before generate or score",
        "EngineLost: generation aborted: weights could not be loaded amid it (released)",
    )
    assert "complete" not in vllm.calls


@pytest.mark.parametrize("method", ["pause", "transfer", "weight_version", "resume"])
def test_a_load_that_fails_in_flight_ends_what_runs_and_serves_nothing_until_a_good_one(
    vllm: FakeVLLM, engine: VLLMRolloutEngine, method: str
) -> None:
    engine.load_weights(snapshot(0))
    hold = vllm.hold("complete")
    running = beside(engine.generate, ONE)
    hold.wait_until_reached()
    vllm.fail(method, OSError("no room"))
    with pytest.raises(OSError, match="no room"):
        engine.load_weights(snapshot(1))
    # As if the engine were gone: the scheduler may hear of this before it hears of the load.
    assert failure(running) == "EngineLost: generation aborted: weights could not be loaded amid it (no room)"
    with pytest.raises(RuntimeError, match="no weights loaded"):
        engine.generate(ONE)
    calls_of(vllm)
    engine.load_weights(snapshot(2))
    # How far the failed one had come is not known, so nothing is left out.
    assert calls_of(vllm) == ["pause", "transfer", "weight_version", "resume"]
    rollout = engine.generate(TWO)
    assert (rollout.version_first, rollout.version_last) == (2, 2)


def test_weights_that_vllm_does_not_own_up_to_are_not_served(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    vllm.takes_tag = False
    with pytest.raises(EngineLost, match="'default', which this run has not loaded"):
        engine.load_weights(snapshot(0))
    with pytest.raises(RuntimeError, match="no weights loaded"):
        engine.generate(ONE)


def test_loads_follow_one_another(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    hold = vllm.hold("transfer")
    first = beside(engine.load_weights, snapshot(0))
    hold.wait_until_reached()
    second = beside(engine.load_weights, snapshot(1))
    hold.release()
    assert (first.result(LIMIT_S).version, second.result(LIMIT_S).version) == (0, 1)
    assert engine.generate(ONE).version_first == 1


def test_a_server_that_was_restarted_is_lost(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(4))
    vllm.tag = "default"
    with pytest.raises(EngineLost, match="restarted, or somebody else"):
        engine.generate(ONE)
    with pytest.raises(EngineLost, match="restarted, or somebody else"):
        engine.score([(1, 2, 3)], 1.0)


def test_abort_ends_every_batch_and_the_next_one_runs(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(0))
    holds = [vllm.hold("complete") for _ in range(3)]
    running = [beside(engine.generate, request) for request in (ONE, TWO)]
    for hold in holds:
        hold.wait_until_reached()
    engine.abort()
    assert [failure(future) for future in running] == ["RuntimeError: generation aborted"] * 2
    assert engine.generate(ONE).version_first == 0
    assert vllm.ended == ["cut"] * 3 + ["whole"]


def test_abort_ends_a_score_that_hangs(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(0))
    hold = vllm.hold("prompt_logprobs")
    scoring = beside(engine.score, [(1, 2)], 1.0)
    hold.wait_until_reached()
    engine.abort()
    assert failure(scoring) == "RuntimeError: generation aborted"


def test_abort_does_not_end_a_load(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    hold = vllm.hold("transfer")
    load = beside(engine.load_weights, snapshot(0))
    hold.wait_until_reached()
    engine.abort()
    hold.release()
    assert load.result(LIMIT_S).version == 0


def test_one_prompt_that_fails_ends_the_others(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(0))
    first, second = vllm.hold("complete"), vllm.hold("complete")
    running = beside(engine.generate, TWO)
    second.wait_until_reached()
    vllm.fail("complete", EngineLost("gone"))
    first.release()
    assert failure(running) == "EngineLost: gone"
    engine.load_weights(snapshot(1))
    assert vllm.ended == ["cut", "cut"]


def test_greedy_samples_are_copies_of_the_one_that_vllm_draws(vllm: FakeVLLM) -> None:
    engine = VLLMRolloutEngine(vllm, SamplingParams(n_samples=3, max_new_tokens=TOKENS, temperature=0.0), (2,))
    engine.start()
    engine.load_weights(snapshot(0))
    assert [[sample.tokens for sample in group] for group in engine.generate(TWO).groups] == [
        [(5,) * TOKENS] * 3,
        [(7,) * TOKENS] * 3,
    ]
    engine.close()


def test_it_scores_what_vllm_can(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(0))
    assert engine.score([(1, 2, 3), (4, 5)], 1.0) == [(-0.25, -0.25), (-0.25,)]
    assert engine.score([], 1.0) == []
    assert engine.score([(1, 2)], 0.7) is None
    assert engine.score([(1,) * (vllm.positions - 1)], 1.0) is not None
    assert engine.score([(1,) * vllm.positions], 1.0) is None


def test_prompts_that_vllm_would_refuse_never_reach_it(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(0))
    for prompts, expected in [
        ((), "batch 9 has no prompts"),
        (((1,), ()), "prompt 1 is empty"),
        (((1,) * 14,), "prompt 0 of 14 tokens and 3 new tokens need 17 positions but vLLM was started for 16"),
    ]:
        with pytest.raises(ValueError, match=expected):
            engine.generate(RolloutRequest(9, prompts, seed=0))
    assert "complete" not in vllm.calls
    assert engine.generate(RolloutRequest(9, ((1,) * 13,), seed=0)).version_first == 0


def test_filters_that_hide_the_policys_logprobs_are_refused(vllm: FakeVLLM) -> None:
    with pytest.raises(ValueError, match="temperature 0.7 with top_p 0.9.*set --temperature 1 or switch them off"):
        VLLMRolloutEngine(vllm, SamplingParams(temperature=0.7, top_p=0.9), (2,))


def test_close_ends_vllm_and_the_thread_even_after_a_start_that_failed(vllm: FakeVLLM) -> None:
    before = set(threading.enumerate())
    engine = VLLMRolloutEngine(vllm, SAMPLING, (2,))
    vllm.fail("open", ValueError("too old"))
    with pytest.raises(ValueError, match="too old"):
        engine.start()
    engine.close()
    assert vllm.calls == ["open", "close"]
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="not started, or closed"):
        engine.load_weights(snapshot(0))
    with pytest.raises(RuntimeError, match="not started, or closed"):
        engine.generate(ONE)


def test_close_ends_what_hangs(vllm: FakeVLLM) -> None:
    engine = VLLMRolloutEngine(vllm, SAMPLING, (2,))
    engine.start()
    engine.load_weights(snapshot(0))
    drawing, loading = vllm.hold("complete"), vllm.hold("transfer")
    running = beside(engine.generate, ONE)
    drawing.wait_until_reached()
    load = beside(engine.load_weights, snapshot(1))
    loading.wait_until_reached()
    engine.close()
    assert failure(load) == "RuntimeError: the rollout engine was closed"
    assert isinstance(running.exception(LIMIT_S), RuntimeError)
    assert vllm.calls[-3:] == ["pause", "transfer", "close"]


def test_a_start_that_hangs_is_closed_once(vllm: FakeVLLM) -> None:
    engine, hold = VLLMRolloutEngine(vllm, SAMPLING, (2,)), vllm.hold("open")
    starting = beside(engine.start)
    hold.wait_until_reached()
    engine.close()
    assert failure(starting) == "RuntimeError: the rollout engine was closed"
    assert vllm.calls == ["open", "close"]


def test_start_tells_what_it_took(vllm: FakeVLLM) -> None:
    engine = VLLMRolloutEngine(vllm, SAMPLING, (2,))
    assert engine.start() == {"build_s": 1.0}
    engine.close()
