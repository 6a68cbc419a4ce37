"""A step on samples of mixed versions under each span policy, against transformers and autograd."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.algorithms.spans import in_loss, span_ids
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.tiny import build_tiny_checkpoint

CAP = 0.4
"""The recorded logprobs are far above the tiny model's, so ratios lie on both sides of it."""


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return str(build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0, hidden=32, heads=2, head_dim=16))


@pytest.fixture
def mixed_batch(ragged_batch):
    """Of every second completion of at least three tokens, the first by one version, the second by another."""
    rows = ragged_batch()
    for index, row in enumerate(rows):
        length = len(row.tokens) - row.prompt_len
        if length >= 3 and index % 2 == 0:
            rows[index] = replace(row, version_spans=((2, 1), (5, 1), (6, length - 2)))
        elif length >= 3:
            rows[index] = replace(row, version_spans=((5, length - 1), (6, 1)))
    return rows


def step(ckpt, rows, objective, **settings):
    """Metrics and gradients of one step from the checkpoint."""
    engine = HFTrainEngine(ckpt, objective=objective, grad_clip_norm=None, **settings)
    engine.start()
    try:
        return engine.train(rows), [p.grad.clone() for p in engine._parameters]
    finally:
        engine.close()


def close(mine, theirs, rtol=1e-4):
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-7)


def by_hand(ckpt, rows, correction):
    """The gradient -w A grad log pi of weights that are worked out span by span."""
    model, loss = AutoModelForCausalLM.from_pretrained(ckpt), 0.0
    tokens = sum(sum(row.loss_mask) for row in rows)
    for row in rows:
        logprobs = torch.log_softmax(model(torch.tensor([row.tokens])).logits[0].double(), -1)
        spans = [0] * row.prompt_len + span_ids(row)
        places = [i for i, wanted in enumerate(row.loss_mask) if wanted]
        ours = {i: logprobs[i - 1, row.tokens[i]] for i in places}
        log_rho = {i: float(ours[i].detach()) - row.logprobs[i] for i in places}
        for i in places:
            together = [log_rho[j] for j in places if spans[j] == spans[i]] if spans[i] else [log_rho[i]]
            rho = torch.tensor(sum(together) / len(together)).exp()
            weight = rho.clamp(max=CAP) if spans[i] or correction == "token-truncate" else rho
            loss = loss - float(weight) * row.advantage * ours[i] / tokens
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("correction", ["token-truncate", "decoupled"])
def test_correct_weighs_each_old_span_by_one_truncated_ratio(ckpt, mixed_batch, correction):
    rows = [row for row in mixed_batch if any(row.loss_mask)]
    objective = Objective(correction=correction, correction_cap=CAP, span_policy="correct")
    result, gradients = step(ckpt, rows, objective)
    close(gradients, by_hand(ckpt, rows, correction), rtol=1e-3)
    assert 0 < result.metrics["span_truncated_fraction"] < 1
    _, kept = step(ckpt, rows, replace(objective, span_policy="keep"))
    assert any(not torch.allclose(mine, other, rtol=1e-3) for mine, other in zip(gradients, kept, strict=True))


def test_however_a_mixed_batch_is_cut_it_is_one_step(ckpt, mixed_batch):
    objective = Objective(correction_cap=CAP, span_policy="correct")
    whole, gradients = step(ckpt, mixed_batch, objective, mini_bs=len(mixed_batch))
    for cut in ({"mini_bs": 1}, {"max_tokens_per_micro_batch": 31, "sequence_packing": "on"}):
        other, same = step(ckpt, mixed_batch, objective, **cut)
        close(same, gradients)
        assert other.metrics["span_truncated_fraction"] == whole.metrics["span_truncated_fraction"]
        assert other.metrics["effective_sample_size"] == pytest.approx(whole.metrics["effective_sample_size"], rel=1e-4)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_mask_is_the_step_on_the_newest_tokens_alone(ckpt, mixed_batch, level):
    """The old tokens stay in the context; they are in no numerator and no denominator."""
    newest = [
        replace(row, loss_mask=(*row.loss_mask[: row.prompt_len], *kept))
        for row in mixed_batch
        for completion in [row.loss_mask[row.prompt_len :]]
        for kept in [[m if span == 0 else 0 for m, span in zip(completion, span_ids(row), strict=True)]]
    ]
    objective = Objective(ratio_level=level, aggregation="sequence-mean")
    masked, gradients = step(ckpt, mixed_batch, replace(objective, span_policy="mask"))
    expected, same = step(ckpt, newest, objective)
    close(gradients, same, rtol=0)
    assert masked.metrics["loss_tokens"] == sum(sum(row.loss_mask) for row in newest)
    assert masked.metrics["loss_tokens"] < sum(sum(row.loss_mask) for row in mixed_batch)
    assert masked.metrics["loss"] == expected.metrics["loss"]


def test_only_mask_takes_tokens_out(mixed_batch):
    assert in_loss(mixed_batch, Objective()) is mixed_batch
    assert in_loss(mixed_batch, Objective(span_policy="correct")) is mixed_batch
    masked = in_loss(mixed_batch, Objective(span_policy="mask"))
    for row, other in zip(mixed_batch, masked, strict=True):
        old = row.prompt_len + row.old_tokens
        assert other.loss_mask == (0,) * old + row.loss_mask[old:]
        assert replace(other, loss_mask=row.loss_mask) == row


@pytest.mark.parametrize("policy", ["mask", "correct"])
def test_samples_of_one_version_take_the_same_step_to_the_bit(ckpt, ragged_batch, policy):
    objective = Objective(correction="token-truncate", correction_cap=CAP)
    kept, gradients = step(ckpt, ragged_batch(), objective)
    other, same = step(ckpt, ragged_batch(), replace(objective, span_policy=policy))
    assert other.metrics["loss"] == kept.metrics["loss"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, same, strict=True))
