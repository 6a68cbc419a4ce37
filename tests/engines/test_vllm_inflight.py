"""Loads amid a batch with and without the caches of what runs, on a vLLM that does what the test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsm_trainer.engines.base import Rollout, VersionSpan
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from tests.engines.fake_vllm import LIMIT_S, TOKENS, FakeVLLM
from tests.engines.test_vllm_rollout import ONE, SAMPLING, TWO, beside, snapshot

KEPT = pytest.mark.parametrize("keep_cache", [False, True])


@pytest.fixture
def vllm() -> FakeVLLM:
    return FakeVLLM()


@pytest.fixture
def engine(vllm: FakeVLLM, keep_cache: bool) -> Iterator[VLLMRolloutEngine]:
    engine = VLLMRolloutEngine(vllm, SAMPLING, (2,), keep_cache=keep_cache)
    engine.start()
    yield engine
    engine.close()


def load_amid_a_batch(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> Rollout:
    """A batch that begins with version 0 and ends with version 1."""
    engine.load_weights(snapshot(0))
    hold = vllm.hold("complete")
    running = beside(engine.generate, ONE)
    hold.wait_until_reached()
    engine.load_weights(snapshot(1))
    hold.release()
    return running.result(LIMIT_S)


@KEPT
def test_a_pause_drops_caches_unless_they_are_kept(vllm: FakeVLLM, engine: VLLMRolloutEngine, keep_cache: bool) -> None:
    load_amid_a_batch(vllm, engine)
    assert vllm.cleared == [not keep_cache]


@KEPT
def test_no_prompt_finds_what_was_cached_before_a_load(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    load_amid_a_batch(vllm, engine)
    engine.generate(TWO)
    engine.load_weights(snapshot(1))  # the same version again
    engine.generate(ONE)
    before, *after = vllm.salts
    assert all(before not in ("", salt) for salt in after)
    assert after[0] == after[1] != after[2], "prompts of one batch may share what they have in common"


@KEPT
def test_a_batch_that_begins_before_a_load_is_as_old_as_the_cache_it_may_find(
    vllm: FakeVLLM, engine: VLLMRolloutEngine, keep_cache: bool
) -> None:
    vllm.queues = True
    rollout = load_amid_a_batch(vllm, engine)
    assert (rollout.version_first, rollout.version_last) == (0 if keep_cache else 1, 1)
    spans = (VersionSpan(1, TOKENS),) if keep_cache else ()
    assert [sample.spans for sample in rollout.groups[0]] == [spans] * 2


@KEPT
def test_a_batch_of_one_version_is_fresh(vllm: FakeVLLM, engine: VLLMRolloutEngine) -> None:
    engine.load_weights(snapshot(3))
    rollout = engine.generate(TWO)
    assert (rollout.version_first, rollout.version_last) == (3, 3)
    assert all(sample.spans == () for group in rollout.groups for sample in group)


@KEPT
@pytest.mark.parametrize("method", ["pause", "transfer", "weight_version", "resume"])
def test_after_a_load_that_failed_nothing_of_it_is_found(
    vllm: FakeVLLM, engine: VLLMRolloutEngine, method: str
) -> None:
    engine.load_weights(snapshot(0))
    hold = vllm.hold("complete")
    running = beside(engine.generate, ONE)
    hold.wait_until_reached()
    vllm.fail(method, OSError("no room"))
    with pytest.raises(OSError, match="no room"):
        engine.load_weights(snapshot(1))
    assert running.exception(LIMIT_S) is not None
    engine.load_weights(snapshot(1))
    rollout = engine.generate(ONE)
    assert (rollout.version_first, rollout.version_last) == (1, 1)
    first, second = vllm.salts
    assert first != second
