"""Asynchronous runs that must equal something to the last bit: the synchronous loop, or themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsm_trainer import AsyncPolicyTrainer, PolicyOnlyTrainer
from fsm_trainer.algorithms.materialize import materialize
from fsm_trainer.config import TrainConfig
from fsm_trainer.data.prompts import PromptSource
from fsm_trainer.data.rewards import RewardRecord
from fsm_trainer.data.tokenizer import load_tokenizer
from fsm_trainer.engines.base import RolloutRequest
from fsm_trainer.trainers.engines import make_train_engine, rollout_engine_factory
from tests.trainers.helpers import ROWS, log_of, rewards_in_order, varied_reward

Make = Callable[..., TrainConfig]
STEPS = 5


def synchronous_loop(config: TrainConfig, checkpoint: Path) -> list[float]:
    """Generate, reward, train, sync, over and over, with nothing of ours but the engines; the mean rewards."""
    assert config.ckpt is not None
    trainer, generator = make_train_engine(config), rollout_engine_factory(config, 0)()
    tokenizer = load_tokenizer(config.ckpt)
    prompts = PromptSource(ROWS, tokenizer, batch_size=3, epochs=10, seed=config.seed, max_prompt_tokens=8)
    trainer.start()
    generator.start()
    means = []
    for step in range(STEPS):
        generator.load_weights(trainer.export(step))
        batch = prompts.batch(step)
        assert batch is not None
        groups = generator.generate(RolloutRequest(step, batch.prompt_tokens, config.seed)).groups
        rewards = [
            [varied_reward(RewardRecord("", "", tokens=[*prompt, *s.tokens])) for s in group]
            for prompt, group in zip(batch.prompt_tokens, groups, strict=True)
        ]
        completions = [[(s.tokens, s.logprobs) for s in group] for group in groups]
        sequences, _ = materialize(batch.prompt_tokens, completions, rewards, eos_token_id=tokenizer.eos_token_id)
        assert trainer.train(sequences).stepped
        means.append(sum(reward for group in rewards for reward in group) / len(sequences))
    trainer.save(str(checkpoint))
    trainer.close()
    generator.close()
    return means


def check_same_weights(a: Path, b: Path) -> None:
    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert first.keys() == second.keys()
    different = [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    assert different == []


@pytest.mark.parametrize("algo", ["async-grpo", "async-gspo"])
@pytest.mark.parametrize("admission", ["paced", "lockstep"])
def test_no_staleness_is_the_synchronous_loop(algo: str, admission: str, make_config: Make, tmp_path: Path) -> None:
    config = make_config(algo=algo, async_admission=admission, async_max_staleness=0, max_steps=STEPS, seed=5)
    means = synchronous_loop(config, tmp_path / "plain")
    result = AsyncPolicyTrainer(config, reward_fn=varied_reward, dataset=ROWS).fit()
    assert result.exit_code == 0
    assert rewards_in_order(result.run.path) == means
    check_same_weights(result.run.checkpoint(STEPS), tmp_path / "plain")


@pytest.mark.parametrize("algo", ["grpo", "gspo"])
def test_the_synchronous_trainer_is_that_loop_too(algo: str, make_config: Make, tmp_path: Path) -> None:
    config = make_config(algo=algo, max_steps=STEPS, seed=5)
    means = synchronous_loop(config, tmp_path / "plain")
    result = PolicyOnlyTrainer(config, reward_fn=varied_reward, dataset=ROWS).fit()
    assert rewards_in_order(result.run.path) == means
    check_same_weights(result.run.checkpoint(STEPS), tmp_path / "plain")


class OddFirst:
    """`varied_reward`, but an even batch is scored only once the odd one after it is being scored."""

    def __init__(self, batches: int) -> None:
        self.begun = [threading.Event() for _ in range(batches)]
        self.order: list[int] = []

    def __call__(self, record: RewardRecord) -> float:
        batch = record.metadata["batch_id"]
        if batch not in self.order:
            if batch % 2 == 0:
                assert self.begun[batch + 1].wait(30), f"batch {batch + 1} was never under way beside {batch}"
            self.order.append(batch)
            self.begun[batch].set()
        return varied_reward(record)


@pytest.mark.parametrize(("staleness", "interval"), [(1, 1), (2, 2), (3, 2)])
def test_lockstep_repeats_to_the_bit_whatever_the_threads_do(
    staleness: int, interval: int, make_config: Make, tmp_path: Path
) -> None:
    def config(name: str) -> TrainConfig:
        return make_config(
            async_admission="lockstep",
            async_rollout_workers=2,
            async_max_staleness=staleness,
            async_sync_interval_steps=interval,
            max_steps=8,
            output_dir=str(tmp_path / name),
        )

    odd_first = OddFirst(8)
    as_it_comes = AsyncPolicyTrainer(config("a"), reward_fn=varied_reward, dataset=ROWS).fit()
    reordered = AsyncPolicyTrainer(config("b"), reward_fn=odd_first, dataset=ROWS).fit()
    assert (as_it_comes.exit_code, reordered.exit_code) == (0, 0), reordered.message
    assert odd_first.order != sorted(odd_first.order), "the batches must really have been scored out of order"
    assert rewards_in_order(as_it_comes.run.path) == rewards_in_order(reordered.run.path)
    check_same_weights(as_it_comes.run.checkpoint(8), reordered.run.checkpoint(8))
    trained = [
        [r.batch_id for r in log_of(result.run.path) if r.machine == "batch" and r.dest == "trained"]
        for result in (as_it_comes, reordered)
    ]
    assert trained == [list(range(8))] * 2
