"""Samples of mixed versions: which of their tokens are old, and how the loss leaves those out.

A load of weights in the middle of a generation makes a sample whose last tokens are drawn by a newer version than its
first. Knows no tensors; what the loss does with old tokens that it keeps is in `corrections.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.core.batch import TrainSequence


def span_ids(sequence: TrainSequence) -> list[int]:
    """For each token of the completion: 0 if the sample's newest version drew it, else its span's number from 1."""
    old = sequence.version_spans[:-1]
    ids = [number for number, (_, tokens) in enumerate(old, start=1) for _ in range(tokens)]
    return ids + [0] * (len(sequence.tokens) - sequence.prompt_len - len(ids))


def in_loss(sequences: Sequence[TrainSequence], objective: Objective) -> Sequence[TrainSequence]:
    """The sequences as the objective counts them: with `span_policy` mask, their old tokens are not in the loss.

    They stay in the context that later tokens are scored with. A sample's newest span is never empty, so none vanishes.
    """
    if objective.span_policy != "mask":
        return sequences
    return [_without_old(sequence) if sequence.version_spans else sequence for sequence in sequences]


def _without_old(sequence: TrainSequence) -> TrainSequence:
    kept = sequence.prompt_len + sequence.old_tokens
    return replace(sequence, loss_mask=(0,) * kept + sequence.loss_mask[kept:])
