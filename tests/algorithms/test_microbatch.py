"""Cutting a batch into micro-batches."""

import pytest

from fsm_trainer.algorithms.microbatch import micro_batch_slices


@pytest.mark.parametrize(("count", "size", "lengths"), [(8, 4, [4, 4]), (7, 3, [3, 3, 1]), (2, 16, [2]), (0, 4, [])])
def test_every_row_is_in_one_micro_batch(count, size, lengths):
    rows = list(range(count))
    parts = [rows[part] for part in micro_batch_slices(count, size)]
    assert [len(part) for part in parts] == lengths
    assert [row for part in parts for row in part] == rows


@pytest.mark.parametrize("interval", [2, 3, 100, None])
def test_an_interval_that_covers_the_batch_is_fine(interval):
    assert len(micro_batch_slices(8, 4, interval)) == 2


def test_several_optimiser_steps_for_one_batch_are_refused():
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 1 .* has 2 micro-batches of 4"):
        micro_batch_slices(8, 4, 1)


@pytest.mark.parametrize("arguments", [(8, 0, None), (8, 4, 0)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match="expected at least 1"):
        micro_batch_slices(*arguments)
