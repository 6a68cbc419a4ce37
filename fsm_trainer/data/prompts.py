"""Which prompts make up which batch: a pure function of the seed and the batch's number.

It knows nothing of workers: whoever asks for batch `i`, and when, gets the same prompts. Each epoch is shuffled
anew; the rows that do not fill a last batch of an epoch are left out of that epoch, a different few each time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from fsm_trainer.data.datasets import Rows
from fsm_trainer.data.tokenizer import Tokenizer, adds_bos, encode_prompt


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one batch; the tuples are aligned."""

    batch_id: int
    epoch: int
    row_indices: tuple[int, ...]
    """Rows of the dataset, by number."""
    rows: tuple[dict[str, Any], ...]
    prompt_texts: tuple[str, ...]
    prompt_tokens: tuple[tuple[int, ...], ...]


class PromptSource:
    """Prompt batches of a dataset over all epochs. Every prompt is encoded and checked at construction.

    Raises ValueError for a prompt that is too long or empty, and for a dataset smaller than one batch.
    """

    def __init__(
        self, rows: Rows, tokenizer: Tokenizer, *, batch_size: int, epochs: int, seed: int, max_prompt_tokens: int
    ) -> None:
        if len(rows) < batch_size:
            raise ValueError(
                f"--batch-size is {batch_size} but the dataset has {len(rows)} rows, so an epoch would have no whole "
                f"batch; give at most {len(rows)}"
            )
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._epochs = epochs
        self._encoded = _encode_all(rows, tokenizer, max_prompt_tokens)
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one epoch."""
        return len(self._encoded) // self._batch_size

    @property
    def total_batches(self) -> int:
        """Batches over all epochs."""
        return self.batches_per_epoch * self._epochs

    @property
    def dropped_rows_per_epoch(self) -> int:
        """Rows left out of each epoch because they fill no whole batch."""
        return len(self._encoded) % self._batch_size

    def batch(self, batch_id: int) -> PromptBatch | None:
        """Batch number `batch_id` from 0, or None past the last epoch. Safe to call from several threads."""
        assert batch_id >= 0, batch_id
        epoch, position = divmod(batch_id, self.batches_per_epoch)
        if epoch >= self._epochs:
            return None
        start = position * self._batch_size
        indices = tuple(self._epoch_order(epoch)[start : start + self._batch_size])
        return PromptBatch(
            batch_id=batch_id,
            epoch=epoch,
            row_indices=indices,
            rows=tuple(dict(self._rows[i]) for i in indices),
            prompt_texts=tuple(self._encoded[i][0] for i in indices),
            prompt_tokens=tuple(self._encoded[i][1] for i in indices),
        )

    def _epoch_order(self, epoch: int) -> list[int]:
        # One tuple, read and replaced whole, so that two threads at an epoch's border cannot mix two orders.
        known, order = self._order
        if known != epoch:
            order = list(range(len(self._encoded)))
            # A text seed is hashed by SHA-512 inside: unlike `seed + epoch`, no two (seed, epoch) share an order.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return order


def _encode_all(rows: Rows, tokenizer: Tokenizer, max_prompt_tokens: int) -> list[tuple[str, tuple[int, ...]]]:
    bos = adds_bos(tokenizer)
    encoded = []
    for index in range(len(rows)):
        try:
            text, tokens = encode_prompt(tokenizer, rows[index]["prompt"], bos=bos)
        except ValueError as error:
            raise ValueError(f"dataset row {index}: {error}") from error
        if len(tokens) > max_prompt_tokens:
            raise ValueError(
                f"the prompt of dataset row {index} has {len(tokens)} tokens but --max-prompt-tokens is "
                f"{max_prompt_tokens}; raise it or shorten the prompt"
            )
        if not tokens:
            raise ValueError(f"the prompt of dataset row {index} has no tokens; give a text the tokenizer knows")
        encoded.append((text, tokens))
    return encoded
