"""The training loss of one micro-batch: any `Objective`, computed on tensors.

A loss is a sum over the micro-batch divided by a count over the whole optimiser batch, so adding the gradients of the
micro-batches gives the gradient of the batch however it is cut. Knows no models, no engines, no optimiser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fsm_trainer.algorithms.corrections import (
    MAX_LOG_RATIO,
    CorrectionWeights,
    correction_weights,
    mixed_weights,
    sequence_mean,
)
from fsm_trainer.algorithms.objective import KLEstimator, Objective


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. Per-token tensors are [rows, width], right-padded; padding has mask 0 and may hold anything.

    Logprobs are natural logarithms at the sampling temperature, of the tokens that were taken.
    """

    logprobs: Tensor
    """Under the current policy; carries the gradient."""
    rollout_logprobs: Tensor
    """Under the policy that generated the tokens, as the rollout recorded them."""
    mask: Tensor
    """1 where a token takes part in the loss; of the logprobs' dtype."""
    advantages: Tensor
    """[rows]."""
    entropy: Tensor
    """Of the current policy at each token; needs a gradient only if it has a coefficient."""
    reference_logprobs: Tensor | None = None
    """Under the reference policy; needed where `Objective.needs_reference`."""
    proximal_logprobs: Tensor | None = None
    """Under the trained weights at the start of the step, used where `Objective.needs_proximal`. None: `logprobs`
    without gradient, which is the same where a batch is one optimiser step."""
    spans: Tensor | None = None
    """Whole numbers: 0 on tokens of each sample's newest version, its older spans count from 1; None: all are 0."""


@dataclass(frozen=True)
class Normalizers:
    """Counts over the whole optimiser batch, all micro-batches together."""

    tokens: int
    """Tokens in the loss; at least 1."""
    sequences: int
    """Sequences with at least one of them; an empty completion does not count."""


@dataclass(frozen=True)
class LossOutput:
    """What a loss gives for one micro-batch. All tensors but `loss` are detached scalars."""

    loss: Tensor
    """Its share of the batch's loss, with gradient: shares add up."""
    metrics: dict[str, tuple[Tensor, float]] = field(default_factory=dict)
    """Numerator (this micro-batch) and denominator (the whole batch): numerators add up."""
    minima: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    weight_sums: Tensor | None = None
    """[2], float64: sum and sum of squares of the importance weights, for the effective sample size."""
    weight_count: int = 0
    """How many weights the whole batch has."""


class LossFn(Protocol):
    """A loss as the registry holds it; `policy_loss` unless an algorithm brings its own."""

    def __call__(self, inputs: LossInputs, normalizers: Normalizers, objective: Objective) -> LossOutput:
        """Compute one micro-batch's share of the loss and of the metrics."""


@dataclass(frozen=True)
class LossReport:
    """The metrics of a whole optimiser batch."""

    rates: dict[str, tuple[float, float]]
    """Numerator and denominator; the metric is their quotient."""
    values: dict[str, float]
    """What is no quotient: least and largest values."""

    def as_floats(self) -> dict[str, float]:
        """Every metric as one number."""
        return {**{name: top / bottom for name, (top, bottom) in self.rates.items()}, **self.values}


@dataclass(frozen=True)
class _Units:
    """Numbers of which each token or each sequence has one."""

    values: Tensor
    counted: Tensor
    """Where there is one, as a boolean of the same shape."""
    total: int
    """How many there are in the whole batch."""

    def only(self, fill: float) -> Tensor:
        """The values, `fill` where there is none."""
        return torch.where(self.counted, self.values, fill)


@dataclass(frozen=True)
class _Surrogate:
    """The policy's part before weights and aggregation; [rows, width], or [rows, 1] for the sequence ratio."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def policy_loss(inputs: LossInputs, normalizers: Normalizers, objective: Objective) -> LossOutput:
    """One micro-batch's share of `aggregate(w * surrogate + kl_coef * KL) - entropy_coef * mean entropy`.

    Without a correction, w = 1 and the surrogate's ratio is current / rollout. With one, the ratio is
    current / proximal and w corrects proximal / rollout (`corrections.correction_weights`). With `span_policy`
    correct, so it is at least on old spans, with a weight of their own (`corrections.mixed_weights`).
    docs/algorithms.md has every formula with its source. AssertionError when the objective needs reference logprobs
    and there are none.
    """
    present, tokens = inputs.mask > 0, float(normalizers.tokens)
    log_ratio = _log_ratio(inputs.logprobs, inputs.rollout_logprobs, present)
    surrogate, correction = _policy_term(inputs, log_ratio, present, objective)
    token_loss = correction.weights * surrogate.loss
    metrics: dict[str, tuple[Tensor, float]] = {}
    if objective.needs_reference:
        assert inputs.reference_logprobs is not None, "the objective has a KL term but no reference logprobs are given"
        kl = kl_estimate(_log_ratio(inputs.logprobs, inputs.reference_logprobs, present), objective.kl_estimator)
        token_loss = token_loss + objective.kl_coef * kl
        metrics["kl"] = (kl.detach().sum(), tokens)
    loss = _aggregate(torch.where(present, token_loss, 0.0), inputs.mask, normalizers, objective)
    entropy = torch.where(present, inputs.entropy, 0.0).sum()
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * entropy / tokens
    metrics |= {"loss": (loss.detach(), 1.0), "entropy": (entropy.detach(), tokens)}
    # k3 of KL(rollout || current), whose samples these are: never negative, low variance.
    metrics["approx_kl"] = ((torch.expm1(log_ratio) - log_ratio).detach().sum(), tokens)
    metrics |= _changed_fractions(correction, present, tokens, objective)
    ratio = _ratio_units(log_ratio.detach(), inputs.mask, normalizers, objective)
    weights = _weight_units(correction, ratio, inputs, normalizers, objective)
    return _output(loss, metrics, ratio, weights, surrogate)


def kl_estimate(log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(current || reference) from log(current / reference) of tokens drawn from current.

    Schulman 2020, "Approximating KL divergence": k1 = log r, k2 = (log r)^2 / 2, k3 = 1/r - 1 + log r with
    r = current / reference. k3 is GRPO's (Shao et al. 2024, eq. 4). k1 as a loss has no gradient in expectation.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1((-log_ratio).clamp(max=MAX_LOG_RATIO)) + log_ratio


def merge(outputs: Sequence[LossOutput]) -> LossReport:
    """The batch's metrics from those of its micro-batches; needs at least one."""
    first = outputs[0]
    rates = {
        name: (float(torch.stack([output.metrics[name][0] for output in outputs]).sum()), denominator)
        for name, (_, denominator) in first.metrics.items()
    }
    sums = [output.weight_sums for output in outputs if output.weight_sums is not None]
    if sums:
        total, squares = torch.stack(sums).sum(dim=0).tolist()
        rates["effective_sample_size"] = (total**2 / squares if squares else 0.0, float(first.weight_count))
    values = {name: float(torch.stack([output.minima[name] for output in outputs]).min()) for name in first.minima}
    values |= {name: float(torch.stack([output.maxima[name] for output in outputs]).max()) for name in first.maxima}
    return LossReport(rates, values)


def _log_ratio(logprobs: Tensor, other: Tensor, present: Tensor) -> Tensor:
    # Selected, not multiplied: padding may hold anything, and 0 times infinity is not 0. Bounded for the same reason:
    # an infinite ratio would make a loss that is not a number of a token without advantage.
    return torch.where(present, logprobs - other, 0.0).clamp(max=MAX_LOG_RATIO)


def _policy_term(
    inputs: LossInputs, log_ratio: Tensor, present: Tensor, objective: Objective
) -> tuple[_Surrogate, CorrectionWeights]:
    """The surrogate and the weights of its tokens; `log_ratio` is current / rollout."""
    spans = _corrected_spans(inputs, objective)
    if not objective.needs_proximal and spans is None:
        log_rho = torch.zeros_like(log_ratio)
        return _surrogate(log_ratio, inputs, objective), correction_weights(log_rho, inputs.mask, objective)
    proximal = (inputs.logprobs if inputs.proximal_logprobs is None else inputs.proximal_logprobs).detach()
    log_rho = _log_ratio(proximal, inputs.rollout_logprobs, present)
    if spans is None:
        surrogate = _surrogate(_log_ratio(inputs.logprobs, proximal, present), inputs, objective)
        return surrogate, correction_weights(log_rho, inputs.mask, objective)
    base = proximal if objective.needs_proximal else torch.where(spans > 0, proximal, inputs.rollout_logprobs)
    surrogate = _surrogate(_log_ratio(inputs.logprobs, base, present), inputs, objective)
    return surrogate, mixed_weights(log_rho, inputs.mask, spans, objective)


def _corrected_spans(inputs: LossInputs, objective: Objective) -> Tensor | None:
    return inputs.spans if objective.span_policy == "correct" else None


def _changed_fractions(
    correction: CorrectionWeights, present: Tensor, tokens: float, objective: Objective
) -> dict[str, tuple[Tensor, float]]:
    """How many tokens the correction, and the truncation of old spans' weights, has changed."""
    fractions: dict[str, tuple[Tensor, float]] = {}
    if objective.correction != "none":
        name = "truncated_fraction" if objective.correction.endswith("truncate") else "masked_fraction"
        fractions[name] = ((correction.changed & present).sum(), tokens)
    if objective.span_policy == "correct":
        capped = torch.zeros_like(present) if correction.capped_spans is None else correction.capped_spans
        fractions["span_truncated_fraction"] = ((capped & present).sum(), tokens)
    return fractions


def _weight_units(
    correction: CorrectionWeights, ratio: _Units, inputs: LossInputs, normalizers: Normalizers, objective: Objective
) -> _Units:
    """The importance weights: the correction's, or without one the ratio current / rollout, but on old spans theirs."""
    if objective.correction != "none":
        return _Units(correction.weights, inputs.mask > 0, normalizers.tokens)
    spans = _corrected_spans(inputs, objective)
    if spans is None:
        return ratio
    return _Units(torch.where(spans > 0, correction.weights, ratio.values), ratio.counted, ratio.total)


def _surrogate(log_ratio: Tensor, inputs: LossInputs, objective: Objective) -> _Surrogate:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) or CISPO's (MiniMax-M1 2025, eq. 4 and 5), negated."""
    if objective.ratio_level == "sequence":
        log_ratio = sequence_mean(log_ratio, inputs.mask)
    ratio, advantages = log_ratio.exp(), inputs.advantages.unsqueeze(-1)
    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    below, above = ratio < low, ratio > high
    if objective.surrogate == "cispo":
        loss = -ratio.clamp(low, high).detach() * advantages * inputs.logprobs
        return _Surrogate(loss, below, above)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return _Surrogate(loss, below & (advantages < 0), above & (advantages > 0))


def _ratio_units(log_ratio: Tensor, mask: Tensor, normalizers: Normalizers, objective: Objective) -> _Units:
    """The ratio current / rollout at the objective's level."""
    if objective.ratio_level == "token":
        return _Units(log_ratio.exp(), mask > 0, normalizers.tokens)
    counted = (mask > 0).any(dim=-1, keepdim=True)
    return _Units(sequence_mean(log_ratio, mask).exp(), counted, normalizers.sequences)


def _aggregate(token_loss: Tensor, mask: Tensor, normalizers: Normalizers, objective: Objective) -> Tensor:
    """From the tokens' losses, 0 outside the mask, to the micro-batch's share of the batch's loss."""
    if objective.aggregation == "token-mean":
        return token_loss.sum() / normalizers.tokens
    if objective.aggregation == "sequence-mean":
        return sequence_mean(token_loss, mask).sum() / normalizers.sequences
    assert objective.constant_length is not None
    return token_loss.sum() / (normalizers.sequences * objective.constant_length)


@torch.no_grad()
def _output(
    loss: Tensor, metrics: dict[str, tuple[Tensor, float]], ratio: _Units, weights: _Units, surrogate: _Surrogate
) -> LossOutput:
    """Add what is measured on the ratio current / rollout, of tokens or of sequences as the objective has it."""
    units = float(ratio.total)
    metrics["ratio_mean"] = (ratio.only(0.0).sum(), units)
    metrics["clip_fraction_low"] = ((surrogate.clipped_low & ratio.counted).sum(), units)
    metrics["clip_fraction_high"] = ((surrogate.clipped_high & ratio.counted).sum(), units)
    used = weights.only(0.0).double()
    return LossOutput(
        loss=loss,
        metrics=metrics,
        minima={"ratio_min": ratio.only(torch.inf).min()},
        maxima={"ratio_max": ratio.only(-torch.inf).max()},
        weight_sums=torch.stack([used.sum(), used.square().sum()]),
        weight_count=weights.total,
    )
