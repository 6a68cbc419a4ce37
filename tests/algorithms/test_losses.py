"""The losses, against plain numpy in float64 written from the papers' formulas."""

import math

import numpy as np
import pytest
import torch

from fsm_trainer.algorithms.losses import LossInputs, Normalizers, grpo_loss, gspo_loss

LENGTHS = (3, 7, 1, 5, 0, 2, 7)
VOCAB = 11


class Batch:
    """Logits, actions and masks of ragged rows; the rollout's logprobs differ from the current ones by `shift`."""

    def __init__(self, shift: float, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        rows, width = len(LENGTHS), max(LENGTHS)
        self.logits = rng.normal(size=(rows, width, VOCAB))
        self.actions = rng.integers(VOCAB, size=(rows, width))
        self.mask = np.array([[float(t < n) for t in range(width)] for n in LENGTHS])
        self.advantages = rng.normal(size=rows)
        self.distribution = self.logits - np.log(np.exp(self.logits).sum(-1, keepdims=True))
        self.logprobs = np.take_along_axis(self.distribution, self.actions[..., None], -1)[..., 0]
        self.rollout = self.logprobs + shift * rng.normal(size=(rows, width))

    def run(self, loss, rows, *, low, high, entropy_coef=0.0, dtype=torch.float64, logits=None):
        if logits is None:
            logits = torch.tensor(self.logits, dtype=dtype, requires_grad=True)
        distribution = torch.log_softmax(logits[rows], dim=-1)
        actions = torch.tensor(self.actions[rows])
        inputs = LossInputs(
            logprobs=distribution.gather(-1, actions.unsqueeze(-1)).squeeze(-1),
            rollout_logprobs=torch.tensor(self.rollout[rows], dtype=dtype),
            mask=torch.tensor(self.mask[rows], dtype=dtype),
            advantages=torch.tensor(self.advantages[rows], dtype=dtype),
            entropy=-(distribution.exp() * distribution).sum(-1),
        )
        totals = Normalizers(tokens=sum(LENGTHS), sequences=sum(n > 0 for n in LENGTHS))
        return loss(inputs, totals, clip_low=low, clip_high=high, entropy_coef=entropy_coef), logits


def reference_entropy(batch):
    return [[-sum(math.exp(p) * p for p in batch.distribution[r, t]) for t in range(n)] for r, n in enumerate(LENGTHS)]


def reference_grpo(batch, low, high, entropy_coef):
    terms, ratios, clipped, kl = [], [], [], []
    for r, n in enumerate(LENGTHS):
        for t in range(n):
            ratio = math.exp(batch.logprobs[r, t] - batch.rollout[r, t])
            advantage = batch.advantages[r]
            plain, bounded = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
            terms.append(min(plain, bounded))
            ratios.append(ratio)
            clipped.append(bounded < plain)
            kl.append(ratio - 1 - math.log(ratio))
    entropy = np.mean([value for row in reference_entropy(batch) for value in row])
    loss = -np.mean(terms) - entropy_coef * entropy
    return (
        loss,
        {
            "ratio_mean": np.mean(ratios),
            "clip_fraction": np.mean(clipped),
            "entropy": entropy,
            "approx_kl": np.mean(kl),
        },
        max(ratios),
    )


def reference_gspo(batch, low, high, entropy_coef):
    terms, ratios, clipped = [], [], []
    for r, n in enumerate(LENGTHS):
        if n == 0:
            continue
        ratio = math.prod(math.exp(batch.logprobs[r, t] - batch.rollout[r, t]) for t in range(n)) ** (1 / n)
        advantage = batch.advantages[r]
        plain, bounded = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
        terms.append(min(plain, bounded))
        ratios.append(ratio)
        clipped.append(bounded < plain)
    _, token_metrics, _ = reference_grpo(batch, low, high, 0.0)
    loss = -np.mean(terms) - entropy_coef * token_metrics["entropy"]
    return loss, {**token_metrics, "ratio_mean": np.mean(ratios), "clip_fraction": np.mean(clipped)}, max(ratios)


CASES = [(grpo_loss, reference_grpo, 0.2, 0.28), (gspo_loss, reference_gspo, 0.05, 0.08)]


@pytest.mark.parametrize(("loss", "reference", "low", "high"), CASES)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.03])
def test_loss_and_metrics_match_the_formulas(loss, reference, low, high, entropy_coef):
    batch = Batch(shift=0.3)
    output, _ = batch.run(loss, slice(None), low=low, high=high, entropy_coef=entropy_coef)
    expected, metrics, ratio_max = reference(batch, low, high, entropy_coef)
    np.testing.assert_allclose(output.loss.item(), expected, rtol=1e-10)
    assert {name: pytest.approx(float(n) / d, rel=1e-10) for name, (n, d) in output.metrics.items()} == metrics
    assert output.ratio_max.item() == pytest.approx(ratio_max, rel=1e-10)
    assert 0 < metrics["clip_fraction"] < 1, "the case must reach both sides of the clipping"


@pytest.mark.parametrize(("loss", "reference", "low", "high"), CASES)
def test_gradient_matches_finite_differences_of_the_formulas(loss, reference, low, high):
    batch = Batch(shift=0.3)
    output, logits = batch.run(loss, slice(None), low=low, high=high, entropy_coef=0.03)
    output.loss.backward()
    step = 1e-6
    for place in [(0, 0, 1), (1, 6, 4), (3, 2, 9), (6, 0, 0)]:
        values = []
        for sign in (1, -1):
            moved = Batch(shift=0.3)
            moved.logits[place] += sign * step
            moved.distribution = moved.logits - np.log(np.exp(moved.logits).sum(-1, keepdims=True))
            moved.logprobs = np.take_along_axis(moved.distribution, moved.actions[..., None], -1)[..., 0]
            moved.rollout = batch.rollout
            values.append(reference(moved, low, high, 0.03)[0])
        numeric = (values[0] - values[1]) / (2 * step)
        assert logits.grad[place].item() == pytest.approx(numeric, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("loss", "reference", "low", "high"), CASES)
@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_micro_batches_add_up_to_the_same_gradient_and_metrics(loss, reference, low, high, parts):
    batch = Batch(shift=0.3)
    _, logits = batch.run(loss, slice(None), low=low, high=high)
    whole, whole_logits = batch.run(loss, slice(None), low=low, high=high, entropy_coef=0.03)
    whole.loss.backward()
    outputs = []
    for rows in np.array_split(np.arange(len(LENGTHS)), parts):
        output, _ = batch.run(loss, rows, low=low, high=high, entropy_coef=0.03, logits=logits)
        output.loss.backward()
        outputs.append(output)
    torch.testing.assert_close(logits.grad, whole_logits.grad, rtol=1e-12, atol=1e-15)
    for name, (numerator, denominator) in whole.metrics.items():
        assert {output.metrics[name][1] for output in outputs} == {denominator}
        assert sum(float(output.metrics[name][0]) for output in outputs) == pytest.approx(float(numerator))


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss])
def test_a_fresh_batch_has_ratio_one_and_a_stale_one_has_not(loss):
    fresh, _ = Batch(shift=0.0).run(loss, slice(None), low=0.2, high=0.2, dtype=torch.float32)
    stale, _ = Batch(shift=0.3).run(loss, slice(None), low=0.2, high=0.2, dtype=torch.float32)
    ratio = {name: float(n) / d for name, (n, d) in fresh.metrics.items()}
    assert ratio["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert fresh.ratio_max.item() == pytest.approx(1.0, abs=1e-5)
    assert ratio["clip_fraction"] == 0.0
    assert ratio["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert stale.ratio_max.item() > 1.1
    assert float(stale.metrics["approx_kl"][0]) / stale.metrics["approx_kl"][1] > 0.01


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss])
def test_padding_may_hold_anything(loss):
    batch = Batch(shift=0.3)
    clean, clean_logits = batch.run(loss, slice(None), low=0.2, high=0.2, entropy_coef=0.03)
    clean.loss.backward()
    batch.rollout[batch.mask == 0] = -np.inf
    dirty, dirty_logits = batch.run(loss, slice(None), low=0.2, high=0.2, entropy_coef=0.03)
    dirty.loss.backward()
    assert dirty.loss.item() == clean.loss.item()
    torch.testing.assert_close(dirty_logits.grad, clean_logits.grad, rtol=0, atol=0)
    assert not dirty_logits.grad[batch.mask == 0].any()


def test_clipping_takes_the_gradient_away_on_one_side_only():
    for advantage, shift, clipped in [(1.0, 0.5, True), (1.0, -0.5, False), (-1.0, -0.5, True), (-1.0, 0.5, False)]:
        logprobs = torch.tensor([[-1.0]], requires_grad=True)
        inputs = LossInputs(
            logprobs, logprobs.detach() - shift, torch.ones(1, 1), torch.tensor([advantage]), torch.zeros(1, 1)
        )
        output = grpo_loss(inputs, Normalizers(1, 1), clip_low=0.2, clip_high=0.2)
        output.loss.backward()
        assert (logprobs.grad.item() == 0.0) == clipped
        assert float(output.metrics["clip_fraction"][0]) == float(clipped)


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss])
def test_an_overflowing_ratio_without_advantage_is_no_nan(loss):
    logprobs = torch.tensor([[-0.1, -0.2]], requires_grad=True)
    inputs = LossInputs(logprobs, torch.full((1, 2), -500.0), torch.ones(1, 2), torch.zeros(1), torch.zeros(1, 2))
    output = loss(inputs, Normalizers(2, 1), clip_low=0.2, clip_high=0.2)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert torch.isfinite(logprobs.grad).all()
