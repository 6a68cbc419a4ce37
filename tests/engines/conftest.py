"""Batches for the tests of the transformers engines."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fsm_trainer.core.batch import TrainSequence


def make_sequence(rng: random.Random, prompt: int, completion: int, vocabulary: int = 32) -> TrainSequence:
    """Random tokens and logprobs; a token in the middle of a longer completion is masked."""
    length = prompt + completion
    mask = [0] * prompt + [1] * completion
    if completion > 4:
        mask[prompt + 2] = 0
    return TrainSequence(
        tokens=tuple(rng.randrange(3, vocabulary) for _ in range(length)),
        logprobs=tuple(0.0 if i < prompt else -3.0 + rng.random() for i in range(length)),
        prompt_len=prompt,
        loss_mask=tuple(mask),
        advantage=rng.uniform(-1, 1),
        reward=0.0,
    )


@pytest.fixture
def ragged_batch() -> Callable[..., list[TrainSequence]]:
    """Makes sequences of very different lengths, one of them with nothing in the loss."""

    def make(vocabulary: int = 32, seed: int = 0) -> list[TrainSequence]:
        rng = random.Random(seed)
        shapes = [(3, 5), (1, 9), (12, 2), (4, 1), (2, 0), (6, 14), (1, 1), (5, 7), (2, 3)]
        return [make_sequence(rng, *shape, vocabulary=vocabulary) for shape in shapes]

    return make
