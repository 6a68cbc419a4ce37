"""What the values of several reward functions make of each sample, and what a failed one means for the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import structlog

from fsm_trainer.data.reward_batch import RewardFailure, Value
from fsm_trainer.data.reward_contracts import FunctionInfo
from fsm_trainer.runtime.failures import EngineError

OnError = Literal["fail", "zero", "mask"]
_log = structlog.get_logger("fsm_train")


class RewardError(EngineError):
    """A reward function failed and the run is to fail with it; what it raised is here as text."""


@dataclass(frozen=True)
class Judged:
    """The rewards of one batch."""

    rewards: list[float | None]
    """Weighted sums; None for a sample that no function could score, or that is masked for a failure."""
    by_function: dict[str, list[float | None]]
    """What each function gave, before its weight."""
    metrics: dict[str, float]
    """Counts of what went wrong."""
    message: str | None
    """What went wrong, in one line."""

    def with_function(self, name: str, values: Sequence[float]) -> Judged:
        """The same with one more function's values added to the rewards, with weight 1."""
        rewards = [None if r is None else r + value for r, value in zip(self.rewards, values, strict=True)]
        return replace(self, rewards=rewards, by_function={**self.by_function, name: list(values)})

    @property
    def mean(self) -> float:
        """Mean reward of the samples that have one; NaN if none has."""
        return _mean(self.rewards)


@dataclass
class RewardPolicy:
    """Weights of the functions, and what a failed sample becomes."""

    weights: Sequence[float]
    on_error: OnError = "fail"
    """fail: the run fails. zero: the failed function counts 0 for the sample. mask: the sample is left out."""
    _traced: set[tuple[str, str]] = field(default_factory=set)

    def judge(self, infos: Sequence[FunctionInfo], values: Sequence[Sequence[Value]], batch_id: int) -> Judged:
        """Combine; RewardError if a function failed and that is to fail the run."""
        failures = [
            (info, value)
            for info, column in zip(infos, values, strict=True)
            for value in column
            if isinstance(value, RewardFailure)
        ]
        if failures and self.on_error == "fail":
            raise _error(*failures[0])
        rewards = [self._sum(row) for row in zip(*values, strict=True)]
        messages = [self._tell(info, column, batch_id) for info, column in zip(infos, values, strict=True)]
        by_function = {
            info.name: [None if isinstance(value, RewardFailure) else value for value in column]
            for info, column in zip(infos, values, strict=True)
        }
        timeouts = sum(failure.kind == "timeout" for _, failure in failures)
        metrics = {
            "reward_errors": float(len(failures) - timeouts),
            "reward_timeouts": float(timeouts),
            "reward_unscorable": float(sum(all(value is None for value in row) for row in zip(*values, strict=True))),
        }
        return Judged(rewards, by_function, metrics, "; ".join(filter(None, messages)) or None)

    def _sum(self, row: Sequence[Value]) -> float | None:
        if self.on_error == "mask" and any(isinstance(value, RewardFailure) for value in row):
            return None
        if all(value is None for value in row):
            return None
        known = zip(self.weights, row, strict=True)
        return math.fsum(weight * value for weight, value in known if isinstance(value, float))

    def _tell(self, info: FunctionInfo, column: Sequence[Value], batch_id: int) -> str | None:
        """Log a function's failures in one line, with the traceback of a kind that comes for the first time."""
        failures = [value for value in column if isinstance(value, RewardFailure)]
        if not failures:
            return None
        first = failures[0]
        told = (info.name, first.type) in self._traced
        self._traced.add((info.name, first.type))
        _log.warning(
            "reward_failed",
            function=info.name,
            batch_id=batch_id,
            failed=len(failures),
            samples=len(column),
            outcome=self.on_error,
            first=f"{first.type}: {_shown(first)}",
            **({"exception": first.traceback} if first.traceback and not told else {}),
        )
        return f"{info.name} failed for {len(failures)} of {len(column)} samples: {first.type}: {_shown(first)}"


def _shown(failure: RewardFailure) -> str:
    return f"{failure.message} ({failure.where})" if failure.where else failure.message


def _error(info: FunctionInfo, failure: RewardFailure) -> RewardError:
    where = f"{info.name}, {failure.where}" if failure.where else ""
    return RewardError(failure.type, failure.message, failure.traceback, where)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan
