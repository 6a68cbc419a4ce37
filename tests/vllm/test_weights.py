"""Weights pushed into a live vLLM: they are the new ones, whole, at once, and no cache outlives them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from fsm_trainer.engines.base import EngineLost, Rollout, RolloutRequest, Snapshot
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.weight_sync.directory import DirectoryTransport
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from tests.vllm.conftest import Engine, Publish, largest_gap

# Longer than a block of vLLM's prefix cache (32 tokens on the CPU), or nothing would be cached.
PROMPTS = (tuple([4, 5, 6, 7, 14] * 8), tuple([9, 8, 7, 14] * 10))
REQUEST = RolloutRequest(0, PROMPTS, seed=0)
TRIES = 5
TOLERANCE = 1e-4


@pytest.mark.parametrize("transport", ["shared-memory", "directory"])
def test_every_load_serves_the_new_weights(
    engine: Engine, models: list[PreTrainedModel], tmp_path: Path, transport: str
) -> None:
    made = (
        SharedMemoryTransport() if transport == "shared-memory" else DirectoryTransport(tmp_path, bucket_bytes=100_000)
    )
    rollouts = engine(n_samples=2, max_new_tokens=12)
    for version in range(4):
        snapshot = made.publish(models[version % 2].state_dict().items(), version)
        loaded = rollouts.load_weights(snapshot)
        weights = sum(t.nbytes for t in models[0].state_dict().values())
        assert (loaded.version, loaded.nbytes, loaded.pause_s < loaded.transfer_s) == (version, weights, True)
        assert largest_gap(models, PROMPTS, rollouts.generate(REQUEST)) < TOLERANCE
        made.release(version)
    made.close()


def test_the_prefix_cache_does_not_outlive_the_weights(
    engine: Engine, publish: Publish, models: list[PreTrainedModel]
) -> None:
    rollouts = engine(n_samples=2, max_new_tokens=12)
    rollouts.load_weights(publish(0))
    rollouts.generate(REQUEST)
    old = rollouts._salt
    rollouts.load_weights(publish(1))
    assert largest_gap(models, PROMPTS, rollouts.generate(REQUEST)) < TOLERANCE
    # The same with the salt of the load before: what it cached is found, and the check above would have said so.
    rollouts._salt = old
    assert largest_gap(models, PROMPTS, rollouts.generate(REQUEST)) > 100 * TOLERANCE


def test_a_load_that_fails_leaves_nothing_to_serve(
    engine: Engine, publish: Publish, models: list[PreTrainedModel]
) -> None:
    rollouts = engine(n_samples=1, max_new_tokens=4)
    rollouts.load_weights(publish(0))
    with pytest.raises(Exception, match="weights of version 9 are gone"):
        rollouts.load_weights(Snapshot(9, "/proc/self/fd/9999", 1))
    with pytest.raises(RuntimeError, match="no weights loaded"):
        rollouts.generate(REQUEST)
    rollouts.load_weights(publish(3))
    assert largest_gap(models, PROMPTS, rollouts.generate(REQUEST)) < TOLERANCE


def load_while_generating(rollouts: VLLMRolloutEngine, publish: Publish, request: RolloutRequest) -> Rollout:
    """A generation that began with a first version, while version after version was loaded."""
    for _ in range(TRIES):  # it may be through before the first load, which a busy machine holds up
        rollout = _generate_over_loads(rollouts, publish, request)
        if rollout.version_first < rollout.version_last:
            break
    return rollout


def _generate_over_loads(rollouts: VLLMRolloutEngine, publish: Publish, request: RolloutRequest) -> Rollout:
    done: list[Rollout] = []
    rollouts.load_weights(publish(0))
    thread = threading.Thread(target=lambda: done.append(rollouts.generate(request)))
    thread.start()
    version = 0
    while thread.is_alive():
        version += 1
        rollouts.load_weights(publish(version))
    thread.join()
    return done[0]


def test_what_runs_goes_on_with_the_new_weights(
    engine: Engine, publish: Publish, models: list[PreTrainedModel]
) -> None:
    rollouts = engine(n_samples=4, max_new_tokens=180, eos=())
    rollout = load_while_generating(rollouts, publish, REQUEST)
    samples = [sample for group in rollout.groups for sample in group]
    assert rollout.version_first == min(sample.spans[0].version for sample in samples)
    assert rollout.version_last == max(sample.spans[-1].version for sample in samples)
    assert rollout.version_first < rollout.version_last
    assert any(len(sample.spans) > 2 for sample in samples)
    # Each token by the weights stamped on it, given all tokens before it: nothing of the older weights is left.
    assert largest_gap(models, PROMPTS, rollout) < TOLERANCE


def test_a_load_in_flight_leaves_no_old_prefix_for_later_prompts(
    engine: Engine, publish: Publish, models: list[PreTrainedModel]
) -> None:
    rollouts = engine(n_samples=4, max_new_tokens=180, eos=())
    load_while_generating(rollouts, publish, REQUEST)
    assert largest_gap(models, PROMPTS, rollouts.generate(REQUEST)) < TOLERANCE


def test_several_batches_run_at_once(engine: Engine, publish: Publish, models: list[PreTrainedModel]) -> None:
    rollouts = engine(n_samples=4, max_new_tokens=60, eos=())
    rollouts.load_weights(publish(0))
    requests = [RolloutRequest(batch, PROMPTS, seed=0) for batch in range(3)]
    found: dict[int, Rollout] = {}
    together: list[int] = []

    def run(request: RolloutRequest) -> None:
        found[request.batch_id] = rollouts.generate(request)

    threads = [threading.Thread(target=run, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        together.append(len(rollouts._running))
    assert max(together) == 3
    for request in requests:
        assert largest_gap(models, PROMPTS, found[request.batch_id]) < TOLERANCE
        assert found[request.batch_id] == rollouts.generate(request)


def test_a_load_that_fails_in_flight_fails_what_runs(engine: Engine, publish: Publish) -> None:
    rollouts = engine(n_samples=4, max_new_tokens=180, eos=())
    rollouts.load_weights(publish(0))
    raised: list[Exception] = []

    def run() -> None:
        try:
            rollouts.generate(REQUEST)
        except (RuntimeError, EngineLost) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not rollouts._running:
        pass
    with pytest.raises(Exception, match="are gone"):
        rollouts.load_weights(Snapshot(9, "/proc/self/fd/9999", 1))
    thread.join()
    (error,) = raised
    assert isinstance(error, EngineLost)
    assert str(error).startswith("generation aborted: weights could not be loaded amid it (")
    # vLLM stands still until a full good load.
    rollouts.load_weights(publish(2))
    assert rollouts.generate(RolloutRequest(0, PROMPTS[:1], seed=0)).version_first == 2


def test_abort_ends_all_that_runs(engine: Engine, publish: Publish) -> None:
    rollouts: Any = engine(n_samples=4, max_new_tokens=180, eos=())
    rollouts.load_weights(publish(0))
    raised: list[str] = []

    def run(batch: int) -> None:
        try:
            rollouts.generate(RolloutRequest(batch, PROMPTS, seed=0))
        except RuntimeError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=run, args=(batch,)) for batch in range(2)]
    for thread in threads:
        thread.start()
    while len(rollouts._running) < 2:
        pass
    rollouts.abort()
    for thread in threads:
        thread.join()
    assert raised == ["generation aborted"] * 2
