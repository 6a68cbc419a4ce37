"""The gradient of one optimiser batch: forward and backward passes over its micro-batches, added up.

Leaves the gradients on the parameters and says what was measured on the way. Takes no step, and knows nothing of
optimisers, schedules or what to do about a value that is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsm_trainer.algorithms.losses import LossFn, LossInputs, LossOutput, LossReport, Normalizers, merge
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.engines.hf_batch import MicroBatch
from fsm_trainer.engines.hf_policy import Policy
from fsm_trainer.engines.hf_reference import FrozenWeights
from fsm_trainer.engines.hf_score import gap_of, gap_sums
from fsm_trainer.engines.logprob_gap import LogprobGap


@dataclass(frozen=True)
class BatchReport:
    """What a batch's passes measured."""

    loss: float
    metrics: LossReport
    """The loss's, and the gap's beside them."""
    gap: LogprobGap
    """Of the rollout's logprobs to those under the current weights."""


def backward(
    policy: Policy,
    batches: Sequence[MicroBatch],
    totals: Normalizers,
    objective: Objective,
    loss: LossFn,
    reference: FrozenWeights | None = None,
) -> BatchReport:
    """Add the gradients of all micro-batches to the parameters'; at least one is needed.

    The proximal policy of decoupled corrections is the model at the start of the step. One batch is one step, so
    that is the model of the pass itself, and the loss takes its logprobs without gradient.
    """
    references: Sequence[Tensor | None] = [None] * len(batches)
    if objective.needs_reference:
        assert reference is not None, "the objective has a KL term but there is no reference"
        references = _frozen_logprobs(policy, batches, reference)
    gaps: list[Tensor] = []
    outputs: list[LossOutput] = []
    for batch, reference_logprobs in zip(batches, references, strict=True):
        logprobs, entropy = policy.logprobs(batch, entropy_gradient=objective.entropy_coef != 0.0)
        inputs = LossInputs(
            logprobs=logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            mask=batch.mask,
            advantages=batch.advantages,
            entropy=entropy,
            reference_logprobs=reference_logprobs,
            spans=batch.spans,
        )
        output = loss(inputs, totals, objective)
        output.loss.backward()  # type: ignore[no-untyped-call]
        outputs.append(output)
        gaps.append(gap_sums(logprobs, batch.rollout_logprobs, batch.mask))
    return _report(outputs, gap_of(gaps, totals.tokens))


def _frozen_logprobs(policy: Policy, batches: Sequence[MicroBatch], frozen: FrozenWeights) -> list[Tensor]:
    with frozen.installed():
        return [policy.logprobs(batch)[0] for batch in batches]


def _report(outputs: list[LossOutput], gap: LogprobGap) -> BatchReport:
    report, tokens = merge(outputs), float(gap.tokens)
    loss = float(torch.stack([output.loss.detach() for output in outputs]).sum())
    gaps = {"logprob_gap": (gap.absolute, tokens), "logprob_gap_signed": (gap.signed, tokens)}
    # A loss of one's own may leave its value out of its metrics.
    rates = {**report.rates, **gaps, "loss": (loss, 1.0)}
    return BatchReport(loss, LossReport(rates, {**report.values, "logprob_gap_max": gap.largest}), gap)
