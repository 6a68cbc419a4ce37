"""The objective as data: what is refused, and what it needs."""

import math
import subprocess
import sys

import pytest

from fsm_trainer.algorithms.objective import CORRECTIONS, Objective


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ratio_level": "batch"}, "ratio_level is 'batch', expected one of token, sequence"),
        ({"surrogate": "ppo"}, "surrogate is 'ppo', expected one of clip, cispo"),
        ({"aggregation": "mean"}, "aggregation is 'mean', expected one of token-mean, sequence-mean, constant"),
        ({"kl_estimator": "k4"}, "kl_estimator is 'k4', expected one of k1, k2, k3"),
        ({"correction": "tis"}, "correction is 'tis', expected one of none, token-truncate, sequence-truncate"),
        ({"span_policy": "drop"}, "span_policy is 'drop', expected one of keep, mask, correct"),
        (
            {"span_policy": "correct", "ratio_level": "sequence"},
            "span_policy is 'correct', expected 'keep' or 'mask' with the sequence ratio",
        ),
        ({"clip_low": 0.0}, "clip_low is 0.0, expected a positive number"),
        ({"clip_high": math.inf}, "clip_high is inf, expected a positive number"),
        ({"clip_high": math.nan}, "clip_high is nan, expected a positive number"),
        ({"correction_cap": -1.0}, "correction_cap is -1.0, expected a positive number"),
        ({"entropy_coef": -0.1}, "entropy_coef is -0.1, expected a number of at least 0"),
        ({"kl_coef": math.nan}, "kl_coef is nan, expected a number of at least 0"),
        ({"aggregation": "constant"}, "constant_length is None, expected at least 1"),
        ({"aggregation": "constant", "constant_length": 0}, "constant_length is 0, expected at least 1"),
        ({"correction_band": (1.5, 2.0)}, "correction_band is 1.5,2, expected LOW,HIGH with 0 <= LOW < 1 < HIGH"),
        ({"correction_band": (-0.5, 2.0)}, "correction_band is -0.5,2"),
        ({"correction_band": (0.5, 1.0)}, "correction_band is 0.5,1"),
        ({"correction_band": (0.5, math.inf)}, "correction_band is 0.5,inf"),
        ({"correction_band": (math.nan, 2.0)}, "correction_band is nan,2"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole message is compared)
        Objective(**fields)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_what_it_needs():
    assert not Objective().needs_reference
    assert Objective(kl_coef=0.1).needs_reference
    assert [c for c in CORRECTIONS if not Objective(correction=c).needs_proximal] == ["none"]
    assert not Objective().moves_without_advantages
    assert Objective(kl_coef=0.1).moves_without_advantages
    assert Objective(entropy_coef=0.1).moves_without_advantages


def test_each_mask_has_a_band_of_its_own():
    assert Objective(correction="token-mask").band == (0.5, 5.0)
    assert Objective(correction="sequence-mask").band == (0.9, 1.1)
    assert Objective(correction="sequence-mask", correction_band=(0.5, 2.0)).band == (0.5, 2.0)


def test_it_costs_no_torch():
    code = "import sys; from fsm_trainer import Objective; Objective(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
