"""Staleness and admission rules as pure functions of numbers; docs/scheduler.md derives them.

Words: `train_version` counts optimiser steps taken; a batch's version is the policy version at its first token (until
its generation starts: the version its engine serves now); its deadline is the last `train_version` at which it may be
consumed.
"""

from __future__ import annotations

from collections.abc import Iterable


def staleness_delta(train_version: int, rollout_version: int) -> int:
    """Optimiser steps between the policy that sampled a batch and the one that trains on it.

    Raises ValueError if the rollout claims a version that training has not reached.
    """
    if rollout_version > train_version:
        raise ValueError(
            f"rollout version {rollout_version} is ahead of train version {train_version}: "
            f"a batch cannot come from weights that do not exist yet"
        )
    return train_version - rollout_version


def is_stale(train_version: int, rollout_version: int, max_staleness: int) -> bool:
    """Whether a batch is past the bound; a delta equal to the bound is fresh."""
    return staleness_delta(train_version, rollout_version) > max_staleness


def feasible(next_version: int, deadlines: Iterable[int]) -> bool:
    """Whether all batches can be consumed in time, one step each, the first at `next_version`.

    Earliest deadline first is optimal for unit jobs (Jackson 1955), so the set is feasible iff in that order the k-th
    batch (from 0) has `next_version + k <= deadline`.
    """
    return all(next_version + k <= deadline for k, deadline in enumerate(sorted(deadlines)))


def lockstep_publication(
    batch_id: int, max_staleness: int, interval: int, *, save_points: int = 0, first: int = 0
) -> int:
    """Publication that must generate batch `batch_id`: the weights after this many consumed batches.

    k(i) = interval * ceil(max(0, i - max_staleness) / interval), but nothing older than the last checkpoint at or
    before i: a run resumed from one has no older weights, and must do what the uninterrupted run did. Checkpoints
    are made after every `save_points` consumed batches (a multiple of `interval`; 0: never) and at `first`, where the
    run began.
    """
    saved = batch_id // save_points * save_points if save_points else 0
    return max(interval * -(-max(0, batch_id - max_staleness) // interval), saved, first)


def steps_left(max_steps: int | None, train_version: int, in_training: int, unconsumed: int) -> bool:
    """Whether one more batch could still give a step: `train_version + in_training + unconsumed < max_steps`."""
    return max_steps is None or train_version + in_training + unconsumed < max_steps
