"""Which prompts make up which batch, and what becomes of the prompts of batches that are not trained on.

Each epoch is a seeded order of its own. Whoever asks gets the prompts that came back first, then fresh ones. A prompt
is served until its batch is settled, or given up after so many attempts: none is lost silently, none is served for
ever. It knows nothing of workers or rewards; it may be asked and told from any thread.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fsm_trainer.data.encoding import Overlong, encode_rows
from fsm_trainer.data.rows import Rows, rows_at
from fsm_trainer.data.source_state import Group, SourceState
from fsm_trainer.data.tokenizer import Tokenizer

_LOADED = sys.maxsize
"""In place of a batch's id: given back to an earlier run, and due after all that this one has served."""


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
    attempt: int = 1
    """How many batches these prompts have been part of in this epoch, this one included."""


class PromptSource:
    """Prompt batches of a dataset over all epochs. Every prompt is encoded and checked at construction.

    Raises ValueError for a prompt that cannot be encoded, for one that is too long where that is an error, and for a
    dataset with no batch in it.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        spare: int = 0,
        epochs: int,
        seed: int,
        max_prompt_tokens: int,
        overlong: Overlong = "drop",
        shuffle: bool = True,
        drop_last: bool = True,
        max_attempts: int = 3,
        thinking: bool = True,
        may_come_back: bool = False,
        name: str = "given as an object",
    ) -> None:
        """`name` is the dataset's, for messages. `spare`: prompts that each batch has on top of `batch_size`.

        `may_come_back`: whether a batch can be given back while the run goes on. Only then is the end of the data
        not the end before every batch is settled.
        """
        self._rows = rows
        self._prompts = encode_rows(rows, tokenizer, max_prompt_tokens, overlong, thinking=thinking, name=name)
        usable = len(self._prompts.indices)
        if drop_last and usable < batch_size + spare:
            and_spare = f" and --oversample-prompts {spare}" if spare else ""
            usable_rows = f"{usable} usable rows" if usable < len(rows) else f"{usable} rows"
            raise ValueError(
                f"--batch-size is {batch_size}{and_spare} but the dataset has {usable_rows}, so "
                f"an epoch would have no whole batch; give at most {usable}, or --no-drop-last"
            )
        self._batch_size, self._epochs, self._seed = batch_size + spare, epochs, seed
        self._shuffle, self._drop_last, self._max_attempts = shuffle, drop_last, max_attempts
        self._may_come_back = may_come_back
        self._order: tuple[int, list[int]] = (-1, [])
        self._changed = threading.Condition()
        self._epoch, self._position = 0, 0
        self._returned: deque[tuple[int, Group]] = deque()
        """To be served again, each with the id of the batch it was last part of."""
        self._outstanding: dict[int, Group] = {}
        self._closed = False
        self._given_up: Counter[str] = Counter()
        self._settled = 0

    @property
    def dataset_rows(self) -> int:
        """Rows of the dataset."""
        return len(self._rows)

    @property
    def usable_rows(self) -> int:
        """Rows whose prompts are not too long."""
        return len(self._prompts.indices)

    @property
    def overlong_rows(self) -> int:
        """Rows left out because their prompts are too long."""
        return len(self._prompts.overlong)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one epoch, a smaller last one included if it is kept."""
        return self._batches_of(self.usable_rows)

    @property
    def total_batches(self) -> int:
        """Batches over all epochs, from the beginning."""
        return self.batches_per_epoch * self._epochs

    @property
    def dropped_rows_per_epoch(self) -> int:
        """Usable rows left out of each epoch because they fill no whole batch."""
        return self.usable_rows % self._batch_size if self._drop_last else 0

    @property
    def batches_left(self) -> int:
        """Batches not served yet, those that came back included."""
        with self._changed:
            later = max(0, self._epochs - self._epoch - 1) * self.batches_per_epoch
            now = self._batches_of(self.usable_rows - self._position) if self._epoch < self._epochs else 0
            return len(self._returned) + now + later

    @property
    def would_wait(self) -> bool:
        """Whether `batch` would have to wait now for what becomes of the batches under way."""
        with self._changed:
            return self._must_wait()

    @property
    def given_up(self) -> dict[str, int]:
        """Prompts that were given up after the last attempt, by the reason of their last batch."""
        with self._changed:
            return dict(self._given_up)

    @property
    def settled(self) -> int:
        """Prompts whose batch was trained on, or had nothing to train on."""
        with self._changed:
            return self._settled

    def batch(self, batch_id: int) -> PromptBatch | None:
        """The prompts of a batch: those that came back first, else the next ones; None when there are no more.

        At the end of the data it waits while a batch is under way that may come back, until that is settled or given
        back, or until `close`. Asked again for a batch under way, it gives the same prompts.
        """
        with self._changed:
            group = self._outstanding.get(batch_id)
            if group is None:
                self._changed.wait_for(lambda: not self._must_wait())
                group = self._take_next()
                if group is None:
                    return None
                self._outstanding[batch_id] = group
        return self._materialise(batch_id, group)

    def first_prompts(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Tokens of the dataset's first usable prompts, whatever the epoch's order; serves nothing."""
        return self._prompts.tokens[:count]

    def settle(self, batch_id: int) -> None:
        """A batch was trained on, or has nothing to be trained on; a batch unknown here is ignored."""
        with self._changed:
            group = self._outstanding.pop(batch_id, None)
            self._settled += len(group.members) if group is not None else 0
            self._changed.notify_all()

    def give_back(self, batch_id: int, reason: str, *, attempted: bool = True) -> tuple[int, ...]:
        """A batch came to nothing: its prompts are served again, or given up after the last attempt.

        Returns the rows given up. `attempted` False does not count it: the prompts had no part in it. Told twice, or
        of a batch unknown here, it does nothing.
        """
        with self._changed:
            group = self._outstanding.pop(batch_id, None)
            self._changed.notify_all()
            if group is None:
                return ()
            if attempted and group.attempts >= self._max_attempts:
                self._given_up[reason] += len(group.members)
                return self._row_numbers(group)
            self._returned.append((batch_id, group if attempted else group.without_attempt()))
            return ()

    def close(self) -> None:
        """Nothing more will be settled or given back that anybody waits for: release whoever waits in `batch`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on later, ready for JSON. Batches under way count as come back, unattempted."""
        with self._changed:
            under_way = ((batch_id, group.without_attempt()) for batch_id, group in self._outstanding.items())
            # By their ids, so that a resumed run binds the prompts to the same ids again.
            groups = [group for _, group in sorted((*self._returned, *under_way), key=lambda pair: pair[0])]
            return SourceState(
                seed=self._seed,
                shuffle=self._shuffle,
                rows=len(self._rows),
                fingerprint=self._prompts.fingerprint,
                epoch=self._epoch,
                position=self._position,
                returned=[replace(group, members=self._row_numbers(group)) for group in groups],
                given_up=dict(self._given_up),
                settled=self._settled,
            ).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. ValueError if that was another dataset, seed or order."""
        found = SourceState.from_dict(state)
        found.check_same(
            seed=self._seed, shuffle=self._shuffle, rows=len(self._rows), fingerprint=self._prompts.fingerprint
        )
        place = {row: i for i, row in enumerate(self._prompts.indices)}
        groups = (replace(group, members=tuple(place[row] for row in group.members)) for group in found.returned)
        with self._changed:
            self._epoch, self._position = found.epoch, found.position
            # The batch size may be another one now.
            self._returned = deque((_LOADED, part) for group in groups for part in group.split(self._batch_size))
            self._outstanding.clear()
            self._given_up = Counter(found.given_up)
            self._settled = found.settled
            self._changed.notify_all()

    def _must_wait(self) -> bool:
        nothing_now = not self._returned and not self._fresh_left()
        return nothing_now and self._may_come_back and bool(self._outstanding) and not self._closed

    def _fresh_left(self) -> bool:
        if self._epoch >= self._epochs:
            return False
        return self._epoch + 1 < self._epochs or self._batches_of(self.usable_rows - self._position) > 0

    def _batches_of(self, prompts: int) -> int:
        return prompts // self._batch_size if self._drop_last else math.ceil(prompts / self._batch_size)

    def _take_next(self) -> Group | None:
        if self._returned:
            return self._returned.popleft()[1].with_attempt()
        while self._epoch < self._epochs:
            if self._batches_of(self.usable_rows - self._position):
                members = self._epoch_order(self._epoch)[self._position : self._position + self._batch_size]
                self._position += len(members)
                return Group(self._epoch, tuple(members), attempts=1)
            self._epoch, self._position = self._epoch + 1, 0
        return None

    def _materialise(self, batch_id: int, group: Group) -> PromptBatch:
        numbers = self._row_numbers(group)
        return PromptBatch(
            batch_id=batch_id,
            epoch=group.epoch,
            row_indices=numbers,
            rows=rows_at(self._rows, numbers),
            prompt_texts=_pick(self._prompts.texts, group.members),
            prompt_tokens=_pick(self._prompts.tokens, group.members),
            attempt=group.attempts,
        )

    def _row_numbers(self, group: Group) -> tuple[int, ...]:
        return _pick(self._prompts.indices, group.members)

    def _epoch_order(self, epoch: int) -> list[int]:
        known, order = self._order
        if known != epoch:
            order = list(range(self.usable_rows))
            if self._shuffle:
                # A text seed is hashed by SHA-512 inside: unlike `seed + epoch`, no two (seed, epoch) share an order.
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return order


def _pick(values: Any, members: Iterable[int]) -> tuple[Any, ...]:
    return tuple(values[i] for i in members)
