"""The samples that a whole run leaves, however its batches end."""

from __future__ import annotations

from collections.abc import Callable

from fsm_trainer.analysis import load_samples
from fsm_trainer.config import TrainConfig
from fsm_trainer.data.rewards import RewardRecord
from fsm_trainer.trainers import AsyncPolicyTrainer
from fsm_trainer.trainers.result import RunResult
from tests.trainers.helpers import ROWS, log_of, varied_reward

Make = Callable[..., TrainConfig]


def run(config: TrainConfig, *rewards: Callable[[RewardRecord], float]) -> RunResult:
    return AsyncPolicyTrainer(config, reward_fn=list(rewards), dataset=ROWS).fit()


def ends(result: RunResult) -> dict[int, tuple[str | None, str | None]]:
    """State and reason of each batch that the log has an end of."""
    moves = [r for r in log_of(result.run.path) if r.machine == "batch" and r.dest]
    ended = [r for r in moves if r.dest in ("trained", "dropped", "failed", "cancelled")]
    return {r.batch_id: (r.dest, r.reason) for r in ended if r.batch_id is not None}


def test_each_batch_with_its_end_and_each_function_with_its_reward(make_config: Make) -> None:
    result = run(make_config(reward_weights="1,0.5"), varied_reward, length)
    frame = load_samples(result.run.path)
    known = ends(result)
    for batch_id, group in frame.groupby("batch_id"):
        assert len(group) == 3 * 4
        state, _ = known[int(batch_id)]  # type: ignore[call-overload]
        assert set(group["state"]) == {state}
    trained = frame[frame["state"] == "trained"]
    assert len(trained) == 4 * 3 * 4
    assert (trained["reward"] == trained["reward_varied_reward"] + 0.5 * trained["reward_length"]).all()
    assert trained.groupby(["batch_id", "row"])["advantage"].sum().abs().max() < 1e-6
    for row in trained.itertuples():
        assert row.prompt == ROWS[row.row]["prompt"]
        assert len(row.tokens) == len(row.logprobs) == row.prompt_len + row.reward_length


def length(record: RewardRecord) -> float:
    return float(sum(record.loss_mask))


def test_the_completions_that_a_reward_function_failed_on_are_kept(make_config: Make) -> None:
    seen: list[str] = []

    def judge(record: RewardRecord) -> float:
        seen.append(record.completion)
        raise KeyError("no such column")

    result = run(make_config(), judge)
    assert (result.outcome, result.exit_code) == ("failed", 1)
    frame = load_samples(result.run.path)
    failed = frame[frame["state"] == "failed"]
    assert len(failed) == 3 * 4
    assert seen
    assert set(seen) <= set(failed["completion"])
    assert failed["reward"].isna().all()
    assert {int(i) for i in frame["batch_id"]} <= set(ends(result))
    assert "open" not in set(frame["state"])


def test_only_the_newest_batches_are_kept(make_config: Make) -> None:
    result = run(make_config(log_samples="2", max_steps=5), varied_reward)
    assert result.exit_code == 0
    kept = sorted(int(path.stem[-6:]) for path in result.run.samples.iterdir())
    frame = load_samples(result.run.path)
    assert sorted(frame["batch_id"].unique()) == kept
    assert len(kept) == 2
    order = [r.batch_id for r in log_of(result.run.path) if r.machine == "batch" and r.dest in ("trained", "cancelled")]
    generated = {r.batch_id for r in log_of(result.run.path) if r.machine == "batch" and r.dest == "generated"}
    assert kept == sorted([i for i in order if i in generated][-2:])
