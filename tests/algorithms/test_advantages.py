"""Group-relative advantages."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.algorithms.advantages import ADVANTAGES, group_advantages, mean_centred_advantages


def test_matches_torch_sample_standard_deviation():
    rewards = [[0.0, 1.0, 0.25, 0.5], [2.0, -1.0]]
    for group, got in zip(rewards, group_advantages(rewards), strict=True):
        values = torch.tensor(group, dtype=torch.float64)
        expected = (values - values.mean()) / (values.std() + 1e-4)
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize(("function", "divide"), [(group_advantages, True), (mean_centred_advantages, False)])
def test_both_kinds_against_numpy(function, divide):
    rng = np.random.default_rng(0)
    rewards = [rng.normal(size=n).tolist() for n in (2, 3, 8, 64)]
    for group, got in zip(rewards, function(rewards), strict=True):
        centred = np.array(group) - np.mean(group)
        expected = centred / (np.std(group, ddof=1) + 1e-4) if divide else centred
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)


def test_the_setting_names_these_two():
    assert ADVANTAGES["group"] is group_advantages
    assert ADVANTAGES["none"] is mean_centred_advantages


def test_without_normalising_only_the_mean_is_taken_off():
    assert group_advantages([[1.0, 2.0, 6.0]], normalize_std=False) == ((-2.0, -1.0, 3.0),)


@pytest.mark.parametrize("group", [[0.1] * 3, [1e-300] * 5, [0.0, 0.0], [7.0]])
def test_a_group_without_spread_is_exactly_zero(group):
    assert group_advantages([group]) == ((0.0,) * len(group),)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match=f"sample 1 of prompt group 2 is {bad}"):
        group_advantages([[0.0], [1.0], [0.0, bad]])


def test_groups_do_not_touch_each_other():
    one = group_advantages([[0.0, 1.0]])
    assert group_advantages([[0.0, 1.0], [100.0, 300.0]])[0] == one[0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(group):
    (got,) = group_advantages([group])
    assert abs(sum(got)) < 1e-6
    assert all(
        a <= b
        for a, b in zip(
            *[[got[i] for i in sorted(range(len(group)), key=group.__getitem__)][k:] for k in (0, 1)], strict=False
        )
    )
