"""Our losses against TRL's own code, on the same logprobs: `GRPOTrainer._compute_loss`, value, gradient and metrics.

TRL lives in an environment of its own: `make test-trl`. Everywhere else these tests skip.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fsm_trainer.algorithms.losses import LossInputs, Normalizers, merge, policy_loss
from fsm_trainer.algorithms.objective import Objective
from tests.algorithms.numpy_losses import LENGTHS, Batch

pytest.importorskip("trl", reason="TRL is not installed here; make test-trl runs this in an environment that has it")

LONGEST = 9
ROWS = np.array([i for i, n in enumerate(LENGTHS) if n])
TOTALS = Normalizers(tokens=sum(LENGTHS), sequences=len(ROWS))
CAP, BAND = 1.3, (0.8, 1.4)

# TRL's settings on the left, the objective that says the same on the right.
CASES: dict[str, tuple[dict[str, Any], Objective]] = {
    "grpo": ({"loss_type": "grpo"}, Objective(aggregation="sequence-mean")),
    "bnpo": ({"loss_type": "bnpo"}, Objective(aggregation="token-mean")),
    "dr_grpo": ({"loss_type": "dr_grpo"}, Objective(aggregation="constant", constant_length=LONGEST)),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, Objective(clip_high=0.28)),
    "cispo": (
        # There epsilon_high is the bound of the ratio itself, and there is no lower one.
        {"loss_type": "cispo", "epsilon_high": CAP},
        Objective(surrogate="cispo", clip_low=1.0, clip_high=CAP - 1.0),
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
        Objective(ratio_level="sequence", clip_low=0.05, clip_high=0.08, aggregation="sequence-mean"),
    ),
}
KL = {"beta": 0.1}
CORRECTIONS = ["token-truncate", "sequence-truncate", "token-mask"]


def batch() -> Batch:
    """Rows of ragged lengths, none of them empty: TRL counts empty ones in its means, we do not."""
    found = Batch()
    for field in ("mask", "logprobs", "rollout", "proximal", "reference", "entropy", "advantages"):
        setattr(found, field, getattr(found, field)[ROWS])
    return found


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trl_loss(settings: dict[str, Any], data: Batch, old: Any, is_ratio: torch.Tensor | None) -> Any:
    """TRL's method on a stand-in for its trainer that hands it our logprobs; loss, gradient, metrics."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logprobs = tensor(data.logprobs).requires_grad_()
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, tensor(data.entropy), None),
        accelerator=accelerator,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        model=SimpleNamespace(training=True),
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_vllm=is_ratio is not None,
        vllm_importance_sampling_correction=True,
        _metrics={"train": defaultdict(list)},
    )
    vars(trainer).update(settings)
    width = torch.zeros(data.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": width[:, :1],
        "prompt_mask": width[:, :1],
        "completion_ids": width,
        "completion_mask": tensor(data.mask),
        "advantages": tensor(data.advantages),
        "old_per_token_logps": tensor(old),
        "ref_per_token_logps": tensor(data.reference),
        "num_items_in_batch": torch.tensor(float(TOTALS.tokens)),
        "importance_sampling_ratio": is_ratio,
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def our_loss(objective: Objective, data: Batch) -> Any:
    logprobs = tensor(data.logprobs).requires_grad_()
    inputs = LossInputs(
        logprobs,
        *map(tensor, (data.rollout, data.mask, data.advantages, data.entropy, data.reference, data.proximal)),
    )
    output = policy_loss(inputs, TOTALS, objective)
    output.loss.backward()
    return output.loss.item(), logprobs.grad, merge([output]).as_floats()


def changed(objective: Objective, **fields: Any) -> Objective:
    return Objective(**{**vars(objective), **fields})


@pytest.mark.parametrize("kl", [False, True], ids=["plain", "kl"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_trls(case: str, kl: bool) -> None:
    settings, objective = CASES[case]
    data = batch()
    # Without a correction our ratio is to the rollout's logprobs, which TRL calls old.
    theirs = trl_loss({**settings, **(KL if kl else {})}, data, data.rollout, None)
    ours = our_loss(changed(objective, kl_coef=KL["beta"] if kl else 0.0), data)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-10, atol=1e-14)
    assert ours[2]["entropy"] == pytest.approx(theirs[2]["entropy"], rel=1e-6)
    if kl:
        assert ours[2]["kl"] == pytest.approx(theirs[2]["kl"], rel=1e-6)
    if case != "cispo":
        assert ours[2]["clip_fraction_low"] == pytest.approx(theirs[2]["clip_ratio/low_mean"], rel=1e-6)
        assert ours[2]["clip_fraction_high"] == pytest.approx(theirs[2]["clip_ratio/high_mean"], rel=1e-6)
        assert ours[2]["clip_fraction_low"] + ours[2]["clip_fraction_high"] > 0, "the case must reach the clipping"


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("case", CASES)
def test_corrections_are_trls(case: str, correction: str) -> None:
    """TRL makes the weights while it generates, from old / sampling; its lines are repeated here in the same words."""
    settings, objective = CASES[case]
    data = batch()
    difference = tensor((data.proximal - data.rollout) * data.mask)
    if correction.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if correction.endswith("truncate"):
        ratio = torch.clamp(ratio, max=CAP)
    else:
        ratio = ratio.masked_fill((ratio < BAND[0]) | (ratio > BAND[1]), value=0.0)
    theirs = trl_loss(settings, data, data.proximal, ratio)
    fields = {"correction": correction, "correction_cap": CAP, "correction_band": BAND}
    ours = our_loss(changed(objective, **fields), data)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-10, atol=1e-14)
