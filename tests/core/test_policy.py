"""Staleness and admission rules against brute force."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.core.policy import feasible, is_stale, lockstep_publication, staleness_delta, steps_left


def test_delta_equal_to_the_bound_is_fresh_and_above_is_stale() -> None:
    assert staleness_delta(7, 5) == 2
    assert not is_stale(7, 5, 2)
    assert is_stale(8, 5, 2)
    assert not is_stale(5, 5, 0)


def test_a_rollout_from_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout version 6 is ahead of train version 5"):
        is_stale(5, 6, 1)


@given(st.integers(0, 5), st.lists(st.integers(-1, 9), max_size=5))
def test_feasible_means_some_order_meets_every_deadline(start: int, deadlines: list[int]) -> None:
    some_order = any(all(start + k <= d for k, d in enumerate(order)) for order in permutations(deadlines))
    assert feasible(start, deadlines) == some_order


def test_feasible_does_not_ask_for_deadlines_in_order() -> None:
    assert feasible(0, [1, 0])
    assert feasible(2, [9, 4, 2, 3])
    assert not feasible(0, [1, 0, 1])
    assert not feasible(3, [2])
    assert feasible(7, [])


@given(st.integers(0, 60), st.integers(0, 6), st.integers(1, 6))
def test_lockstep_publication_is_the_formula_and_never_too_stale(i: int, staleness: int, interval: int) -> None:
    k = lockstep_publication(i, staleness, interval)
    assert k == interval * math.ceil(max(0, i - staleness) / interval)
    assert k % interval == 0
    assert i - k <= staleness
    if staleness >= interval - 1:
        assert k <= i, "the publication exists before the batch's turn"


def test_steps_left_counts_what_is_under_way() -> None:
    assert steps_left(None, 1000, 1, 5)
    assert steps_left(5, 2, 1, 1)
    assert not steps_left(5, 2, 1, 2)
