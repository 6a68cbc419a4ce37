"""From train sequences to the tensors of one micro-batch, padded or packed.

Padded: one line a sequence, filled up on the right; with causal attention nothing looks at padding, so no attention
mask is needed. Packed: all sequences one behind the other in one line, told apart by positions that start again at 0.
Knows nothing of models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsm_trainer.algorithms.losses import Normalizers
from fsm_trainer.algorithms.spans import span_ids
from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.hf_model import context_length

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences as tensors: what the model reads, where to look for logprobs, and what the loss knows already.

    Per-token tensors of the loss are [rows, width]: one row a sequence, its completion from column 0 on.
    """

    input_ids: Tensor
    """[lines, length], whole sequences but their last token, which predicts nothing that is asked for."""
    position_ids: Tensor | None
    """[1, length] if packed; None if padded, where positions simply count up."""
    sources: Tensor
    """[n], of each token in the loss: where in the flattened input the token before it stands."""
    targets: Tensor
    """[n], the tokens in the loss."""
    places: Tensor
    """[n], of each token in the loss: where in the flattened [rows, width] it belongs."""
    rollout_logprobs: Tensor
    mask: Tensor
    advantages: Tensor
    """[rows]."""
    spans: Tensor | None = None
    """Number of each token's span, see `span_ids`; None where one version drew every sample."""

    def spread(self, values: Tensor) -> Tensor:
        """Put one value for each token in the loss [n] to its place in [rows, width], 0 elsewhere."""
        flat = values.new_zeros(self.mask.numel())
        return flat.scatter(0, self.places, values).view(self.mask.shape)


def normalizers(sequences: Sequence[TrainSequence]) -> Normalizers:
    """Count what an optimiser batch's loss is divided by."""
    counts = [sum(sequence.loss_mask) for sequence in sequences]
    return Normalizers(tokens=sum(counts), sequences=sum(count > 0 for count in counts))


def input_length(sequence: TrainSequence) -> int:
    """Tokens that the model reads of a sequence; 0 if it has none in the loss and is left out."""
    return len(sequence.tokens) - 1 if any(sequence.loss_mask) else 0


def check_sequences(config: PretrainedConfig, sequences: Sequence[TrainSequence]) -> None:
    """Raise ValueError for a sequence that the model cannot read: too long, or with a token it does not have."""
    context, vocabulary = context_length(config), config.get_text_config(decoder=True).vocab_size
    for index, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        if context is not None and length > context:
            raise ValueError(
                f"sequence {index} has {length} tokens but the model has {context} positions; lower max_prompt_tokens "
                f"or max_new_tokens"
            )
        if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < vocabulary:
            raise ValueError(
                f"sequence {index} holds a token outside 0 to {vocabulary - 1}; is the tokenizer the model's own?"
            )


def collate(sequences: Sequence[TrainSequence], pad: int, device: torch.device, *, packed: bool) -> MicroBatch | None:
    """Make one micro-batch of the sequences that have a token in the loss; None when there are none."""
    rows = [sequence for sequence in sequences if any(sequence.loss_mask)]
    if not rows:
        return None
    lengths = [input_length(row) for row in rows]
    if packed:
        starts = [0, *accumulate(lengths)][:-1]
        lines = [[token for row in rows for token in row.tokens[:-1]]]
        positions = torch.tensor([[i for length in lengths for i in range(length)]], device=device)
    else:
        starts = [index * max(lengths) for index in range(len(rows))]
        lines = [
            [*row.tokens[:-1], *[pad] * (max(lengths) - length)] for row, length in zip(rows, lengths, strict=True)
        ]
        positions = None
    width = max(len(row.tokens) - row.prompt_len for row in rows)
    taken = [
        (start + i - 1, row.tokens[i], index * width + i - row.prompt_len)
        for index, (row, start) in enumerate(zip(rows, starts, strict=True))
        for i, wanted in enumerate(row.loss_mask)
        if wanted
    ]
    sources, targets, places = (torch.tensor(column, device=device) for column in zip(*taken, strict=True))
    logprobs = torch.tensor([_padded(row.logprobs[row.prompt_len :], width, 0.0) for row in rows], device=device)
    mask = torch.tensor([_padded(row.loss_mask[row.prompt_len :], width, 0) for row in rows], device=device)
    return MicroBatch(
        input_ids=torch.tensor(lines, device=device),
        position_ids=positions,
        sources=sources,
        targets=targets,
        places=places,
        rollout_logprobs=logprobs,
        mask=mask.to(logprobs.dtype),
        advantages=torch.tensor([row.advantage for row in rows], dtype=logprobs.dtype, device=device),
        spans=_spans(rows, width, device),
    )


def _spans(rows: Sequence[TrainSequence], width: int, device: torch.device) -> Tensor | None:
    if not any(row.version_spans for row in rows):
        return None
    return torch.tensor([_padded(span_ids(row), width, 0) for row in rows], device=device)


def _padded(values: Sequence[int] | Sequence[float], length: int, fill: float) -> list[float]:
    return [*values, *[fill] * (length - len(values))]
