"""Amounts that were measured, looked up by what an operation is about: its batch, else its version, else its engine.

An operation that was never measured takes what the nearest of its kind took, because completions grow or shrink as the
policy learns; past the end of the recording its values are gone through backwards, then forwards again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsm_trainer.core.events import Command
from fsm_trainer.engines.fake_behaviour import key_of


class Measured:
    """Seconds (or tokens) by key and engine, of one kind of operation."""

    def __init__(self, by_key: Mapping[tuple[int, int | None], float]) -> None:
        """`by_key` holds at least one amount."""
        assert by_key, "nothing was measured"
        self._by_key = dict(by_key)
        self._on_any = {key: value for (key, _), value in reversed(self._by_key.items())}
        """What the first engine to be asked took; the others serve a batch or version as well as it did."""
        self._keys = sorted(self._on_any)

    def __call__(self, command: Command) -> float:
        """The amount for one command."""
        return self.at(key_of(command), command.engine)

    def at(self, key: int, engine: int | None) -> float:
        """The amount for what was measured, or the nearest to it."""
        found = self._by_key.get((key, engine))
        return self._on_any[self._nearest(key)] if found is None else found

    def _nearest(self, key: int) -> int:
        if key in self._on_any:
            return key
        keys = self._keys
        first, span = keys[0], keys[-1] - keys[0]
        if key > keys[-1] and span:
            past = (key - first) % (2 * span)
            key = first + min(past, 2 * span - past)
        at = bisect_left(keys, key)
        around = keys[max(0, at - 1) : at + 1]
        return min(around, key=lambda known: abs(known - key))


@dataclass(frozen=True)
class Thinned:
    """A long recording in few steps: operation `i` takes what number `picks[i]` took."""

    whole: Measured
    picks: Sequence[int]

    def __call__(self, command: Command) -> float:
        """The amount for one command."""
        key, span = key_of(command), len(self.picks)
        past = key % (2 * span)
        return self.whole.at(self.picks[min(past, 2 * span - 1 - past)], command.engine)


@dataclass(frozen=True)
class Scaled:
    """Another amount, so many times."""

    amount: Measured | Thinned
    factor: float

    def __call__(self, command: Command) -> float:
        """The amount for one command."""
        return self.factor * self.amount(command)


FILLING = 10
"""Steps that are not taken for usual ones: first calls are slower, and the pipeline has to fill."""


def spread(total: int, count: int, blocks: int = 10) -> tuple[int, ...]:
    """`count` of the numbers below `total`: the first `FILLING`, and of the rest `blocks` stretches spread evenly."""
    if count >= total:
        return tuple(range(total))
    assert count >= FILLING + blocks, (count, "is too few to stand for the whole")
    left, wanted = total - FILLING, count - FILLING
    length = -(-wanted // blocks)
    starts = [FILLING + round(i * (left - length) / (blocks - 1)) for i in range(blocks)]
    return (*range(FILLING), *(start + i for start in starts for i in range(length)))[:count]
