"""The losses against plain numpy in float64 (numpy_losses.py): values, gradients, metrics, whatever the cut."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fsm_trainer.algorithms.losses import LossInputs, Normalizers, kl_estimate, merge, policy_loss
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.algorithms.registry import get_algorithm
from tests.algorithms.numpy_losses import BAND, CAP, LENGTH, LENGTHS, Batch, Reference

TOTALS = Normalizers(tokens=sum(LENGTHS), sequences=sum(n > 0 for n in LENGTHS))
CORRECTIONS = ["none", "token-truncate", "sequence-truncate", "token-mask", "sequence-mask", "decoupled"]
AGGREGATIONS = ["token-mean", "sequence-mean", "constant"]


def objective(level, surrogate, aggregation, correction, **changes):
    """Clipping ranges that both sides of the batch's ratios reach; a KL and an entropy term."""
    narrow = level == "sequence"
    values = {
        "ratio_level": level,
        "surrogate": surrogate,
        "clip_low": 0.05 if narrow else 0.2,
        "clip_high": 0.08 if narrow else 0.28,
        "aggregation": aggregation,
        "constant_length": LENGTH,
        "entropy_coef": 0.03,
        "kl_coef": 0.1,
        "correction": correction,
        "correction_cap": CAP,
        "correction_band": BAND.get(correction),
    }
    return Objective(**{**values, **changes})


ALL = [
    objective(*pieces)
    for pieces in itertools.product(["token", "sequence"], ["clip", "cispo"], AGGREGATIONS, CORRECTIONS)
]
BY_SPAN = [
    objective("token", *pieces, span_policy="correct")
    for pieces in itertools.product(["clip", "cispo"], AGGREGATIONS, CORRECTIONS)
]
ALL += BY_SPAN


def name(o):
    return f"{o.ratio_level}-{o.surrogate}-{o.aggregation}-{o.correction}" + "-by-span" * (o.span_policy == "correct")


def run(batch, o, rows=slice(None), *, leaves=None, proximal=True, dtype=torch.float64):
    def tensor(values):
        return torch.tensor(values[rows], dtype=dtype)

    logprobs, entropy = leaves or (
        torch.tensor(x, dtype=dtype, requires_grad=True) for x in (batch.logprobs, batch.entropy)
    )
    inputs = LossInputs(
        logprobs=logprobs[rows],
        rollout_logprobs=tensor(batch.rollout),
        mask=tensor(batch.mask),
        advantages=tensor(batch.advantages),
        entropy=entropy[rows],
        reference_logprobs=tensor(batch.reference) if o.needs_reference else None,
        proximal_logprobs=tensor(batch.proximal) if proximal and (o.needs_proximal or o in BY_SPAN) else None,
        spans=torch.tensor(batch.spans[rows]),
    )
    return policy_loss(inputs, TOTALS, o), logprobs, entropy


@pytest.mark.parametrize("o", ALL, ids=name)
def test_loss_gradient_and_metrics_match_the_formulas(o):
    batch = Batch(shift=0.6)
    output, logprobs, entropy = run(batch, o)
    output.loss.backward()
    expected = Reference(batch, o)
    assert output.loss.item() == pytest.approx(expected.loss, rel=1e-10)
    np.testing.assert_allclose(logprobs.grad, expected.gradient, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(entropy.grad, expected.entropy_gradient, rtol=1e-12)
    assert merge([output]).as_floats() == pytest.approx(expected.metrics, rel=1e-9)
    if o.correction in ("none", "decoupled"):
        assert 0 < expected.metrics["clip_fraction_low"] < 1, "the case must reach the clipping below"
        assert 0 < expected.metrics["clip_fraction_high"] < 1, "and above"
    else:
        share = expected.metrics.get("truncated_fraction", expected.metrics.get("masked_fraction"))
        assert 0 < share < 1, "the correction must touch some tokens and not others"
    if o in BY_SPAN:
        assert 0 < expected.metrics["span_truncated_fraction"] < 1, "and so must the cap of the spans"


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_kl_term_of_each_estimator(estimator, aggregation):
    o, batch = objective("token", "clip", aggregation, "none", kl_estimator=estimator, kl_coef=2.0), Batch()
    output, logprobs, _ = run(batch, o)
    output.loss.backward()
    expected = Reference(batch, o)
    assert output.loss.item() == pytest.approx(expected.loss, rel=1e-10)
    np.testing.assert_allclose(logprobs.grad, expected.gradient, rtol=1e-9, atol=1e-14)


def test_the_kl_estimators_are_of_the_divergence():
    """Over all outcomes, weighted by their probability, k1 and k3 are KL(p || q) itself; k2 is near it."""
    rng = np.random.default_rng(1)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (rng.normal(size=9), rng.normal(size=9)))
    exact = float((p * np.log(p / q)).sum())
    log_ratio = torch.tensor(np.log(p / q))
    means = {k: float((torch.tensor(p) * kl_estimate(log_ratio, k)).sum()) for k in ("k1", "k2", "k3")}
    assert means["k1"] == pytest.approx(exact, rel=1e-12)
    assert means["k3"] == pytest.approx(exact, rel=1e-12)
    assert means["k2"] == pytest.approx(float((p * np.log(p / q) ** 2 / 2).sum()), rel=1e-12)
    assert (kl_estimate(log_ratio, "k3") >= 0).all()


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
@pytest.mark.parametrize("o", ALL, ids=name)
def test_micro_batches_add_up_to_the_same_gradient_and_metrics(o, parts):
    batch = Batch()
    whole, logprobs, entropy = run(batch, o)
    whole.loss.backward()
    leaves = tuple(x.detach().clone().requires_grad_() for x in (logprobs, entropy))
    outputs = []
    for rows in np.array_split(np.random.default_rng(3).permutation(len(LENGTHS)), parts):
        output, _, _ = run(batch, o, rows, leaves=leaves)
        output.loss.backward()
        outputs.append(output)
    torch.testing.assert_close(leaves[0].grad, logprobs.grad, rtol=1e-11, atol=1e-15)
    torch.testing.assert_close(leaves[1].grad, entropy.grad, rtol=1e-12, atol=1e-15)
    assert merge(outputs).as_floats() == pytest.approx(merge([whole]).as_floats(), rel=1e-11)


def test_padding_of_another_width_changes_nothing():
    """A micro-batch is as wide as its longest row; the same row in a wider one gives the same."""
    for o in ALL:
        narrow, wide = Batch(), Batch()
        for field in ("mask", "logprobs", "rollout", "proximal", "reference", "entropy", "spans"):
            setattr(wide, field, np.pad(getattr(wide, field), ((0, 0), (0, 4))))
        first, second = run(narrow, o)[0], run(wide, o)[0]
        assert first.loss.item() == pytest.approx(second.loss.item(), rel=1e-13)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo", "dr-grpo", "dapo"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_fresh_batch_has_ratio_one_and_the_same_gradient_under_every_correction(algorithm, correction):
    batch = Batch(shift=0.0)
    objectives = [get_algorithm(algorithm).objective(max_new_tokens=9, correction=c) for c in ("none", correction)]
    (plain, plain_leaf, _), (output, leaf, _) = [run(batch, o, proximal=False, dtype=torch.float32) for o in objectives]
    plain.loss.backward()
    output.loss.backward()
    torch.testing.assert_close(leaf.grad, plain_leaf.grad, rtol=1e-5, atol=1e-7)
    metrics = merge([output]).as_floats()
    for metric in ("ratio_mean", "ratio_min", "ratio_max", "effective_sample_size"):
        assert metrics[metric] == pytest.approx(1.0, abs=1e-5)
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0.0
    assert metrics.get("masked_fraction", 0.0) == metrics.get("truncated_fraction", 0.0) == 0.0


@pytest.mark.parametrize("correction", CORRECTIONS[1:])
def test_without_proximal_logprobs_they_are_the_current_ones(correction):
    """One batch is one step, so at its start the proximal policy is the current one: no second forward pass."""
    batch, o = Batch(), objective("token", "clip", "token-mean", correction)
    batch.proximal = batch.logprobs.copy()
    (given, given_leaf, _), (spared, spared_leaf, _) = run(batch, o), run(batch, o, proximal=False)
    given.loss.backward()
    spared.loss.backward()
    assert given.loss.item() == spared.loss.item()
    torch.testing.assert_close(spared_leaf.grad, given_leaf.grad, rtol=0, atol=0)
    assert float(spared.metrics["clip_fraction_low"][0]) == 0.0, "its own ratio is 1: nothing is clipped"


def test_cispo_in_one_step_is_token_truncation():
    """CISPO's weight is the truncated ratio, so without a lower bound both have the gradient -min(r, C) A."""
    batch = Batch()
    cispo = Objective(surrogate="cispo", clip_low=1.0, clip_high=CAP - 1)
    truncated = Objective(correction="token-truncate", correction_cap=CAP)
    gradients = []
    for o in (cispo, truncated):
        output, logprobs, _ = run(batch, o, proximal=False)
        output.loss.backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


@pytest.mark.parametrize("o", ALL, ids=name)
def test_padding_may_hold_anything(o):
    clean, dirty = Batch(), Batch()
    for field, junk in (("rollout", -np.inf), ("proximal", -np.inf), ("reference", -np.inf), ("entropy", np.nan)):
        getattr(dirty, field)[dirty.mask == 0] = junk
    (first, first_leaf, _), (second, second_leaf, _) = run(clean, o), run(dirty, o)
    first.loss.backward()
    second.loss.backward()
    assert second.loss.item() == first.loss.item()
    torch.testing.assert_close(second_leaf.grad, first_leaf.grad, rtol=0, atol=0)
    assert not second_leaf.grad[torch.tensor(dirty.mask == 0)].any()
    assert merge([second]).as_floats() == merge([first]).as_floats()


def test_clipping_takes_the_gradient_away_on_one_side_only():
    for advantage, shift, clipped in [(1.0, 0.5, "high"), (1.0, -0.5, ""), (-1.0, -0.5, "low"), (-1.0, 0.5, "")]:
        logprobs = torch.tensor([[-1.0]], requires_grad=True)
        inputs = LossInputs(
            logprobs, logprobs.detach() - shift, torch.ones(1, 1), torch.tensor([advantage]), torch.zeros(1, 1)
        )
        output = policy_loss(inputs, Normalizers(1, 1), Objective())
        output.loss.backward()
        assert (logprobs.grad.item() == 0.0) == bool(clipped)
        for side in ("low", "high"):
            assert float(output.metrics[f"clip_fraction_{side}"][0]) == float(clipped == side)


@pytest.mark.parametrize("o", [o for o in ALL if o.aggregation == "token-mean"], ids=name)
def test_an_overflowing_ratio_without_advantage_is_no_nan(o):
    logprobs = torch.tensor([[-0.1, -0.2]], requires_grad=True)
    spans = torch.tensor([[1, 0]])
    far = torch.full((1, 2), -500.0)
    inputs = LossInputs(
        logprobs, far, torch.ones(1, 2), torch.zeros(1), torch.zeros(1, 2), logprobs.detach(), logprobs.detach(), spans
    )
    output = policy_loss(inputs, Normalizers(2, 1), o)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(value) for value in merge([output]).as_floats().values())


@pytest.mark.parametrize("o", BY_SPAN, ids=name)
def test_samples_of_one_version_have_the_same_step_under_every_span_policy(o):
    batch = Batch()
    batch.spans[:] = 0
    outputs = []
    for policy in ("keep", "mask", "correct"):
        output, logprobs, _ = run(batch, replace(o, span_policy=policy), proximal=o.needs_proximal)
        output.loss.backward()
        outputs.append((output.loss.item(), logprobs.grad))
    kept = outputs[0]
    for loss, gradient in outputs[1:]:
        assert loss == kept[0]
        torch.testing.assert_close(gradient, kept[1], rtol=0, atol=0)


def test_one_old_span_by_hand():
    """Ratios 2 and 4.5 to the rollout have the geometric mean 3; under a cap of 2 both tokens weigh 2, the last 1."""
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    rollout = logprobs.detach() - torch.log(torch.tensor([[2.0, 4.5, 1.1]], dtype=torch.float64))
    ones = torch.ones(1, 3, dtype=torch.float64)
    for cap, weight in ((10.0, 3.0), (2.0, 2.0)):
        logprobs.grad = None
        spans = torch.tensor([[1, 1, 0]])
        inputs = LossInputs(logprobs, rollout, ones, ones[:, 0], 0 * ones, spans=spans)
        o = Objective(correction_cap=cap, span_policy="correct", aggregation="sequence-mean")
        output = policy_loss(inputs, Normalizers(3, 1), o)
        output.loss.backward()
        # The newest token keeps the clipped ratio: 1.1 is inside, so its gradient is its own ratio's.
        np.testing.assert_allclose(logprobs.grad, [[-weight / 3, -weight / 3, -1.1 / 3]], rtol=1e-12)
        assert merge([output]).rates["span_truncated_fraction"] == (2.0 * (weight < 3), 3.0)


def test_a_kl_term_without_reference_logprobs_is_a_bug():
    batch, o = Batch(), Objective(kl_coef=0.1)
    inputs = LossInputs(
        *(torch.tensor(x) for x in (batch.logprobs, batch.rollout, batch.mask, batch.advantages, batch.entropy))
    )
    with pytest.raises(AssertionError, match="no reference logprobs"):
        policy_loss(inputs, TOTALS, o)


def test_a_micro_batch_without_a_token_adds_nothing():
    o = objective("sequence", "clip", "sequence-mean", "sequence-mask")
    batch = Batch()
    output, logprobs, _ = run(batch, o, np.array([LENGTHS.index(0)]))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert not logprobs.grad.any()
    rest, _, _ = run(batch, o, np.array([i for i, n in enumerate(LENGTHS) if n]))
    assert merge([output, rest]).as_floats() == pytest.approx(merge([rest]).as_floats())
