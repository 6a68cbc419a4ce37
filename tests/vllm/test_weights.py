"""Weights pushed into a live vLLM: they are the new ones, whole, at once, and no cache outlives them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from fsm_trainer.engines.base import EngineLost, RolloutRequest, Snapshot
from fsm_trainer.engines.weight_sync.directory import DirectoryTransport
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from tests.vllm.beside import LIMIT_S, amid, generating, go_on, load_amid, stand_still
from tests.vllm.conftest import Engine, Publish, largest_gap

# Longer than a block of vLLM's prefix cache (32 tokens on the CPU), or nothing would be cached.
PROMPTS = (tuple([4, 5, 6, 7, 14] * 8), tuple([9, 8, 7, 14] * 10))
REQUEST = RolloutRequest(0, PROMPTS, seed=0)
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


def test_what_runs_goes_on_with_the_new_weights(
    engine: Engine, publish: Publish, models: list[PreTrainedModel]
) -> None:
    rollouts = engine(n_samples=4, max_new_tokens=180, eos=())
    rollout = load_amid(rollouts, publish, REQUEST, newest=2)
    assert (rollout.version_first, rollout.version_last) == (0, 2)
    # Each token by the weights stamped on it, given all tokens before it: nothing of the older weights is left.
    assert largest_gap(models, PROMPTS, rollout) < TOLERANCE


def test_several_batches_run_at_once(engine: Engine, publish: Publish, models: list[PreTrainedModel]) -> None:
    rollouts = engine(n_samples=4, max_new_tokens=60, eos=())
    rollouts.load_weights(publish(0))
    requests = [RolloutRequest(batch, PROMPTS, seed=0) for batch in range(3)]
    stand_still(rollouts)
    running = [generating(rollouts, request) for request in requests]  # so none is through when the last begins
    go_on(rollouts)
    for request, future in zip(requests, running, strict=True):
        found = future.result(LIMIT_S)
        assert largest_gap(models, PROMPTS, found) < TOLERANCE
        assert found == rollouts.generate(request)


def test_a_load_that_fails_in_flight_fails_what_runs(engine: Engine, publish: Publish) -> None:
    rollouts = engine(n_samples=4, max_new_tokens=180, eos=())
    rollouts.load_weights(publish(0))
    (running,) = amid(rollouts, REQUEST)
    with pytest.raises(Exception, match="are gone"):
        rollouts.load_weights(Snapshot(9, "/proc/self/fd/9999", 1))
    with pytest.raises(EngineLost, match=r"^generation aborted: weights could not be loaded amid it \("):
        running.result(LIMIT_S)
    # vLLM stands still until a full good load.
    rollouts.load_weights(publish(2))
    assert rollouts.generate(RolloutRequest(0, PROMPTS[:1], seed=0)).version_first == 2


def test_abort_ends_all_that_runs(engine: Engine, publish: Publish) -> None:
    rollouts = engine(n_samples=4, max_new_tokens=180, eos=())
    rollouts.load_weights(publish(0))
    running = amid(rollouts, *(RolloutRequest(batch, PROMPTS, seed=0) for batch in range(2)))
    rollouts.abort()
    for future in running:
        with pytest.raises(RuntimeError, match="^generation aborted$"):
            future.result(LIMIT_S)
    go_on(rollouts)
