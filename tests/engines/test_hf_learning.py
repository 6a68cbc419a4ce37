"""The whole cycle on the copy task: rollout, reward, materialise, train, publish, load; the reward rises."""

import math
import random

import torch

from fsm_trainer.algorithms.materialize import materialize
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.engines.base import RolloutRequest, SamplingParams
from fsm_trainer.engines.hf_model import load_tokenizer
from fsm_trainer.engines.hf_rollout import HFRolloutEngine
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.tiny import build_tiny_checkpoint

STEPS = 45


def reward(tokens, target):
    return sum(a == b for a, b in zip(tokens, target, strict=False)) / max(len(tokens), len(target))


def run(ckpt, steps):
    """Return the mean rewards, the metrics and the last weights."""
    tokenizer = load_tokenizer(ckpt)
    rollouts = HFRolloutEngine(ckpt, SamplingParams(n_samples=16, max_new_tokens=5))
    trainer = HFTrainEngine(ckpt, objective=Objective(entropy_coef=0.01), lr=2e-3, weight_decay=0.0, mini_bs=256)
    rollouts.start()
    trainer.start()
    rollouts.load_weights(trainer.export(0))
    generator = random.Random(0)
    means, metrics = [], []
    for step in range(steps):
        texts = ["".join(generator.choices("0123456789", k=4)) for _ in range(16)]
        prompts = tuple(tuple(tokenizer(f"{text}=")["input_ids"]) for text in texts)
        rollout = rollouts.generate(RolloutRequest(step, prompts, seed=0))
        targets = [(*prompt[:-1], tokenizer.eos_token_id) for prompt in prompts]
        rewards = [[reward(s.tokens, t) for s in group] for group, t in zip(rollout.groups, targets, strict=True)]
        groups = [[(s.tokens, s.logprobs) for s in group] for group in rollout.groups]
        sequences, degenerate = materialize(prompts, groups, rewards, eos_token_id=tokenizer.eos_token_id)
        assert not degenerate
        result = trainer.train(sequences)
        trainer.release(step)
        assert rollouts.load_weights(trainer.export(step + 1)).version == result.train_version
        means.append(sum(map(sum, rewards)) / len(sequences))
        metrics.append({name: value for name, value in result.metrics.items() if name != "tokens_per_s"})
    weights = {name: parameter.detach().clone() for name, parameter in trainer._model.named_parameters()}
    trainer.close()
    rollouts.close()
    return means, metrics, weights


def test_the_reward_rises(tmp_path):
    ckpt = str(build_tiny_checkpoint(tmp_path, seed=0))
    means, metrics, weights = run(ckpt, STEPS)
    assert sum(means[:5]) / 5 < 0.1
    assert sum(means[-5:]) / 5 > 0.18
    assert all(math.isfinite(value) for step in metrics for value in step.values())
    assert all(abs(step["ratio_mean"] - 1) < 1e-5 for step in metrics), "on-policy data has ratio one"
    trainer = HFTrainEngine(ckpt)
    trainer.start()
    for name, parameter in trainer._model.named_parameters():
        assert not torch.equal(parameter, weights[name]), f"{name} has not changed"
    trainer.close()


def test_two_runs_are_equal_to_the_bit(tmp_path):
    ckpt = str(build_tiny_checkpoint(tmp_path, seed=0))
    first, second = run(ckpt, 3), run(ckpt, 3)
    assert first[:2] == second[:2]
    assert all(torch.equal(value, second[2][name]) for name, value in first[2].items())
