"""Cutting a batch into micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.algorithms.microbatch import plan_by_rows, plan_by_tokens

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


@pytest.mark.parametrize(("count", "size", "sizes"), [(8, 4, [4, 4]), (7, 3, [3, 3, 1]), (2, 16, [2]), (0, 4, [])])
def test_so_many_rows_each(count, size, sizes):
    parts = plan_by_rows([5] * count, size)
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in part] == list(range(count)), "rows of one length keep their order"


def test_like_lengths_come_together_the_longest_first():
    assert plan_by_rows([3, 9, 4, 8, 1], 2) == ((1, 3), (2, 0), (4,))


@pytest.mark.parametrize("interval", [2, 3, 100, None])
def test_an_interval_that_covers_the_batch_is_fine(interval):
    assert len(plan_by_rows([1] * 8, 4, interval)) == 2


def test_several_optimiser_steps_for_one_batch_are_refused():
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 1 .* has 2 micro-batches of 4"):
        plan_by_rows([1] * 8, 4, 1)


@pytest.mark.parametrize("arguments", [(0, None), (4, 0)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match="expected at least 1"):
        plan_by_rows([1] * 8, *arguments)
    with pytest.raises(ValueError, match="expected at least 1"):
        plan_by_tokens([1], 0, packed=True)


@given(LENGTHS, st.integers(40, 120), st.booleans())
def test_every_row_is_in_one_micro_batch_within_the_budget(lengths, budget, packed):
    parts = plan_by_tokens(lengths, budget, packed=packed)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        own = [lengths[row] for row in part]
        assert (sum(own) if packed else max(own) * len(own)) <= budget


@given(LENGTHS, st.integers(40, 120))
def test_packed_micro_batches_are_nearly_full(lengths, budget):
    """First fit never leaves two micro-batches that would go into one."""
    loads = [sum(lengths[row] for row in part) for part in plan_by_tokens(lengths, budget, packed=True)]
    assert all(a + b > budget for i, a in enumerate(loads) for b in loads[i + 1 :])


def test_padded_and_packed_by_hand():
    lengths = [2, 5, 3, 5, 4]
    assert plan_by_tokens(lengths, 10, packed=False) == ((1, 3), (4, 2), (0,))
    assert plan_by_tokens(lengths, 10, packed=True) == ((1, 3), (4, 2, 0))


def test_a_row_that_fits_no_micro_batch_is_refused():
    with pytest.raises(ValueError, match="a sequence has 11 tokens but max_tokens_per_micro_batch is 10"):
        plan_by_tokens([3, 11], 10, packed=True)
