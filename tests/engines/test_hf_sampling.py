"""The sampling distribution and the draw."""

import numpy as np
import pytest
import torch

from fsm_trainer.engines.base import SamplingParams
from fsm_trainer.engines.hf_sampling import batch_uniforms, check_sampling, draw, filtered, policy_logprobs


def reference(logits, temperature, top_k, top_p):
    """One row, in float64, token by token."""
    weights = np.exp((logits - logits.max()) / temperature)
    probabilities = weights / weights.sum()
    order = list(np.argsort(-probabilities, kind="stable"))
    if top_k > 0:
        order = order[:top_k]
    total = sum(probabilities[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p and kept:
            break
        kept.append(i)
        mass += probabilities[i] / total
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / sum(probabilities[i] for i in kept)
    return result


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(-1, 1.0), (3, 1.0), (-1, 0.6), (5, 0.8), (1, 1.0), (-1, 1e-9), (99, 1.0)]
)
def test_distribution_matches_an_independent_one(temperature, top_k, top_p):
    logits = torch.randn(20, 13, generator=torch.Generator().manual_seed(0)) * 2
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    got = filtered(policy_logprobs(logits, temperature), sampling).exp()
    expected = np.array([reference(row.astype(np.float64), temperature, top_k, top_p) for row in logits.numpy()])
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-6)
    assert ((got.numpy() > 0) == (expected > 0)).all()


def test_greedy_takes_the_best_of_the_untempered_distribution():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    policy = policy_logprobs(logits, 0.0)
    torch.testing.assert_close(policy, torch.log_softmax(logits, -1))
    distribution = filtered(policy, SamplingParams(temperature=0.0, top_k=1))
    assert torch.equal(distribution, policy)
    tokens = draw(distribution, torch.rand(5, dtype=torch.float64), greedy=True)
    assert torch.equal(tokens, logits.argmax(-1))


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0])
    count = 20_000
    # Evenly spread numbers instead of random ones: the counts are exact up to one.
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw(probabilities.log().expand(count, 5), uniforms, greedy=False)
    counts = torch.bincount(tokens, minlength=5)
    assert counts.tolist() == pytest.approx([10_000, 0, 4_000, 6_000, 0], abs=1)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_the_ends_never_draw_a_token_of_probability_zero(uniform):
    logprobs = torch.tensor([[0.0, 0.3, 0.7, 0.0]]).log()
    tokens = draw(logprobs, torch.tensor([uniform], dtype=torch.float64), greedy=False)
    assert tokens.tolist() == [1 if uniform == 0.0 else 2]


def test_uniforms_are_fixed_by_seed_and_batch():
    first = batch_uniforms(1, 2, 4, 3)
    assert torch.equal(first, batch_uniforms(1, 2, 4, 3))
    assert not torch.equal(first, batch_uniforms(1, 3, 4, 3))
    assert not torch.equal(first, batch_uniforms(2, 2, 4, 3))
    # Plain addition of the two would make these equal.
    assert not torch.equal(batch_uniforms(1, 2, 4, 3), batch_uniforms(2, 1, 4, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_samples": 0}, "n_samples"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_parameters_without_a_distribution_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_sampling(SamplingParams(**arguments))
