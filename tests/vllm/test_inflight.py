"""Weights loaded amid a generation whose cache is kept: what drew each token, and what later prompts find."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from fsm_trainer.engines.base import Sample, Snapshot
from tests.vllm.beside import LIMIT_S, begun, generating, load_amid, stand_still
from tests.vllm.conftest import Engine, Publish, largest_gap, lasting, reference
from tests.vllm.test_weights import PROMPTS, REQUEST, TOLERANCE

BLOCK = 32
"""Tokens of a block of the prefix cache; the prompts are longer than one and shorter than two."""
LONG = {"n_samples": 4, "max_new_tokens": 180}


@pytest.fixture
def make(anywhere: Engine) -> Engine:
    """Makes engines in this process or on the session's server."""
    return lasting(anywhere)


def drawn_over_a_cache(
    models: Sequence[PreTrainedModel], prompt: Sequence[int], sample: Sample, cached: int = 0
) -> list[float]:
    """Transformers' logprobs of a sample's tokens, each by the version stamped on it, over what those before computed.

    A token drawn last before a load is itself computed behind it. `cached` tokens of the prompt are by version 0.
    """
    tokens, cache = (*prompt, *sample.tokens), DynamicCache()
    ends = [len(prompt) - 1 + sum(span.tokens for span in sample.spans[: i + 1]) for i in range(len(sample.spans))]
    parts = [(0, cached)] * bool(cached) + [(span.version, end) for span, end in zip(sample.spans, ends, strict=True)]
    found, start = [], 0
    for version, end in parts:
        with torch.no_grad():
            logits = models[version % 2](
                torch.tensor([tokens[start:end]]), past_key_values=cache, use_cache=True
            ).logits
        found.append(torch.log_softmax(logits[0].double(), dim=-1))
        start = end
    rows = torch.cat(found)[len(prompt) - 1 :]
    return [float(row[token]) for row, token in zip(rows, sample.tokens, strict=True)]


def largest(expected: Sequence[float], got: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(expected, got, strict=True))


def test_what_runs_goes_on_with_the_cache_it_has(make: Engine, publish: Publish, models: list[PreTrainedModel]) -> None:
    rollout = load_amid(make(keep_cache=True, **LONG), publish, REQUEST, newest=2)
    assert (rollout.version_first, rollout.version_last) == (0, 2)
    for prompt, group in zip(PROMPTS, rollout.groups, strict=True):
        for sample in group:
            assert largest(drawn_over_a_cache(models, prompt, sample), sample.logprobs) < TOLERANCE
    # Computed anew, they would be the new weights' own.
    assert largest_gap(models, PROMPTS, rollout) > 100 * TOLERANCE


@pytest.mark.parametrize("keep_cache", [False, True])
def test_no_later_prompt_finds_what_older_weights_computed(
    make: Engine, publish: Publish, models: list[PreTrainedModel], keep_cache: bool
) -> None:
    rollouts = make(keep_cache=keep_cache, **LONG)
    salts: list[str] = []

    def published(version: int) -> Snapshot:
        salts.append(rollouts._salt)
        return publish(version)

    load_amid(rollouts, published, REQUEST, newest=1)
    rollout = rollouts.generate(REQUEST)
    assert (rollout.version_first, rollout.version_last) == (1, 1)
    assert largest_gap(models, PROMPTS, rollout) < TOLERANCE
    # With the salt of the load before, it is there to be found if caches are kept, and dropped if they are not.
    rollouts._salt = salts[-1]
    gap = largest_gap(models, PROMPTS, rollouts.generate(REQUEST))
    assert gap > 100 * TOLERANCE if keep_cache else gap < TOLERANCE


@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_batch_that_waits_for_its_first_token_during_a_load(
    make: Engine, publish: Publish, models: list[PreTrainedModel], keep_cache: bool
) -> None:
    """It finds the old prefix of its prompts, if caches are kept, so it counts as of the version that it began with."""
    rollouts = make(keep_cache=keep_cache, **LONG)
    rollouts.load_weights(publish(0))
    assert rollouts.generate(REQUEST).version_last == 0
    stand_still(rollouts)
    running = generating(rollouts, REQUEST)
    rollouts.load_weights(publish(1))
    rollout = running.result(LIMIT_S)
    assert (rollout.version_first, rollout.version_last) == (0 if keep_cache else 1, 1)
    if not keep_cache:
        assert largest_gap(models, PROMPTS, rollout) < TOLERANCE
        return
    for prompt, group in zip(PROMPTS, rollout.groups, strict=True):
        for sample in group:
            assert [span.version for span in sample.spans] == [1]
            assert largest(drawn_over_a_cache(models, prompt, sample, BLOCK), sample.logprobs) < TOLERANCE


def test_what_is_scored_while_weights_are_loaded_waits_for_them(
    make: Engine, publish: Publish, models: list[PreTrainedModel]
) -> None:
    rollouts = make(n_samples=1, max_new_tokens=1)
    rollouts.load_weights(publish(0))
    stand_still(rollouts)
    scoring = begun(rollouts, partial(rollouts.score, [PROMPTS[0]], 1.0))
    rollouts.load_weights(publish(1))
    scores = scoring.result(LIMIT_S)
    assert scores is not None
    assert scores[0] == pytest.approx(reference(models[1], PROMPTS[0][:1], PROMPTS[0][1:]), abs=TOLERANCE)
