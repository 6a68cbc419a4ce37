"""DAPO's length penalty and its choice of groups, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.algorithms.shaping import GroupChoice, OverlongPenalty, choose_groups


@pytest.mark.parametrize(
    ("length", "reward"),
    # Eq. 13 with L_max 20 and L_cache 4: ((20 - 4) - |y|) / 4 between 16 and 20.
    [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1.0), (25, -1.0)],
)
def test_the_penalty_is_the_papers(length, reward):
    assert OverlongPenalty(20, 4).reward(length) == reward
    assert OverlongPenalty(20, 4, penalty=3.0).reward(length) == 3 * reward


def test_the_papers_own_numbers():
    """16384 tokens expected and a cache of 4096: from 16384 on it falls, at 20480 it is -1."""
    penalty = OverlongPenalty(20480, 4096)
    assert [penalty.reward(n) for n in (16384, 18432, 20480)] == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("numbers", [(20, 0), (20, 20), (20, -1), (20, 4, 0.0), (20, 4, float("nan"))])
def test_nonsense_is_refused(numbers):
    with pytest.raises(ValueError, match="expected"):
        OverlongPenalty(*numbers)


@pytest.mark.parametrize(
    ("informative", "wanted", "choice"),
    [
        ([True, False, True, True], 2, GroupChoice((0, 2), 3)),  # a surplus
        ([False, True, False, True], 2, GroupChoice((1, 3), 2)),  # just enough
        ([False, True, False, False], 2, GroupChoice((1,), 1)),  # not enough
        ([False, False, False], 2, GroupChoice((0, 1), 0)),  # none: what the batch would have been
        ([True], 3, GroupChoice((0,), 1)),  # a smaller last batch of an epoch
    ],
)
def test_groups_are_chosen_in_order(informative, wanted, choice):
    assert choose_groups(informative, wanted) == choice


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 20))
def test_no_group_without_a_gradient_takes_the_place_of_one_that_has(informative, wanted):
    choice = choose_groups(informative, wanted)
    assert list(choice.used) == sorted(set(choice.used))
    assert choice.informative == sum(informative)
    assert len(choice.used) == min(wanted, choice.informative or len(informative))
    assert all(informative[i] for i in choice.used) or not any(informative)
