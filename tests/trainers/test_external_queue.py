"""Runs whose batches come from producers outside, through an `AsyncTrainBatchQueue`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsm_trainer import AsyncPolicyTrainer
from fsm_trainer.config import TrainConfig
from fsm_trainer.core.batch_queue import QueueClosed
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.transport import read_snapshot
from fsm_trainer.runtime.train_queue import AsyncTrainBatchQueue
from tests.trainers.helpers import log_of, metrics_of, run_end, train_batch

Make = Callable[..., TrainConfig]


@pytest.fixture
def make_config(make_config: Make) -> Make:
    """A configuration that does not look at logprobs: those of the batches here are made up."""
    return lambda **changes: make_config(**{"max_logprob_gap": 0, **changes})


class Versions:
    """What `on_weights` tells a producer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.seen: list[int] = []
        self.norms: list[float] = []

    def __call__(self, snapshot: Snapshot) -> None:
        norm = sum(float(tensor.double().norm()) for _, tensor in read_snapshot(snapshot))
        with self._changed:
            self.seen.append(snapshot.version)
            self.norms.append(norm)
            self._changed.notify_all()

    def wait_for(self, version: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: version in self.seen, 30), f"version {version} was never told"


def filled(*versions: int, close: bool = True) -> AsyncTrainBatchQueue:
    """A queue with a batch of each version."""
    queue = AsyncTrainBatchQueue(len(versions) + 1)
    for batch_id, version in enumerate(versions):
        queue.put(train_batch(batch_id, version))
    if close:
        queue.close()
    return queue


def ends_of(run: Any) -> dict[str, int]:
    ends: dict[str, int] = {}
    for r in log_of(run):
        if r.kind is RecordKind.DROP and r.reason is not None:
            ends[r.reason] = ends.get(r.reason, 0) + 1
    return ends


def test_a_producer_that_follows_the_weights(make_config: Make) -> None:
    queue, versions = AsyncTrainBatchQueue(2), Versions()

    def produce() -> None:
        for version in range(5):
            versions.wait_for(version)
            queue.put(train_batch(version, version), timeout_s=30)
        queue.close()

    with ThreadPoolExecutor(1) as pool:
        producer = pool.submit(produce)
        result = AsyncPolicyTrainer(make_config(max_steps=None), queue=queue, on_weights=versions).fit()
        producer.result(30)
    assert (result.outcome, result.exit_code, result.train_version) == ("completed", 0, 5), result.message
    lines = metrics_of(result.run.path)
    assert [line["rollout_version"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["staleness_mean"] for line in lines] == [0] * 5
    assert (lines[0]["rollout_s"], lines[0]["reward_s"], lines[0]["tokens"]) == (0.25, 0.125, 10)
    assert versions.seen == sorted(set(versions.seen))
    assert len(set(versions.norms)) == len(versions.norms), "each version has other weights"
    assert run_end(result.run.path).reason == "completed"
    assert result.run.checkpoint(5).is_dir()
    assert torch.isfinite(torch.tensor(versions.norms)).all()


def test_stale_batches_are_dropped(make_config: Make) -> None:
    result = AsyncPolicyTrainer(make_config(max_steps=None), queue=filled(0, 0, 0, 0, 2)).fit()
    assert (result.outcome, result.train_version) == ("completed", 3), result.message
    assert ends_of(result.run.path) == {"stale": 2}
    assert [line["staleness_mean"] for line in metrics_of(result.run.path)] == [0, 1, 0]


@pytest.mark.parametrize(("policy", "loss_tokens"), [("keep", 4), ("mask", 3), ("correct", 4)])
def test_batches_of_mixed_versions(make_config: Make, policy: str, loss_tokens: int) -> None:
    """The second batch was begun with version 0 and ended with version 1; its made-up logprobs are far off."""
    first, second = train_batch(0, 0), train_batch(1, 0)
    mixed = replace(second.train_sequences[0], version_spans=((0, 1), (1, 1)))
    queue = AsyncTrainBatchQueue(2)
    queue.put(first)
    queue.put(replace(second, train_sequences=(mixed, *second.train_sequences[1:])))
    queue.close()
    result = AsyncPolicyTrainer(make_config(max_steps=None, async_span_policy=policy), queue=queue).fit()
    assert (result.outcome, result.train_version) == ("completed", 2), result.message
    lines = metrics_of(result.run.path)
    assert [line["span_old_fraction"] for line in lines] == [0.0, 0.25]
    assert [line["loss_tokens"] for line in lines] == [4, loss_tokens]
    assert [line["staleness_mean"] for line in lines] == [0, 1], "from the first token"
    assert ("span_truncated_fraction" in lines[1]) is (policy == "correct")
    stamps = [(r.rollout_version_first, r.rollout_version_last) for r in log_of(result.run.path) if is_stamp(r)]
    assert stamps == [(0, 0), (0, 1)]


def is_stamp(r: Record) -> bool:
    return r.kind is RecordKind.INPUT and r.trigger == "generated"


def test_a_batch_must_be_stamped_with_its_oldest_version(make_config: Make) -> None:
    mixed = replace(train_batch(0, 1).train_sequences[0], version_spans=((0, 1), (1, 1)))
    queue = AsyncTrainBatchQueue(1)
    queue.put(train_batch(0, 1, train_sequences=(mixed,)))
    result = AsyncPolicyTrainer(make_config(), queue=queue).fit()
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert "batch 0 is stamped with version 1 but version 0 drew some of its tokens" in result.message


def test_or_fail_the_run_if_so_configured(make_config: Make) -> None:
    queue = filled(0, 0, 0, close=False)
    result = AsyncPolicyTrainer(make_config(async_drop_stale_batches=False), queue=queue).fit()
    assert (result.outcome, result.exit_code, result.train_version) == ("failed", 1, 2)
    assert "stale" in result.message
    with pytest.raises(RuntimeError, match="stale"):
        queue.put(train_batch(3, 2))


@pytest.mark.parametrize("version", [9, -1])
def test_a_version_that_does_not_exist_is_refused(version: int, make_config: Make) -> None:
    result = AsyncPolicyTrainer(make_config(), queue=filled(version)).fit()
    assert result.exit_code == 1
    assert f"version {version}" in result.message
    assert run_end(result.run.path).reason == "failed"


def test_enough_steps_close_the_queue(make_config: Make) -> None:
    queue = filled(0, 0, close=False)
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[object] = pool.submit(lambda: [queue.put(train_batch(i, 1)) for i in range(2, 20)])
        result = AsyncPolicyTrainer(make_config(max_steps=2), queue=queue).fit()
        with pytest.raises(QueueClosed):
            waiting.result(30)
    assert (result.outcome, result.exit_code, result.train_version) == ("completed", 0, 2)
    assert queue.closed


def test_an_error_of_the_run_reaches_the_producer(make_config: Make) -> None:
    queue = AsyncTrainBatchQueue(1)

    def produce() -> None:
        for batch_id in range(50):
            queue.put(train_batch(batch_id, 0), timeout_s=30)

    config = make_config(lr=1e30, async_max_staleness=50, max_steps=None)
    with ThreadPoolExecutor(1) as pool:
        producer = pool.submit(produce)
        result = AsyncPolicyTrainer(config, queue=queue).fit()
        assert (result.outcome, result.exit_code) == ("failed", 1)
        assert "FloatingPointError" in result.message
        # Parked at the full queue when it happened: QueueClosed would look like an ordinary end to it.
        with pytest.raises(RuntimeError, match="FloatingPointError"):
            producer.result(30)
    with pytest.raises(RuntimeError, match="FloatingPointError"):
        queue.put(train_batch(99, 0))


def test_an_error_of_a_producer_fails_the_run(make_config: Make) -> None:
    queue, versions = AsyncTrainBatchQueue(2), Versions()

    def produce() -> None:
        queue.put(train_batch(0, 0))
        versions.wait_for(1)
        queue.report_error(ConnectionError("the game server is gone"))

    with ThreadPoolExecutor(1) as pool:
        producer = pool.submit(produce)
        result = AsyncPolicyTrainer(make_config(), queue=queue, on_weights=versions).fit()
        producer.result(30)
    assert (result.outcome, result.exit_code, result.train_version) == ("failed", 1, 1)
    assert "ConnectionError: the game server is gone" in result.message
    assert isinstance(queue.error, ConnectionError), "the first error is kept"
    assert run_end(result.run.path).reason == "failed"


def test_a_producer_that_gives_nothing_is_named(make_config: Make) -> None:
    config = make_config(async_queue_timeout_s=0.05)
    result = AsyncPolicyTrainer(config, queue=filled(0, close=False)).fit()
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert "waited 0.05 s for a batch in the train queue" in result.message
    assert "no producer put one" in result.message


def test_a_callback_that_raises_fails_the_run(make_config: Make) -> None:
    def broken(snapshot: Snapshot) -> None:
        raise OSError("no space on the inference server")

    queue = AsyncTrainBatchQueue(1)
    result = AsyncPolicyTrainer(make_config(), queue=queue, on_weights=broken).fit()
    assert result.exit_code == 1
    assert "OSError: no space on the inference server (test_external_queue.py:" in result.message
    with pytest.raises(RuntimeError, match="no space"):
        queue.put(train_batch(0, 0))


def test_one_interrupt_ends_it_cleanly(make_config: Make) -> None:
    queue, versions = AsyncTrainBatchQueue(1), Versions()

    def on_weights(snapshot: Snapshot) -> None:
        versions(snapshot)
        if snapshot.version == 2:
            signal.raise_signal(signal.SIGINT)

    def produce() -> None:
        versions.wait_for(0)
        for batch_id in range(10_000):
            queue.put(train_batch(batch_id, versions.seen[-1]), timeout_s=30)

    with ThreadPoolExecutor(1) as pool:
        producer = pool.submit(produce)
        result = AsyncPolicyTrainer(make_config(max_steps=None), queue=queue, on_weights=on_weights).fit()
        with pytest.raises(QueueClosed):
            producer.result(30)
    assert (result.outcome, result.exit_code) == ("interrupted", 130), result.message
    assert result.run.checkpoint(result.train_version).is_dir()
    assert run_end(result.run.path).reason == "interrupted"


def test_fit_that_raises_reports_it_to_the_queue(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = AsyncTrainBatchQueue(1)
    trainer = AsyncPolicyTrainer(make_config(), queue=queue)
    Path(str(trainer.config.output_dir)).write_text("in the way")
    with pytest.raises(FileExistsError):
        trainer.fit()
    with pytest.raises(FileExistsError):
        queue.put(train_batch(0, 0))


def test_made_up_logprobs_are_refused_unless_told(make_config: Make) -> None:
    result = AsyncPolicyTrainer(make_config(max_logprob_gap=None), queue=filled(0)).fit()
    assert (result.exit_code, result.train_version) == (1, 0)
    assert "batch 0 was generated by its producer with version 0" in result.message


@pytest.mark.parametrize("setting", [{"dynamic_sampling": "true"}, {"overlong_buffer_tokens": 2}])
def test_what_belongs_to_scoring_is_refused_with_a_queue(setting: dict[str, Any], make_config: Make) -> None:
    with pytest.raises(ValueError, match="has no meaning with a queue, whose batches are scored already; leave it out"):
        AsyncPolicyTrainer(make_config(**setting), queue=AsyncTrainBatchQueue(2))
