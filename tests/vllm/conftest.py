"""One vLLM for all tests of this folder: it takes 20 seconds to start. `make test-vllm` has the environment for it."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsm_trainer.engines.base import Rollout, SamplingParams, Snapshot
from fsm_trainer.engines.tiny import build_tiny_checkpoint
from fsm_trainer.engines.vllm_local import vllm_engine
from fsm_trainer.engines.vllm_requests import Tags, logprobs_mode
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.vllm_server import vllm_server_engine
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from tests.vllm.beside import LIMIT_S, go_on

MAX_MODEL_LEN = 224
HERE = Path(__file__).parent
Engine = Callable[..., VLLMRolloutEngine]
Publish = Callable[[int], Snapshot]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vLLM these tests are skipped, visibly."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: make test-vllm"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same model with two sets of weights."""
    folder = tmp_path_factory.mktemp("tiny")
    return [build_tiny_checkpoint(folder / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="session")
def models(checkpoints: list[Path]) -> list[PreTrainedModel]:
    """Transformers' own model of each: what logprobs are held against. Version v has the weights v modulo 2."""
    return [AutoModelForCausalLM.from_pretrained(path) for path in checkpoints]


@pytest.fixture(scope="session")
def publish(models: list[PreTrainedModel]) -> Iterator[Publish]:
    transport = SharedMemoryTransport()
    yield lambda version: transport.publish(models[version % 2].state_dict().items(), version)
    transport.close()


@pytest.fixture(scope="session")
def started(checkpoints: list[Path]) -> Iterator[Callable[[SamplingParams], VLLMRolloutEngine]]:
    """The session's vLLM for some sampling: which logprobs it gives is settled when it starts, so there are two."""
    engines: dict[str, VLLMRolloutEngine] = {}

    def get(sampling: SamplingParams) -> VLLMRolloutEngine:
        mode = logprobs_mode(sampling)
        if mode not in engines:
            # The smallest blocks that vLLM has on a CPU, so that short prompts are cached too.
            engines[mode] = vllm_engine(
                str(checkpoints[0]), sampling, max_model_len=MAX_MODEL_LEN, engine_args={"block_size": 32}
            )
            engines[mode].start()
        return engines[mode]

    yield get
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="session")
def server(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Address and process of the session's vLLM server; a position more than samples need, to score the longest."""
    from tests.vllm.servers import vllm_server

    with vllm_server(checkpoints[0], tmp_path_factory.mktemp("server") / "log", MAX_MODEL_LEN + 1) as found:
        yield found


class Reused(VLLMRolloutEngine):
    """An engine on the vLLM that is there already; it begins without weights, as every engine does."""

    def __init__(
        self, started: VLLMRolloutEngine, sampling: SamplingParams, eos: Sequence[int], keep_cache: bool
    ) -> None:
        super().__init__(started._backend, sampling, eos, keep_cache=keep_cache)
        self._loop = started._loop

    def start(self) -> dict[str, float]:
        self._tags = Tags(secrets.token_hex(4))
        return {}

    def close(self) -> None:
        self._version = None


@pytest.fixture
def engine(started: Callable[[SamplingParams], VLLMRolloutEngine]) -> Engine:
    """Makes an engine with its own sampling on the session's vLLM."""

    def make(*, eos: Sequence[int] = (2,), keep_cache: bool = False, **sampling: Any) -> VLLMRolloutEngine:
        params = SamplingParams(**sampling)
        made = Reused(started(params), params, eos, keep_cache)
        go_on(made)  # a test that failed may have left it standing still
        return made

    return make


@pytest.fixture
def on_server(server: tuple[str, int], checkpoints: list[Path]) -> Iterator[Engine]:
    """Makes an engine with its own sampling on the session's server; it must be started."""
    made: list[VLLMRolloutEngine] = []

    def make(*, eos: Sequence[int] = (2,), keep_cache: bool = False, **sampling: Any) -> VLLMRolloutEngine:
        ckpt, params = str(checkpoints[0]), SamplingParams(**sampling)
        made.append(
            vllm_server_engine(
                server[0],
                ckpt,
                params,
                max_model_len=MAX_MODEL_LEN,
                keep_cache=keep_cache,
                start_timeout_s=LIMIT_S,
            )
        )
        made[-1]._eos = tuple(eos)
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(params=["inline", "server"])
def anywhere(request: pytest.FixtureRequest) -> Engine:
    """Makes an engine in this process or on the session's server; it must be started."""
    made: Engine = request.getfixturevalue("engine" if request.param == "inline" else "on_server")
    return made


def lasting(make: Engine) -> Engine:
    """Makes engines that are started; every completion is as long as it may be."""

    def made(**options: Any) -> VLLMRolloutEngine:
        engine = make(eos=(), **options)
        engine.start()
        return engine

    return made


def reference(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Transformers' logprobs of the tokens after the prompt."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]


def largest_gap(
    models: Sequence[PreTrainedModel],
    prompts: Sequence[Sequence[int]],
    rollout: Rollout,
    temperature: float = 1.0,
) -> float:
    """Largest difference of a rollout's logprobs from transformers' with the weights of the version stamped on each."""
    largest = 0.0
    for prompt, group in zip(prompts, rollout.groups, strict=True):
        for sample in group:
            start = 0
            for version, count in sample.spans or ((rollout.version_first, len(sample.tokens)),):
                expected = reference(models[version % 2], prompt, sample.tokens[: start + count], temperature)[start:]
                got = sample.logprobs[start : start + count]
                largest = max([largest, *(abs(a - b) for a, b in zip(expected, got, strict=True))])
                start += count
            assert start == len(sample.tokens)
    return largest
