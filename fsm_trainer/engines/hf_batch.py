"""From train sequences to padded tensors, and from a model's logits to the loss's inputs.

Rows are padded on the right: with causal attention nothing looks at padding, so no attention mask is needed. Knows
nothing of the optimiser or of which loss comes after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsm_trainer.algorithms.losses import LossInputs, Normalizers
from fsm_trainer.core.batch import TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences as tensors. Per-token ones are [rows, width]: the columns from the shortest prompt's end on."""

    input_ids: Tensor
    """[rows, length], whole sequences."""
    targets: Tensor
    rollout_logprobs: Tensor
    mask: Tensor
    advantages: Tensor


def normalizers(sequences: Sequence[TrainSequence]) -> Normalizers:
    """Count what an optimiser batch's loss is divided by."""
    counts = [sum(sequence.loss_mask) for sequence in sequences]
    return Normalizers(tokens=sum(counts), sequences=sum(count > 0 for count in counts))


def pack(sequences: Sequence[TrainSequence], pad: int, device: torch.device) -> MicroBatch | None:
    """Pad sequences to one micro-batch; None when there is no token in the loss."""
    if not any(any(sequence.loss_mask) for sequence in sequences):
        return None
    length = max(len(sequence.tokens) for sequence in sequences)
    first = min(sequence.prompt_len for sequence in sequences)
    ids = torch.tensor([_padded(s.tokens, length, pad) for s in sequences], device=device)
    logprobs = torch.tensor([_padded(s.logprobs, length, 0.0)[first:] for s in sequences], device=device)
    mask = torch.tensor([_padded(s.loss_mask, length, 0)[first:] for s in sequences], device=device)
    return MicroBatch(
        input_ids=ids,
        targets=ids[:, first:],
        rollout_logprobs=logprobs,
        mask=mask.to(logprobs.dtype),
        advantages=torch.tensor([s.advantage for s in sequences], dtype=logprobs.dtype, device=device),
    )


def loss_inputs(model: PreTrainedModel, batch: MicroBatch, *, temperature: float, entropy_gradient: bool) -> LossInputs:
    """Run the model and take the logprobs of the taken tokens, at the temperature they were sampled at."""
    width = batch.targets.shape[1]
    # The logits before a token predict it, so the last token itself is not needed.
    output = model(input_ids=batch.input_ids[:, :-1], use_cache=False, logits_to_keep=width)
    logits = output.logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return LossInputs(
        logprobs=distribution.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1),
        rollout_logprobs=batch.rollout_logprobs,
        mask=batch.mask,
        advantages=batch.advantages,
        entropy=entropy,
    )


def _padded(values: tuple[int, ...] | tuple[float, ...], length: int, fill: float) -> list[float]:
    return [*values, *[fill] * (length - len(values))]
