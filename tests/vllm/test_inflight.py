"""Weights loaded amid a generation whose cache is kept: what drew each token, and what later prompts find."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from fsm_trainer.engines.base import Rollout, RolloutRequest, Sample, SamplingParams
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.vllm_server import vllm_server_engine
from tests.vllm.conftest import MAX_MODEL_LEN, Engine, Publish, largest_gap
from tests.vllm.test_weights import PROMPTS, REQUEST, TOLERANCE

LIMIT_S = 100.0
TRIES = 5
BLOCK = 32
"""Tokens of a block of the prefix cache; the prompts are longer than one and shorter than two."""
LONG = {"n_samples": 4, "max_new_tokens": 180}
Make = Callable[..., VLLMRolloutEngine]


@pytest.fixture(params=["process", "server"])
def make(
    request: pytest.FixtureRequest, engine: Engine, checkpoints: list[Path]
) -> Iterator[Callable[..., VLLMRolloutEngine]]:
    """Makes engines in this process or on the session's server; every completion is as long as it may be."""
    made: list[VLLMRolloutEngine] = []

    def on_server(*, keep_cache: bool, **sampling: Any) -> VLLMRolloutEngine:
        url = request.getfixturevalue("server")[0]
        ckpt, params = str(checkpoints[0]), SamplingParams(**sampling)
        made.append(vllm_server_engine(url, ckpt, params, max_model_len=MAX_MODEL_LEN, keep_cache=keep_cache))
        made[-1]._eos = ()
        made[-1].start()
        return made[-1]

    yield on_server if request.param == "server" else lambda **options: engine(eos=(), **options)
    for each in made:
        each.close()


@contextmanager
def generating(engine: VLLMRolloutEngine, request: RolloutRequest) -> Iterator[list[Rollout]]:
    """A batch that vLLM has been given when the body begins; what comes of it is there when that is through."""
    done: list[Rollout] = []
    thread = threading.Thread(target=lambda: done.append(engine.generate(request)), daemon=True)
    thread.start()
    while not engine._busy:
        assert thread.is_alive()
    for _ in range(3):  # vLLM takes in what it is asked in order, once it is all sent
        engine._call(engine._backend.weight_version())
    yield done
    thread.join(LIMIT_S)
    assert done


def step(engine: VLLMRolloutEngine) -> None:
    """Until vLLM has drawn some tokens more: it does what it is given in order, a part of each at once."""
    for _ in range(3):
        assert engine.score([(4, 5)], 1.0) is not None


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


def test_what_runs_goes_on_with_the_cache_it_has(make: Make, publish: Publish, models: list[PreTrainedModel]) -> None:
    rollouts = make(keep_cache=True, **LONG)
    for _ in range(TRIES):  # on a busy machine the batch may be through before the loads
        rollouts.load_weights(publish(0))
        with generating(rollouts, REQUEST) as done:
            for version in (1, 2):
                step(rollouts)
                rollouts.load_weights(publish(version))
        (rollout,) = done
        if all(len(sample.spans) == 3 for group in rollout.groups for sample in group):
            break
    assert (rollout.version_first, rollout.version_last) == (0, 2)
    for prompt, group in zip(PROMPTS, rollout.groups, strict=True):
        for sample in group:
            assert [span.version for span in sample.spans] == [0, 1, 2]
            assert largest(drawn_over_a_cache(models, prompt, sample), sample.logprobs) < TOLERANCE
    # Computed anew, they would be the new weights' own.
    assert largest_gap(models, PROMPTS, rollout) > 100 * TOLERANCE


@pytest.mark.parametrize("keep_cache", [False, True])
def test_no_later_prompt_finds_what_older_weights_computed(
    make: Make, publish: Publish, models: list[PreTrainedModel], keep_cache: bool
) -> None:
    rollouts = make(keep_cache=keep_cache, **LONG)
    rollouts.load_weights(publish(0))
    with generating(rollouts, REQUEST):
        step(rollouts)
        old = rollouts._salt
        rollouts.load_weights(publish(1))
        rollout = rollouts.generate(REQUEST)
    assert (rollout.version_first, rollout.version_last) == (1, 1)
    assert largest_gap(models, PROMPTS, rollout) < TOLERANCE
    if keep_cache:
        # The same with the salt of the load before, which finds it, and the check above would have said so.
        rollouts._salt = old
        assert largest_gap(models, PROMPTS, rollouts.generate(REQUEST)) > 100 * TOLERANCE


@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_batch_that_waits_for_its_first_token_during_a_load(
    make: Make, publish: Publish, models: list[PreTrainedModel], keep_cache: bool
) -> None:
    """It finds the old prefix of its prompts, if caches are kept, so it counts as of the version that it began with."""
    rollouts = make(keep_cache=keep_cache, **LONG)
    rollouts.load_weights(publish(0))
    assert rollouts.generate(REQUEST).version_last == 0
    rollouts._call(rollouts._backend.pause(clear_cache=False))
    with generating(rollouts, REQUEST) as done:
        rollouts.load_weights(publish(1))
    (rollout,) = done
    assert (rollout.version_first, rollout.version_last) == (0 if keep_cache else 1, 1)
    if not keep_cache:
        assert largest_gap(models, PROMPTS, rollout) < TOLERANCE
        return
    for prompt, group in zip(PROMPTS, rollout.groups, strict=True):
        for sample in group:
            assert [span.version for span in sample.spans] == [1]
            assert largest(drawn_over_a_cache(models, prompt, sample, BLOCK), sample.logprobs) < TOLERANCE
