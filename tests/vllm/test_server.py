"""A vLLM server that somebody has started, and the engine that generates with it and pushes weights into it."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from transformers import PreTrainedModel

from fsm_trainer.analysis import batches_frame, load_events, sync_frame
from fsm_trainer.engines import vllm_health
from fsm_trainer.engines.base import EngineLost, Snapshot
from fsm_trainer.engines.weight_sync.directory import DirectoryTransport
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from tests.vllm.beside import LIMIT_S, amid, generating, load_amid
from tests.vllm.conftest import MAX_MODEL_LEN, Engine, Publish, largest_gap, lasting
from tests.vllm.servers import left_of, vllm_processes, vllm_server
from tests.vllm.test_run import FEW, Run, replay
from tests.vllm.test_weights import PROMPTS, REQUEST, TOLERANCE
from tools.rollout_servers import end_group

Server = tuple[str, int]


@pytest.fixture
def connect(on_server: Engine) -> Engine:
    """Makes engines on the session's server."""
    return lasting(on_server)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_policy(
    connect: Engine, publish: Publish, models: list[PreTrainedModel], temperature: float
) -> None:
    engine = connect(n_samples=3, max_new_tokens=20, temperature=temperature)
    engine.load_weights(publish(1))
    rollout = engine.generate(REQUEST)
    assert [len(group) for group in rollout.groups] == [3, 3]
    assert len({sample.tokens for group in rollout.groups for sample in group}) == 6
    assert engine.generate(REQUEST) == rollout
    assert largest_gap(models, PROMPTS, rollout, temperature) < TOLERANCE


@pytest.mark.parametrize("transport", ["shared-memory", "directory"])
def test_every_load_serves_the_new_weights(
    connect: Engine, models: list[PreTrainedModel], tmp_path: Path, transport: str
) -> None:
    made = SharedMemoryTransport() if transport == "shared-memory" else DirectoryTransport(tmp_path)
    engine = connect(n_samples=2, max_new_tokens=12)
    for version in range(3):
        loaded = engine.load_weights(made.publish(models[version % 2].state_dict().items(), version))
        assert (loaded.version, loaded.nbytes) == (version, sum(t.nbytes for t in models[0].state_dict().values()))
        assert largest_gap(models, PROMPTS, engine.generate(REQUEST)) < TOLERANCE
        made.release(version)
    made.close()


def test_scores_are_those_of_its_samples(connect: Engine, publish: Publish) -> None:
    engine = connect(n_samples=1, max_new_tokens=12)
    engine.load_weights(publish(0))
    (sample,) = engine.generate(REQUEST).groups[0]
    scores = engine.score([(*PROMPTS[0], *sample.tokens)], 1.0)
    assert scores is not None
    assert scores[0][len(PROMPTS[0]) - 1 :] == pytest.approx(sample.logprobs, abs=TOLERANCE)


def test_what_runs_goes_on_with_the_new_weights(
    connect: Engine, publish: Publish, models: list[PreTrainedModel]
) -> None:
    engine = connect(n_samples=4, max_new_tokens=180)
    rollout = load_amid(engine, publish, REQUEST, newest=2)
    assert (rollout.version_first, rollout.version_last) == (0, 2)
    assert largest_gap(models, PROMPTS, rollout) < TOLERANCE


def test_weights_that_are_gone_are_told_and_good_ones_serve_again(connect: Engine, publish: Publish) -> None:
    engine = connect(n_samples=1, max_new_tokens=4)
    engine.load_weights(publish(0))
    with pytest.raises(ValueError, match="weights of version 9 are gone"):
        engine.load_weights(Snapshot(9, "/proc/self/fd/9999", 1))
    with pytest.raises(RuntimeError, match="no weights loaded"):
        engine.generate(REQUEST)
    engine.load_weights(publish(2))
    assert engine.generate(REQUEST).version_first == 2


def test_a_later_run_takes_the_server_over(connect: Engine, publish: Publish) -> None:
    first, second = connect(n_samples=1, max_new_tokens=4), connect(n_samples=1, max_new_tokens=4)
    first.load_weights(publish(0))
    second.load_weights(publish(0))
    with pytest.raises(EngineLost, match="which this run has not loaded into it"):
        first.generate(REQUEST)
    assert second.generate(REQUEST).version_first == 0


def test_a_server_that_was_restarted_is_lost(connect: Engine, publish: Publish, server: Server) -> None:
    engine = connect(n_samples=1, max_new_tokens=4)
    engine.load_weights(publish(0))
    # So a server names the weights that it was started with.
    httpx.post(f"{server[0]}/update_weight_version", json={"new_version": "default"}).raise_for_status()
    with pytest.raises(EngineLost, match="'default', which this run has not loaded into it"):
        engine.generate(REQUEST)


def test_a_server_that_hangs_can_be_given_up(connect: Engine, publish: Publish, server: Server) -> None:
    engine = connect(n_samples=4, max_new_tokens=180)
    engine.load_weights(publish(0))
    os.kill(server[1], signal.SIGSTOP)
    try:
        hung = generating(engine, REQUEST)
        engine.abort()
        with pytest.raises(RuntimeError, match="generation aborted"):
            hung.result(LIMIT_S)
    finally:
        os.kill(server[1], signal.SIGCONT)
    engine.load_weights(publish(1))
    assert engine.generate(REQUEST).version_first == 1


def test_a_server_that_hangs_is_lost(
    connect: Engine, publish: Publish, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = connect(n_samples=4, max_new_tokens=180)
    engine.load_weights(publish(0))
    os.kill(server[1], signal.SIGSTOP)
    try:
        with monkeypatch.context() as hasty:
            for name, value in (("LOOK", 0.01), ("ANSWER", 0.2), ("PATIENCE", 1.0), ("PER_TOKEN", 0.0)):
                hasty.setattr(vllm_health, f"_{name}_S", value)
            with pytest.raises(EngineLost, match=r"has not answered /health \d times in a row, .* during /inference"):
                engine.generate(REQUEST)
    finally:
        os.kill(server[1], signal.SIGCONT)
    engine.load_weights(publish(1))
    assert engine.generate(REQUEST).version_first == 1


@pytest.mark.slow
def test_a_run_generates_with_two_servers_and_ends_when_one_is_killed(
    server: Server, checkpoints: list[Path], tmp_path: Path
) -> None:
    with vllm_server(checkpoints[0], tmp_path / "log", MAX_MODEL_LEN + 1) as (url, pid):
        urls = ("--rollout-base-url", f"{server[0]},{url}")
        run = Run(tmp_path / "run", *urls, "--ckpt", str(checkpoints[0]), "--max-steps", "10000", *FEW)
        try:
            wait_for_steps(run, 8)
            os.kill(pid, signal.SIGKILL)
            assert run.end() == 1, run.text
        finally:
            end_group(run.process)
            assert run.process.stdout is not None
            run.process.stdout.close()
    last = run.said[-1]
    assert last.startswith("fsm-train: failed")
    assert f"the vLLM server at {url} does not answer" in last
    assert psutil.pid_exists(server[1]), "the other server is well"
    replay("verify", run.folder)
    events = load_events(run.folder)
    trained = batches_frame(events).query("state == 'trained'")
    assert set(trained["engine"]) == {0, 1}
    loads = sync_frame(events).query("loaded")
    assert all(loads[loads["engine"] == engine]["version"].nunique() > 1 for engine in (0, 1))
    # What was learnt is saved.
    assert f"step-{len(trained):06d}" in last


def wait_for_steps(run: Run, steps: int) -> None:
    """Until a run has done them."""
    metrics = run.folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= steps):
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.02)
            pytest.fail(f"it ended with {run.end()} before: {run.text}")


def test_a_killed_server_is_told_at_once(connect: Engine, publish: Publish, server: Server) -> None:
    """The last test here: the server does not come back."""
    engine = connect(n_samples=8, max_new_tokens=180)
    engine.load_weights(publish(0))
    (running,) = amid(engine, REQUEST)
    processes = vllm_processes(server[1])
    assert processes
    os.kill(server[1], signal.SIGKILL)
    with pytest.raises(EngineLost, match=f"the vLLM server at {server[0]} does not answer"):
        running.result(LIMIT_S)
    with pytest.raises(EngineLost, match="does not answer"):
        engine.load_weights(publish(1))
    assert not left_of(processes)
