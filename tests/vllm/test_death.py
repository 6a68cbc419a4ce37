"""What is killed or broken, of vLLM and of the engine's own process, is told at once, and nothing is left of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedModel

from fsm_trainer.engines.base import EngineLost, RolloutRequest, SamplingParams, Snapshot
from fsm_trainer.engines.vllm_local import vllm_engine
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.weight_sync.choose import make_transport
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.runtime.failures import EngineDied
from fsm_trainer.runtime.host import ProcessHost
from tests.vllm.beside import LIMIT_S, amid
from tests.vllm.conftest import MAX_MODEL_LEN, Publish, largest_gap
from tests.vllm.servers import kill, left_of, vllm_processes

TOLERANCE = 1e-4
LONG = SamplingParams(n_samples=8, max_new_tokens=MAX_MODEL_LEN - 10)
REQUEST = RolloutRequest(0, ((4, 5, 6), (7, 8)), seed=0)


@pytest.fixture
def other(models: list[PreTrainedModel]) -> Iterator[Snapshot]:
    """Weights of a model of half the vocabulary and width."""
    transport = SharedMemoryTransport()
    halves = {name: tensor[: len(tensor) // 2] for name, tensor in models[0].state_dict().items()}
    yield transport.publish(halves.items(), 5)
    transport.close()


def started(checkpoints: list[Path]) -> tuple[VLLMRolloutEngine, list[psutil.Process]]:
    """An engine of its own, and the processes that vLLM has started for it."""
    before = {process.pid for process in vllm_processes()}
    engine = vllm_engine(str(checkpoints[0]), LONG, max_model_len=MAX_MODEL_LEN)
    engine._eos = ()  # so that every completion is as long as it may be
    engine.start()
    return engine, [process for process in vllm_processes() if process.pid not in before]


def test_a_killed_vllm_is_told_at_once_and_can_be_closed(checkpoints: list[Path], publish: Publish) -> None:
    engine, processes = started(checkpoints)
    assert processes
    engine.load_weights(publish(0))
    (running,) = amid(engine, REQUEST)
    kill(processes)
    with pytest.raises(EngineLost, match="vLLM's engine process has died"):
        running.result(LIMIT_S)
    with pytest.raises(EngineLost, match="vLLM's engine process has died"):
        engine.load_weights(publish(1))
    engine.close()
    assert not left_of(processes)


def test_weights_of_another_model_break_the_engine_until_it_is_started_anew(
    checkpoints: list[Path], publish: Publish, other: Snapshot
) -> None:
    engine, processes = started(checkpoints)
    engine.load_weights(publish(0))
    with pytest.raises(EngineLost, match="cannot load the weights of version 5: .*must be started anew"):
        engine.load_weights(other)
    with pytest.raises(RuntimeError, match="no weights loaded"):
        engine.generate(REQUEST)
    # Good weights would not help: vLLM has taken its model apart.
    with pytest.raises(EngineLost, match="an earlier load of weights ended part way; .*must be started anew"):
        engine.load_weights(publish(2))
    engine.close()
    assert not left_of(processes)


@pytest.fixture(scope="module")
def host(checkpoints: list[Path]) -> Iterator[ProcessHost]:
    """An engine in a process of its own, as runs have it."""
    host = ProcessHost(partial(vllm_engine, str(checkpoints[0]), LONG, max_model_len=MAX_MODEL_LEN), "engine")
    try:
        host.submit("start").result(LIMIT_S)
        yield host
    finally:
        host.kill()


@pytest.mark.parametrize("name", ["shared-memory", "directory"])
def test_weights_reach_the_engines_process(
    host: ProcessHost, models: list[PreTrainedModel], tmp_path: Path, name: str
) -> None:
    transport = make_transport(name, bucket_bytes=100_000, directory=tmp_path)
    for version in (0, 1):
        snapshot = transport.publish(models[version].state_dict().items(), version)
        assert host.submit("load_weights", snapshot).result(LIMIT_S).version == version
        rollout = host.submit("generate", REQUEST).result(LIMIT_S)
        assert (rollout.version_first, rollout.version_last) == (version, version)
        assert largest_gap(models, REQUEST.prompts, rollout) < TOLERANCE
        transport.release(version)
    transport.close()


def test_with_the_engines_process_vllms_own_are_gone(host: ProcessHost, publish: Publish) -> None:
    """The last test of this process."""
    processes = vllm_processes(host.pid)
    assert processes
    host.submit("load_weights", publish(0)).result(LIMIT_S)
    ended = host.submit("generate", REQUEST)
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="SIGKILL"):
        ended.result(LIMIT_S)
    assert not left_of(processes)
