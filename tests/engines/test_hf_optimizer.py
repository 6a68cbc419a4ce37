"""Optimisers by name."""

import importlib.util

import pytest
import torch

from fsm_trainer.engines.hf_optimizer import check_optimizer, make_optimizer


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((128, 64), (64,))]


def run(name, steps=20, **settings):
    """Fit a quadratic; return parameters and optimiser."""
    ours = parameters()
    target = [torch.full_like(p, 0.5) for p in ours]
    optimizer = make_optimizer(name, ours, **{"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, **settings})
    for _ in range(steps):
        optimizer.zero_grad()
        sum((p - t).square().sum() for p, t in zip(ours, target, strict=True)).backward()
        optimizer.step()
    return [p.detach() for p in ours], optimizer


def test_norms_and_biases_are_not_decayed():
    decays = [group["weight_decay"] for group in run("adamw", steps=0)[1].param_groups]
    assert decays == [0.1, 0.0]
    matrices_only = make_optimizer("adamw", parameters()[:1], lr=1.0, betas=(0.9, 0.9), weight_decay=0.0)
    assert len(matrices_only.param_groups) == 1


def test_eight_bits_are_near_torchs_adamw_and_small():
    pytest.importorskip("bitsandbytes")
    exact, _ = run("adamw")
    rough, optimizer = run("adamw-8bit")
    for one, other, start in zip(exact, rough, parameters(), strict=True):
        moved = torch.linalg.norm(one - start)
        assert torch.linalg.norm(one - other) < 0.1 * moved
    state = [t for t in optimizer.state[optimizer.param_groups[0]["params"][0]].values() if isinstance(t, torch.Tensor)]
    large = sum(t.numel() * t.element_size() for t in state if t.numel() > 1000)
    assert large == 2 * 128 * 64, "one byte for each of two moments"


def test_an_unknown_name_or_a_missing_library_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="optimizer is 'sgd', expected one of adamw, adamw-8bit"):
        check_optimizer("sgd")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    check_optimizer("adamw")
    with pytest.raises(ValueError, match=r"needs the extra 'bitsandbytes': pip install 'fsm-trainer\[bitsandbytes\]'"):
        check_optimizer("adamw-8bit")
