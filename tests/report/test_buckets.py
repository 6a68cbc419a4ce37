"""Buckets against values worked out by hand and by numpy."""

from __future__ import annotations

import numpy as np
import pytest

from fsm_trainer.report.buckets import by_count, of_steps


def test_few_points_stay_as_they_are() -> None:
    x, y = np.arange(5.0), np.array([3.0, np.nan, 1.0, 4.0, 1.0])
    found = by_count(x, y, 10)
    assert found.x.tolist() == [0, 2, 3, 4]
    assert found.mean.tolist() == found.low.tolist() == found.high.tolist() == [3, 1, 4, 1]
    assert found.size == 1


@pytest.mark.parametrize("count", [101, 1000, 9999])
def test_many_points_keep_range_and_mean(count: int) -> None:
    rng = np.random.default_rng(count)
    x, y = np.arange(float(count)), rng.normal(size=count)
    found = by_count(x, y, 100)
    assert len(found.x) == 100
    parts = [y[i * count // 100 : (i + 1) * count // 100] for i in range(100)]
    assert found.low.tolist() == [p.min() for p in parts]
    assert found.high.tolist() == [p.max() for p in parts]
    np.testing.assert_allclose(found.mean, [p.mean() for p in parts])
    assert found.size == max(map(len, parts))
    # A single spike is not averaged away.
    y[count // 2] = 1e6
    assert by_count(x, y, 100).high.max() == 1e6


def test_nothing_gives_nothing() -> None:
    assert by_count(np.empty(0), np.empty(0), 5).size == 0
    assert len(by_count(np.arange(3.0), np.full(3, np.nan), 5).x) == 0
    assert len(of_steps(np.empty(0), np.empty(0), 10.0, 5).x) == 0


def test_a_step_function_is_weighed_by_time() -> None:
    # 0 until 1 s, 2 until 3 s, 1 until 8 s, then 4 to the end at 10 s; stretches of 2 s.
    found = of_steps(np.array([1.0, 3.0, 8.0]), np.array([2.0, 1.0, 4.0]), 10.0, 5)
    assert found.x.tolist() == [1, 3, 5, 7, 9]
    assert found.mean.tolist() == [1.0, 1.5, 1.0, 1.0, 4.0]
    assert found.low.tolist() == [0, 1, 1, 1, 4]
    assert found.high.tolist() == [2, 2, 1, 1, 4]


def test_a_step_function_of_changes_at_one_moment() -> None:
    found = of_steps(np.array([1.0, 1.0, 1.0]), np.array([5.0, 0.0, 1.0]), 2.0, 2)
    assert found.mean.tolist() == [0.0, 1.0]
    assert found.high.tolist()[1] == 5.0
