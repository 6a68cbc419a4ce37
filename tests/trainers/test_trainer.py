"""Whole runs from Python on a tiny model: each algorithm, what is left on disk, and what is refused."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fsm_trainer import AsyncPolicyTrainer, PolicyOnlyTrainer
from fsm_trainer.config import TrainConfig
from fsm_trainer.core.events import RecordKind
from fsm_trainer.data.rewards import RewardRecord
from fsm_trainer.engines.base import Rollout, RolloutRequest, TrainResult
from fsm_trainer.engines.hf_rollout import HFRolloutEngine
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.eventlog.writer import EventLogError, EventLogWriter
from fsm_trainer.runtime.train_queue import AsyncTrainBatchQueue
from fsm_trainer.trainers import RunResult, Trainer
from tests.trainers.helpers import DOCUMENTED, ROWS, log_of, metrics_of, run_end, varied_reward

Make = Callable[..., TrainConfig]
TRAINERS: dict[str, type[Trainer]] = {
    "grpo": PolicyOnlyTrainer,
    "gspo": PolicyOnlyTrainer,
    "async-grpo": AsyncPolicyTrainer,
    "async-gspo": AsyncPolicyTrainer,
}


def fit(config: TrainConfig, reward_fn: Callable[[RewardRecord], Any] = varied_reward) -> RunResult:
    return TRAINERS[config.algo](config, reward_fn=reward_fn, dataset=ROWS).fit()


def check_run(result: RunResult, model: Path, steps: int) -> None:
    """Everything that holds of a completed run, whatever the algorithm."""
    assert (result.outcome, result.exit_code, result.train_version) == ("completed", 0, steps), result.message
    lines = metrics_of(result.run.path)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert set(DOCUMENTED) <= set(line)
        assert all(math.isfinite(value) for value in line.values())
        assert line["grad_norm"] > 0
    check_samples(result.run.samples, lines)
    check_checkpoint(result.run.checkpoint(steps), model)
    end = run_end(result.run.path)
    assert (end.reason, end.train_version) == ("completed", steps)


def check_samples(folder: Path, lines: list[dict[str, Any]]) -> None:
    frame = pd.concat([pd.read_parquet(path) for path in sorted(folder.glob("batch-*.parquet"))])
    for line in lines:
        batch = frame[frame["batch_id"] == line["batch_id"]]
        assert len(batch) == 12
        assert batch["reward"].mean() == pytest.approx(line["reward_mean"])
        assert batch["tokens"].map(len).sum() == line["tokens"]
        assert set(batch["rollout_version_first"]) == {line["rollout_version"]}
        for row in batch.itertuples():
            assert row.prompt == ROWS[row.row]["prompt"]


def check_checkpoint(checkpoint: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert AutoTokenizer.from_pretrained(checkpoint).encode("12=") == [5, 6, 14]
    start, weights = load_file(model / "model.safetensors"), loaded.state_dict()
    assert start.keys() == weights.keys()
    for name, tensor in weights.items():
        assert not torch.equal(tensor, start[name]), f"{name} has not changed"
        assert bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("algo", TRAINERS)
def test_a_run_of_each_algorithm(
    algo: str, make_config: Make, model: Path, published: list[SharedMemoryTransport]
) -> None:
    result = fit(make_config(algo=algo))
    check_run(result, model, 4)
    assert [transport._fds for transport in published] == [{}], "published weights are freed"
    versions = {line["rollout_version"] - line["step"] + 1 for line in metrics_of(result.run.path)}
    assert 0 in versions
    assert versions <= ({0, -1} if algo.startswith("async-") else {0}), "ahead by no more than the bound"


def test_generation_runs_ahead_of_training(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is held until the second batch is there: it can only have the weights from before the step."""
    ahead = threading.Event()
    train, generate = HFTrainEngine.train, HFRolloutEngine.generate

    def generate_and_tell(self: HFRolloutEngine, request: RolloutRequest) -> Rollout:
        rollout = generate(self, request)
        if request.batch_id == 1:
            ahead.set()
        return rollout

    def train_late(self: HFTrainEngine, *args: Any) -> TrainResult:
        assert ahead.wait(30), "nothing was generated beside the step"
        return train(self, *args)

    monkeypatch.setattr(HFRolloutEngine, "generate", generate_and_tell)
    monkeypatch.setattr(HFTrainEngine, "train", train_late)
    result = fit(make_config())
    assert result.exit_code == 0, result.message
    assert [line["staleness_max"] for line in metrics_of(result.run.path)][:2] == [0, 1]


def test_an_engine_in_its_own_process(make_config: Make, model: Path) -> None:
    result = fit(make_config(rollout_host="process"))
    check_run(result, model, 4)


@pytest.mark.parametrize("admission", ["greedy", "lockstep"])
def test_other_admissions(admission: str, make_config: Make, model: Path) -> None:
    config = make_config(async_admission=admission, async_rollout_workers=2, async_max_staleness=2, max_steps=6)
    check_run(fit(config), model, 6)


def test_the_ratio_of_stale_batches_is_that_of_their_own_logprobs(make_config: Make) -> None:
    lines = metrics_of(fit(make_config(lr=1e-2, async_admission="lockstep")).run.path)
    fresh = [line["ratio_max"] for line in lines if line["staleness_max"] == 0]
    stale = [line["ratio_max"] for line in lines if line["staleness_max"] == 1]
    assert fresh == pytest.approx([1.0], abs=1e-5)
    assert len(stale) == 3
    assert all(abs(ratio - 1.0) > 1e-3 for ratio in stale)


def test_the_epochs_end_the_run(make_config: Make) -> None:
    result = fit(make_config(batch_size=16, epochs=2, max_steps=None))
    assert (result.outcome, result.train_version) == ("completed", 4)
    assert [line["epoch"] for line in metrics_of(result.run.path)] == [0, 0, 1, 1]


def test_checkpoints_at_the_interval_and_at_the_end(make_config: Make, tmp_path: Path) -> None:
    result = fit(make_config(save_interval=2, max_steps=5, save_path=str(tmp_path / "kept")))
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-000002", "step-000004", "step-000005"]
    saved = [r for r in log_of(result.run.path) if r.kind is RecordKind.CHECKPOINT]
    assert {r.train_version for r in saved} >= {2, 4, 5}


def test_no_samples_when_not_wanted(make_config: Make) -> None:
    result = fit(make_config(log_samples="none"))
    assert result.exit_code == 0
    assert not result.run.samples.exists()


def test_rewards_without_spread_end_the_run_with_a_reason(make_config: Make, model: Path) -> None:
    result = fit(make_config(async_max_no_step_batches=3), lambda record: 1.0)
    assert (result.outcome, result.exit_code, result.train_version) == ("failed", 1, 0)
    assert "3 batches" in result.message
    assert "no checkpoint" in result.message
    drops = [r.reason for r in log_of(result.run.path) if r.kind is RecordKind.DROP]
    assert set(drops) == {"degenerate"}
    assert metrics_of(result.run.path) == []


def test_an_entropy_bonus_makes_even_those_a_step(make_config: Make) -> None:
    result = fit(make_config(entropy_coef=0.1), lambda record: 1.0)
    assert (result.outcome, result.train_version) == ("completed", 4)


def test_a_reward_that_raises_fails_the_run_and_names_its_line(make_config: Make) -> None:
    calls = 0

    def broken(record: RewardRecord) -> float:
        nonlocal calls
        calls += 1
        if calls > 30:
            raise ZeroDivisionError("no digits in the completion")
        return varied_reward(record)

    result = fit(make_config(), broken)
    line = broken.__code__.co_firstlineno + 4
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert f"ZeroDivisionError: no digits in the completion (broken, test_trainer.py:{line})" in result.message
    assert "rollout-0: reward of batch 2 failed" in result.message
    assert run_end(result.run.path).reason == "failed"


def test_the_whole_run_is_fixed_by_the_seed(make_config: Make, tmp_path: Path) -> None:
    """Synchronous, so nothing depends on threads."""
    runs = {
        name: fit(make_config(algo="grpo", seed=seed, output_dir=str(tmp_path / name)))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    }
    weights = {name: load_file(r.run.checkpoint(4) / "model.safetensors") for name, r in runs.items()}
    assert all(torch.equal(weights["a"][name], weights["b"][name]) for name in weights["a"])
    assert not all(torch.equal(weights["a"][name], weights["c"][name]) for name in weights["a"])


@pytest.mark.parametrize(("kind", "algo"), [(PolicyOnlyTrainer, "async-grpo"), (AsyncPolicyTrainer, "gspo")])
def test_the_wrong_trainer_for_the_algorithm(kind: type[Trainer], algo: str, make_config: Make) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} runs an? (a?synchronous) algorithm, got '{algo}'"):
        kind(make_config(algo=algo), reward_fn=varied_reward, dataset=ROWS)


def test_fit_is_for_once(make_config: Make) -> None:
    trainer = AsyncPolicyTrainer(make_config(max_steps=1), reward_fn=varied_reward, dataset=ROWS)
    assert trainer.fit().exit_code == 0
    with pytest.raises(ValueError, match="fit was called before"):
        trainer.fit()


@pytest.mark.parametrize("extra", [{"reward_fn": varied_reward}, {"dataset": ROWS}])
def test_a_queue_needs_neither_dataset_nor_reward(extra: dict[str, Any], make_config: Make) -> None:
    with pytest.raises(ValueError, match="got a queue and a reward_fn or dataset"):
        AsyncPolicyTrainer(make_config(), queue=AsyncTrainBatchQueue(1), **extra)
    with pytest.raises(ValueError, match="got on_weights without a queue"):
        AsyncPolicyTrainer(make_config(), reward_fn=varied_reward, dataset=ROWS, on_weights=print)


@pytest.mark.parametrize(
    ("objects", "flag"), [({"reward_fn": varied_reward}, "--dataset-path"), ({"dataset": ROWS}, "--reward-fn-path")]
)
def test_what_is_missing_is_named(objects: dict[str, Any], flag: str, make_config: Make) -> None:
    with pytest.raises(ValueError, match=f"{flag} is missing"):
        AsyncPolicyTrainer(make_config(), **objects)


def test_a_run_is_never_overwritten(make_config: Make) -> None:
    assert fit(make_config(max_steps=1)).exit_code == 0
    with pytest.raises(ValueError, match="is not empty"):
        fit(make_config(max_steps=1))


class Shown:
    """A display that keeps what it could have shown."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, read: Callable[[], Any]) -> None:
        self.read = read
        self.calls.append("start")

    def stop(self) -> None:
        self.last = self.read()
        self.calls.append("stop")


def test_a_display_is_stopped_whatever_happens(make_config: Make, tmp_path: Path) -> None:
    for name, reward_fn in (("good", varied_reward), ("bad", lambda record: "no number")):
        shown = Shown()
        config = make_config(output_dir=str(tmp_path / name))
        result = AsyncPolicyTrainer(config, reward_fn=reward_fn, dataset=ROWS, display=shown).fit()
        assert shown.calls == ["start", "stop"]
        assert shown.last.status.train_version == result.train_version
        assert shown.last.total_steps == 4


def test_a_log_that_fails_at_its_very_end_fails_the_run(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    close = EventLogWriter.close

    def fail(self: EventLogWriter) -> None:
        close(self)
        raise EventLogError("cannot write the event log: No space left on device")

    monkeypatch.setattr(EventLogWriter, "close", fail)
    result = fit(make_config(max_steps=1))
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert "No space left on device" in result.message
    assert result.run.checkpoint(1).is_dir()


def test_a_stop_while_closing_and_an_engine_that_fails_to_close_change_nothing(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: HFTrainEngine) -> None:
        signal.raise_signal(signal.SIGINT)
        raise AttributeError("half started")

    monkeypatch.setattr(HFTrainEngine, "close", fail)
    result = fit(make_config(max_steps=1))
    assert (result.outcome, result.exit_code) == ("completed", 0)
    assert run_end(result.run.path).reason == "completed"


def test_stop_ends_a_run_in_order_and_is_refused_without_one(make_config: Make) -> None:
    def stop_at_the_second_batch(record: RewardRecord) -> float:
        if record.metadata["batch_id"] == 1 and not stopped:
            stopped.append(True)
            trainer.stop()
        return varied_reward(record)

    stopped: list[bool] = []
    trainer = AsyncPolicyTrainer(make_config(), reward_fn=stop_at_the_second_batch, dataset=ROWS)
    with pytest.raises(ValueError, match="nothing to stop"):
        trainer.stop()
    result = trainer.fit()
    assert (result.outcome, result.exit_code) == ("interrupted", 130)
    assert result.train_version >= 2, "what was in flight was finished"
    assert result.run.checkpoint(result.train_version).is_dir()
    assert run_end(result.run.path).message == "user"
