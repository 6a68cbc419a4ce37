"""Whole runs on the prompt source: drops given back under real threads, smaller last batches, reasoning-gym."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fsm_trainer import AsyncPolicyTrainer, PolicyOnlyTrainer
from fsm_trainer.config import TrainConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.data.rewards import RewardRecord
from fsm_trainer.trainers.prepare import prepare
from tests.trainers.helpers import ROWS, log_of, metrics_of, run_end, varied_reward

Make = Callable[..., TrainConfig]


def rows_of_batch(run: Path, batch_id: int) -> set[int]:
    return set(pq.read_table(run / "samples" / f"batch-{batch_id:06d}.parquet")["row"].to_pylist())


def ends(rows: list[Record]) -> dict[int, tuple[str | None, str | None]]:
    """Batch -> (end, reason) in the order of the ends."""
    found = [r for r in rows if r.kind is RecordKind.TRANSITION and r.machine == "batch"]
    return {r.batch_id: (r.dest, r.reason) for r in found if r.dest in ("trained", "dropped", "cancelled")}  # type: ignore[misc]


@pytest.mark.parametrize("attempts", [1, 20])
def test_a_greedy_run_trains_on_every_prompt_though_it_drops_batches(
    attempts: int, make_config: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        async_admission="greedy", async_max_staleness=0, async_rollout_workers=3, async_queue_size=3, max_steps=None,
        epochs=1, entropy_coef=0.01, max_prompt_attempts=attempts, drop_last=False,
    )  # fmt: skip
    second = threading.Event()

    def reward(record: RewardRecord) -> float:
        """Holds the first batch until the second is scored too: of two that are as old, one must go stale."""
        if record.metadata["batch_id"] == 1:
            second.set()
        elif record.metadata["batch_id"] == 0:
            assert second.wait(30), "the second batch was not generated beside the first"
        return varied_reward(record)

    prepared = prepare(config, reward_fn=reward, dataset=ROWS[:16])
    assert prepared.inputs is not None
    source = prepared.inputs.prompts
    result = AsyncPolicyTrainer(config, prepared=prepared).fit()
    assert result.outcome == "completed", result.message
    found = ends(log_of(result.run.path))
    stale = [i for i, end in found.items() if end == ("dropped", "stale")]
    assert {0, 1} & set(stale)
    trained = Counter(
        row for i, end in found.items() if end[0] == "trained" for row in rows_of_batch(result.run.path, i)
    )
    assert set(trained.values()) == {1}
    if attempts == 1:
        lost = set().union(*(rows_of_batch(result.run.path, i) for i in stale))
        assert lost.isdisjoint(trained)
        assert lost | set(trained) == set(range(16))
        assert source.given_up == {"stale": len(lost)}
        said = capsys.readouterr()
        assert (said.out + said.err).count("prompts_given_up") == len(stale)
    else:
        assert set(trained) == set(range(16))
        assert source.given_up == {}
    assert source.settled + sum(source.given_up.values()) == 16
    assert source.batches_left == 0


@pytest.mark.parametrize("algo", ["grpo", "async-gspo"])
def test_a_smaller_last_batch_goes_through_everything(algo: str, make_config: Make) -> None:
    config = make_config(algo=algo, max_steps=None, epochs=2, drop_last=False, entropy_coef=0.01)
    kind = AsyncPolicyTrainer if config.is_async else PolicyOnlyTrainer
    result = kind(config, reward_fn=varied_reward, dataset=ROWS[:7]).fit()
    assert result.outcome == "completed", result.message
    assert result.train_version == 6
    sizes = [len(rows_of_batch(result.run.path, i)) for i in range(6)]
    assert sizes == [3, 3, 1] * 2
    tokens = [line["tokens"] for line in metrics_of(result.run.path)]
    assert all(n > 0 for n in tokens)
    assert max(tokens[2], tokens[5]) < min(tokens[:2] + tokens[3:5])


def test_a_failed_run_keeps_what_it_did_not_train_on(make_config: Make) -> None:
    def fails_late(record: RewardRecord) -> float:
        if record.metadata["batch_id"] == 2:
            raise RuntimeError("no more")
        return varied_reward(record)

    prepared = prepare(make_config(max_steps=None, epochs=1), reward_fn=fails_late, dataset=ROWS)
    assert prepared.inputs is not None
    source = prepared.inputs.prompts
    result = AsyncPolicyTrainer(prepared.config, prepared=prepared).fit()
    assert result.outcome == "failed"
    trained = [i for i, end in ends(log_of(result.run.path)).items() if end[0] == "trained"]
    state = source.state_dict()
    back = [row for group in state["returned"] for row in group["rows"]]
    assert source.settled == 3 * len(trained)
    assert len(back) == len(set(back)) == state["position"] - source.settled >= 3
    assert set(back).isdisjoint(row for i in trained for row in rows_of_batch(result.run.path, i))
    assert [group["attempts"] for group in state["returned"]].count(1) == 1  # only the failed one was an attempt


def test_without_shuffling_rows_come_in_their_order(make_config: Make) -> None:
    result = AsyncPolicyTrainer(make_config(shuffle=False), reward_fn=varied_reward, dataset=ROWS).fit()
    assert [rows_of_batch(result.run.path, i) for i in range(4)] == [set(range(3 * i, 3 * i + 3)) for i in range(4)]


def test_the_end_of_the_data_ends_the_run(make_config: Make) -> None:
    """Degenerate batches give no step, so the run gets to the end of the data with steps left."""
    config = make_config(max_steps=None, epochs=1, async_admission="greedy", async_rollout_workers=2)
    result = AsyncPolicyTrainer(config, reward_fn=lambda record: 1.0, dataset=ROWS[:9]).fit()
    assert result.outcome == "completed", result.message
    assert result.train_version == 0
    assert run_end(result.run.path).message == "prompts exhausted"


def test_reasoning_gym_brings_its_own_reward(make_config: Make) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    path = "reasoning-gym:chain_sum?size=6&min_digits=1&max_digits=1&max_terms=2"
    loader = Path(str(make_config().output_dir)).parent / "loader.py"
    loader.write_text(
        "def load_training_dataset(dataset_path, *, default_loader, **_):\n"
        "    # The tiny tokenizer knows digits and a few signs only.\n"
        "    short = lambda row: {'prompt': ''.join(c for c in row['prompt'] if c.isdigit() or c in '+-=')}\n"
        "    return default_loader(dataset_path).map(short)\n"
    )
    config = make_config(dataset_path=path, dataset_loader_fn=str(loader), max_steps=2, entropy_coef=0.01)
    result = AsyncPolicyTrainer(config).fit()
    assert result.outcome == "completed", result.message
    rewards = pq.read_table(result.run.path / "samples")["reward"].to_pylist()
    assert len(rewards) >= 24
    assert all(0.0 <= reward <= 1.0 for reward in rewards)


def test_a_checkpoint_says_where_the_prompts_stood(make_config: Make) -> None:
    config = make_config(max_steps=3, save_interval=1, async_max_staleness=2)
    result = AsyncPolicyTrainer(config, reward_fn=varied_reward, dataset=ROWS[:16]).fit()
    assert result.outcome == "completed", result.message
    served = [
        rows_of_batch(result.run.path, r.batch_id or 0)
        for r in log_of(result.run.path)
        if r.kind is RecordKind.TRANSITION and r.machine == "batch" and r.dest == "trained"
    ]
    for step in (1, 2, 3):
        state = json.loads((result.run.checkpoint(step) / "prompt_source.json").read_text(encoding="utf-8"))
        prepared = prepare(make_config(output_dir=None), reward_fn=varied_reward, dataset=ROWS[:16])
        assert prepared.inputs is not None
        source = prepared.inputs.prompts
        source.load_state_dict(state)
        epoch = [source.batch(i) for i in range(5 - step)]
        left = {row for batch in epoch if batch is not None for row in batch.row_indices}
        assert left.isdisjoint(set().union(*served[:step])), "what was trained on does not come again in the epoch"
