"""Gaps between logprobs: the sums by hand, the limits, and what the train engine does past them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.hf_score import gap_of, gap_sums
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.logprob_gap import GapLimit, LogprobGap, LogprobMismatch
from fsm_trainer.engines.tiny import build_tiny_checkpoint


def test_sums_by_hand():
    gap = LogprobGap.between([(-1.0, -2.0), (), (-0.5,)], [(-1.5, -1.75), (), (-0.5,)])
    assert (gap.tokens, gap.absolute, gap.signed, gap.largest) == (3, 0.75, 0.25, 0.5)
    assert gap.mean == 0.25
    assert str(gap) == "mean |difference| 0.25, largest 0.5, over 3 tokens"
    assert LogprobGap.between([], []).mean == 0.0


def test_other_shapes_are_no_gap():
    with pytest.raises(ValueError, match=r"rows of \[2\] tokens and the rollout engine \[1\]"):
        LogprobGap.between([(-1.0, -2.0)], [(-1.0,)])


@pytest.mark.parametrize(
    ("gap", "fits"),
    [
        (LogprobGap(100, 10.0, 0.0, 2.5), True),
        (LogprobGap(100, 10.5, 0.0, 2.5), False),
        (LogprobGap(100, 10.0, 0.0, 2.6), False),
        (LogprobGap(2, math.nan, 0.0, 0.1), False),
        (LogprobGap.between([(math.nan, -1.0)], [(-1.0, -1.0)]), False),
        (LogprobGap.between([(-math.inf,)], [(-1.0,)]), False),
    ],
)
def test_mean_and_single_token_have_a_limit_each(gap, fits):
    assert GapLimit(0.1).admits(gap) is fits


def test_micro_batches_add_up_to_the_gap_of_the_batch():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=(2, 6, 5))
    mask = (rng.random((6, 5)) < 0.6).astype(float)
    poisoned = torch.tensor(np.where(mask > 0, theirs, np.nan))
    parts = [
        gap_sums(torch.tensor(ours)[rows], poisoned[rows], torch.tensor(mask)[rows])
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    gap = gap_of(parts, int(mask.sum()))
    difference = (ours - theirs)[mask > 0]
    assert gap.tokens == len(difference)
    assert (gap.absolute, gap.signed) == pytest.approx((np.abs(difference).sum(), difference.sum()))
    assert gap.largest == pytest.approx(np.abs(difference).max())


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return str(build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0, hidden=32, heads=2, head_dim=16))


@pytest.fixture
def engine(ckpt):
    engine = HFTrainEngine(ckpt, lr=1e-2, weight_decay=0.0, mini_bs=1, temperature=0.7)
    engine.start()
    yield engine
    engine.close()


def fresh_batch(ckpt: str) -> list[TrainSequence]:
    """Two sequences whose rollout logprobs a plain forward of transformers gives, at temperature 0.7."""
    model = AutoModelForCausalLM.from_pretrained(ckpt)
    batch = []
    for tokens, prompt_len, advantage in (((5, 6, 7, 8, 9), 3, 1.0), ((10, 11, 12, 2), 1, -0.5)):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1] / 0.7, -1)
        taken = [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]
        mask = (0,) * prompt_len + (1,) * (len(tokens) - prompt_len)
        own = (*(0.0,) * prompt_len, *taken[prompt_len - 1 :])
        batch.append(TrainSequence(tokens, own, prompt_len, mask, advantage, 0.0))
    return batch


def moved(sequence: TrainSequence, by: float) -> TrainSequence:
    """The same with its first completion token's logprob elsewhere."""
    at = sequence.prompt_len
    logprobs = list(sequence.logprobs)
    logprobs[at] += by
    return replace(sequence, logprobs=tuple(logprobs))


def test_a_fresh_batch_passes_and_its_gap_is_a_metric(engine, ckpt):
    result = engine.train(fresh_batch(ckpt), GapLimit(1e-4))
    assert result.stepped
    assert abs(result.metrics["ratio_mean"] - 1.0) < 1e-4
    assert result.metrics["logprob_gap"] < 1e-5
    assert result.rates["logprob_gap"][1] == 5
    numerator, denominator = result.rates["logprob_gap_signed"]
    assert result.metrics["logprob_gap_signed"] == numerator / denominator


def test_past_the_limit_no_step_is_taken_and_no_gradient_is_left(engine, ckpt):
    first, second = fresh_batch(ckpt)
    before = [parameter.detach().clone() for parameter in engine._model.parameters()]
    numbers = r"mean \|difference\| 0\.1, largest 0\.5, over 5 tokens; the limit is mean 0\.05"
    with pytest.raises(LogprobMismatch, match=numbers) as raised:
        engine.train([first, moved(second, 0.5)], GapLimit(0.05))
    assert raised.value.gap.signed == pytest.approx(-0.5, abs=1e-4)
    for old, parameter in zip(before, engine._model.parameters(), strict=True):
        assert torch.equal(old, parameter)
        assert parameter.grad is None
    result = engine.train([first, moved(second, 0.5)])
    assert (result.stepped, result.train_version) == (True, 1), "without a limit it is only measured"
    assert result.metrics["logprob_gap_max"] == pytest.approx(0.5, abs=1e-4)


def test_the_trainer_scores_with_its_current_weights(engine, ckpt):
    rows = [(5, 6, 7, 8, 9), (10, 11)]
    model = AutoModelForCausalLM.from_pretrained(ckpt)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([rows[0]])).logits[0, :-1], -1)
    scores = engine.score(rows, 1.0)
    assert scores[0] == pytest.approx([float(expected[i, t]) for i, t in enumerate(rows[0][1:])], abs=1e-5)
    engine.train(fresh_batch(ckpt))
    assert engine.score(rows, 1.0)[0] != pytest.approx(scores[0], abs=1e-3)
