"""The learning rate at every step."""

import pytest
import torch

from fsm_trainer.engines.hf_schedule import LRSchedule


def test_constant_with_warm_up():
    schedule = LRSchedule(1.0, warmup_steps=4)
    assert [schedule.at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_its_minimum_and_stays():
    schedule = LRSchedule(1.0, "linear", decay_steps=4, min_lr=0.2)
    assert [schedule.at(step) for step in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_is_torch_cosine():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.05)
    schedule = LRSchedule(0.5, "cosine", warmup_steps=3, decay_steps=13, min_lr=0.05)
    for step in range(3, 13):
        assert schedule.at(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert schedule.at(100) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": 1.0, "style": "step"}, "constant, linear, cosine"),
        ({"lr": 1.0, "warmup_steps": -1}, "warmup"),
        ({"lr": 1.0, "style": "linear"}, "lr_decay_steps is None"),
        ({"lr": 1.0, "style": "cosine", "decay_steps": 5, "warmup_steps": 5}, "needs more than the 5"),
        ({"lr": 1.0, "style": "linear", "decay_steps": 5, "min_lr": 2.0}, "min_lr is 2.0"),
    ],
)
def test_impossible_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LRSchedule(**arguments)
