"""The frozen copy that stands in for the trained weights."""

import pytest
import torch

from fsm_trainer.engines.hf_reference import FrozenWeights


def parameters():
    return [torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0)]


def test_the_copy_stands_in_and_the_weights_come_back():
    ours = parameters()
    frozen = FrozenWeights(ours)
    with torch.no_grad():
        for parameter in ours:
            parameter += 10
    with frozen.installed():
        assert [p.tolist() for p in ours] == [[1, 1], [2, 2]]
        assert not (ours[0] * 2).requires_grad
    assert [p.tolist() for p in ours] == [[11, 11], [12, 12]]
    with pytest.raises(RuntimeError, match="inside"), frozen.installed():
        raise RuntimeError("inside")
    assert [p.tolist() for p in ours] == [[11, 11], [12, 12]]
    assert [t.tolist() for t in frozen.tensors] == [[1, 1], [2, 2]]


@pytest.mark.parametrize(("interval", "refreshed"), [(None, []), (1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3])])
def test_it_is_refreshed_every_so_many_steps(interval, refreshed):
    ours = parameters()
    frozen = FrozenWeights(ours, interval)
    changed = []
    for step in (1, 2, 3, 4):
        with torch.no_grad():
            ours[0] += 1
        before = frozen.tensors[0].clone()
        frozen.after_step(step)
        if not torch.equal(before, frozen.tensors[0]):
            changed.append(step)
            assert torch.equal(frozen.tensors[0], ours[0])
    assert changed == refreshed


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="reference_refresh_steps is 0"):
        FrozenWeights(parameters(), 0)
