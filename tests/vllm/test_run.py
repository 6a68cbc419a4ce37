"""Whole runs by the command line, on a real vLLM: they learn, verify, and survive or report its death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from fsm_trainer.runtime.child import die_with
from tests.vllm.servers import kill, left_of, vllm_processes
from tools.rollout_servers import end_group

BIN = Path(sys.executable).parent
FEW = ("--n-samples", "4", "--batch-size", "4", "--mini-bs", "16")
LONG = ("--max-new-tokens", "64", *FEW)
"""Long enough for weights to change in the middle: an untrained model seldom ends by itself."""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Run:
    """One `fsm-train` in a session of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        command = [str(BIN / "fsm-train"), "--preset", "quickstart", "--output-dir", str(folder), *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
        self.said: list[str] = []

    def end(self) -> int:
        """Read the rest; its exit code."""
        list(self._lines())
        return self.process.wait()

    @property
    def text(self) -> str:
        return "".join(self.said)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()]

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            yield line


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def start(*arguments: str, name: str = "run") -> Run:
        made.append(Run(tmp_path / name, *arguments))
        return made[-1]

    yield start
    for each in made:
        end_group(each.process)
        assert each.process.stdout is not None
        each.process.stdout.close()


def replay(command: str, folder: Path) -> str:
    """What a subcommand of `fsm-replay` prints; it must succeed."""
    done = subprocess.run(
        [str(BIN / "fsm-replay"), command, str(folder)], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def samples_by_batch(folder: Path) -> list[list[dict[str, Any]]]:
    return [pq.read_table(path).to_pylist() for path in (folder / "samples").glob("*.parquet")]


def late_reward(run: Run) -> float:
    rewards = [row["reward_mean"] for row in run.metrics][-10:]
    return sum(rewards) / len(rewards)


def vllm_while_it_trains(run: Run) -> list[psutil.Process]:
    """vLLM's processes, once a first step is done."""
    metrics = run.folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes()):
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.02)
            pytest.fail(f"it ended with {run.end()} before its first step: {run.text}")
    found = vllm_processes(run.process.pid)
    assert found
    return found


@pytest.mark.slow
def test_it_learns_as_with_hf(run: Callable[..., Run]) -> None:
    # In lockstep threads do not decide which weights a batch is drawn with.
    given = ("--max-steps", "80", "--async-admission", "lockstep")
    vllm = run("--rollout-engine", "vllm", *given, name="vllm")
    assert vllm.end() == 0, vllm.text
    hf = run("--rollout-engine", "hf", *given, name="hf")
    assert hf.end() == 0, hf.text
    assert vllm.metrics[0]["reward_mean"] < 0.1
    # Measured: 0.60 with hf, which is the same each time, and 0.71 with vLLM.
    assert late_reward(hf) > 0.4
    assert late_reward(vllm) > late_reward(hf) - 0.2
    assert "agree with the scheduler" in replay("verify", vllm.folder)


@pytest.mark.slow
def test_samples_of_a_run_in_flight_say_their_versions(run: Callable[..., Run]) -> None:
    """Whether any has several depends on which is faster; tests/vllm/test_weights.py makes some."""
    trained = run("--rollout-engine", "vllm", "--async-sync-mode", "inflight", "--max-steps", "12", *LONG)
    assert trained.end() == 0, trained.text
    replay("verify", trained.folder)
    batches = samples_by_batch(trained.folder)
    assert len(batches) >= 12
    for batch in batches:
        versions = [[span["version"] for span in row["version_spans"]] for row in batch]
        assert all(each == sorted(set(each)) for each in versions)
        first, last = batch[0]["rollout_version_first"], batch[0]["rollout_version_last"]
        drew = {version for each in versions for version in each} or {first}
        assert (min(drew), max(drew)) == (first, last)


@pytest.mark.slow
def test_a_run_goes_on_with_a_new_engine(run: Callable[..., Run]) -> None:
    trained = run("--rollout-engine", "vllm", "--on-engine-failure", "restart", "--max-steps", "60", *FEW)
    kill(vllm_while_it_trains(trained))
    assert trained.end() == 0, trained.text
    assert trained.metrics[-1]["train_version"] == 60
    assert "engine_restarting" in trained.text
    replay("verify", trained.folder)


@pytest.mark.slow
def test_a_run_without_restarts_fails_in_a_sentence(run: Callable[..., Run]) -> None:
    trained = run("--rollout-engine", "vllm", "--max-steps", "10000", *FEW)
    kill(vllm_while_it_trains(trained))
    assert trained.end() == 1
    last = trained.said[-1]
    assert last.startswith("fsm-train: failed")
    assert "vLLM's engine process has died" in last
    replay("verify", trained.folder)


@pytest.mark.slow
def test_nothing_outlives_a_killed_run(run: Callable[..., Run]) -> None:
    trained = run("--rollout-engine", "vllm", "--max-steps", "10000", *FEW)
    assert vllm_while_it_trains(trained)
    processes = psutil.Process(trained.process.pid).children(recursive=True)
    os.kill(trained.process.pid, signal.SIGKILL)
    assert not left_of(processes)


@pytest.mark.slow
def test_nothing_outlives_a_run_that_is_killed_while_vllm_starts(run: Callable[..., Run]) -> None:
    """Its model's process would wait for its parent to answer, for five minutes, before it calls a plugin."""
    trained = run("--rollout-engine", "vllm")
    while not starting_vllm(trained):
        assert trained.process.poll() is None, trained.text
    processes = psutil.Process(trained.process.pid).children(recursive=True)
    os.kill(trained.process.pid, signal.SIGKILL)
    assert not left_of(processes)


def starting_vllm(run: Run) -> bool:
    """Whether vLLM has started its model's process, which imports torch by now, so has been told what to do."""
    for process in psutil.Process(run.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("spawn_main" in part for part in process.cmdline()):
                return any("libtorch" in each.path for each in process.memory_maps())
    return False


@pytest.mark.slow
def test_a_run_generates_with_a_server(
    run: Callable[..., Run], server: tuple[str, int], checkpoints: list[Path]
) -> None:
    given = ("--rollout-base-url", f"{server[0]}/v1", "--ckpt", str(checkpoints[0]), "--max-steps", "12")
    trained = run(*given, "--async-sync-mode", "inflight", "--async-inflight-cache", "keep", *LONG)
    assert trained.end() == 0, trained.text
    assert trained.metrics[-1]["train_version"] == 12
    replay("verify", trained.folder)
    assert psutil.pid_exists(server[1]), "the server is somebody else's"
