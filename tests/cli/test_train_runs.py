"""Real `fsm-train` processes and every way they can end.

After each: the exit code, the last line, how the log ends, what is on disk, that every decision in the log verifies,
and that no process of the run is left.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest

from fsm_trainer.core.events import Record
from fsm_trainer.eventlog.reader import EventLog, read_log, records
from fsm_trainer.presets.quickstart import copy_rows

pytestmark = pytest.mark.slow

ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
MARK = "FSM_TEST_RUN"
LIMIT_S = 240.0
"""Nothing here takes nearly as long; reached, it is a hang."""
HUNG_S = "5"
"""After which a run gives up what hangs on purpose; nothing that does not hang takes nearly as long."""
LATE_START = f"""
import sys, time
if sys.orig_argv[-1] == "engine-0":
    time.sleep({LIMIT_S})
"""
"""A `sitecustomize` for processes of the run: the engine's does not get to its own code."""


class Run:
    """One `fsm-train` process with the quickstart's task."""

    def __init__(self, folder: Path, *flags: str, limit: Callable[[], None] | None = None, **env: str) -> None:
        self.path = folder / "run"
        self.mark = str(folder)
        self._errors = folder / "stderr"
        argv = [sys.executable, "-m", "fsm_trainer.cli.train", "--preset", "quickstart", "--progress", "none"]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*argv, "--output-dir", str(self.path), *flags],
                env={**os.environ, **ENV, MARK: self.mark, **env},
                stdin=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                preexec_fn=limit,
            )

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(LIMIT_S)

    def until(self, there: Callable[[], bool], what: str) -> None:
        """Look again and again while the process lives; its end, or the time limit, is a failure."""
        end = time.monotonic() + LIMIT_S
        while not there():
            assert time.monotonic() < end, f"{what} did not come in {LIMIT_S:g} s"
            try:
                code = self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(f"ended with {code} before {what}: {self.errors()}")

    def until_steps(self, count: int) -> None:
        """Wait for lines in metrics.jsonl."""
        metrics = self.path / "metrics.jsonl"
        self.until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= count, f"step {count}")

    def signal_all(self, number: signal.Signals) -> None:
        """To the process group, as a terminal does it."""
        os.killpg(self.process.pid, number)

    def engine(self) -> psutil.Process:
        """The process of its rollout engine."""
        (found,) = [p for p in self.alive() if p.cmdline()[-1:] == ["engine-0"]]
        return found

    def alive(self) -> list[psutil.Process]:
        """Processes of this run, wherever they hang in the tree; one that only waits to be reaped is dead."""
        return [p for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            return False

    def errors(self) -> str:
        """What it wrote to standard error."""
        return self._errors.read_text()

    @property
    def last_line(self) -> str:
        """The last line on standard error, for a person who looks at nothing else."""
        return self.errors().rstrip("\n").splitlines()[-1]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One object a step."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    @property
    def checkpoints(self) -> list[str]:
        """Names of what was saved."""
        return sorted(path.name for path in (self.path / "checkpoints").iterdir())

    def log(self) -> EventLog:
        return read_log(self.path)

    def rows(self) -> list[Record]:
        return list(records(self.log().table))

    def replay(self, command: str) -> str:
        """Output of fsm-replay, which must succeed."""
        argv = [sys.executable, "-m", "fsm_trainer.cli.replay", command, str(self.path)]
        done = subprocess.run(argv, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def check_end(self, code: int, outcome: str, *words: str) -> Record:
        """It ended by itself with this code, says so in one last line and in the log, and left nothing behind."""
        assert self.wait() == code, self.errors()
        assert [p.cmdline() for p in self.alive()] == []
        assert self.last_line.startswith(f"fsm-train: {outcome}"), self.errors()
        for word in words:
            assert word in self.last_line
        assert "Traceback" not in self.last_line
        end = self.rows()[-1]
        assert (end.kind.value, end.reason) == ("run_end", outcome)
        assert "agree with the scheduler" in self.replay("verify")
        return end


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs and leaves none behind."""
    runs: list[Run] = []

    def begin(*flags: str, **more: Any) -> Run:
        runs.append(Run(tmp_path, *flags, **more))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.process.wait()
        for process in run.alive():
            process.kill()


INLINE = ("--rollout-host", "inline")


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], tuple[str, str]]:
    """Flags for a reward function whose `body` runs after its 600th call (batch 2)."""

    def write(body: str) -> tuple[str, str]:
        path = tmp_path / "my_reward.py"
        path.write_text(
            "import itertools\nimport time\n\ncalls = itertools.count()\n\n\n"
            f"def reward_fn(record):\n    if next(calls) >= 600:\n        {body}\n"
            "    return sum(record.tokens) % 7\n"
        )
        return "--reward-fn-path", str(path)

    return write


def test_max_steps(start: Callable[..., Run]) -> None:
    run = start("--max-steps", "4", "--save-interval", "3")
    end = run.check_end(0, "completed", "4 steps", "max_steps reached", "step-000004", "events.arrows")
    assert (end.message, end.train_version) == ("max_steps reached", 4)
    assert run.checkpoints == ["step-000003", "step-000004"]
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]


def test_epochs_exhausted(start: Callable[..., Run], tmp_path: Path) -> None:
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in copy_rows(40, seed=1)))
    run = start(*INLINE, "--dataset-path", str(data), "--epochs", "2")
    run.check_end(0, "completed", "4 steps")
    assert [line["epoch"] for line in run.metrics] == [0, 0, 1, 1]
    assert run.checkpoints == ["step-000004"]


def test_one_interrupt_finishes_what_is_in_flight_and_saves(start: Callable[..., Run]) -> None:
    run = start()
    run.until_steps(3)
    run.signal_all(signal.SIGINT)
    end = run.check_end(130, "interrupted", "sigint")
    assert end.train_version == len(run.metrics) >= 3
    assert run.checkpoints == [f"step-{end.train_version:06d}"]
    ends = {r.dest for r in run.rows() if r.machine == "batch" and r.dest in ("trained", "dropped", "failed")}
    assert ends == {"trained"}
    assert "Traceback" not in run.errors()


def test_an_interrupt_while_the_engine_starts(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(LATE_START)
    run = start(PYTHONPATH=os.pathsep.join([str(tmp_path / "late"), *filter(None, [os.environ.get("PYTHONPATH")])]))
    run.until(lambda: any(p.cmdline()[-1:] == ["engine-0"] for p in run.alive()), "the engine's process")
    run.signal_all(signal.SIGINT)
    end = run.check_end(130, "interrupted", "sigint after 0 steps", "no checkpoint")
    assert end.train_version == 0
    assert run.checkpoints == []


def test_a_second_terminate_ends_it_at_once(
    start: Callable[..., Run], reward_file: Callable[[str], tuple[str, str]]
) -> None:
    """One is not enough here: a batch in flight is stuck in the user's reward function."""
    run = start(*INLINE, *reward_file("time.sleep(1e6)"))
    run.until_steps(2)
    run.process.terminate()
    run.until(lambda: "run_draining" in run.errors(), "the first stop")
    run.process.terminate()
    end = run.check_end(130, "interrupted", "sigterm", "no checkpoint")
    assert end.train_version == 2
    assert run.checkpoints == []


def test_a_reward_that_raises(start: Callable[..., Run], reward_file: Callable[[str], tuple[str, str]]) -> None:
    run = start(*INLINE, *reward_file('raise LookupError("no gold answer")'))
    end = run.check_end(1, "failed", "rollout-0: reward of batch 2 failed", "LookupError: no gold answer")
    assert "my_reward.py:9" in run.last_line
    assert "my_reward.py:9" in (end.message or "")
    assert run.checkpoints == [f"step-{end.train_version:06d}"]


def test_a_reward_that_hangs(start: Callable[..., Run], reward_file: Callable[[str], tuple[str, str]]) -> None:
    flags = ("--reward-timeout-s", HUNG_S, "--shutdown-timeout-s", HUNG_S)
    run = start(*INLINE, *reward_file("time.sleep(1e6)"), *flags)
    end = run.check_end(1, "failed", "rollout-0", "rewarding", f"reward of batch 2 took longer than {HUNG_S} s")
    assert run.checkpoints == [f"step-{end.train_version:06d}"]


def test_a_killed_engine(start: Callable[..., Run]) -> None:
    run = start()
    run.until_steps(2)
    engine = run.engine()
    engine.send_signal(signal.SIGKILL)
    end = run.check_end(1, "failed", "engine-0", f"pid {engine.pid}", "SIGKILL")
    assert f"pid {engine.pid}" in (end.message or "")
    assert run.checkpoints == [f"step-{end.train_version:06d}"]


def test_a_frozen_engine(start: Callable[..., Run]) -> None:
    limits = ("--rollout-timeout-s", HUNG_S, "--sync-timeout-s", HUNG_S, "--shutdown-timeout-s", "1")
    run = start(*limits)
    run.until_steps(2)
    run.engine().send_signal(signal.SIGSTOP)
    run.check_end(1, "failed", f"took longer than {HUNG_S} s")
    assert "generate of batch" in run.last_line or "load_weights" in run.last_line


def test_a_loss_or_gradient_that_is_not_finite(start: Callable[..., Run]) -> None:
    """No weights are published before it, or the rollout engine would meet the ruined ones first.

    Weights of 1e30 overflow somewhere; whether the loss or its gradient is the first to show it is the model's affair.
    """
    flags = ("--async-max-staleness", "9", "--async-sync-interval-steps", "9")
    run = start(*INLINE, "--lr", "1e30", *flags)
    end = run.check_end(1, "failed", "after 1 step", "trainer: train of batch 1 failed: FloatingPointError: ")
    assert end.train_version == 1
    assert all(math.isfinite(value) for line in run.metrics for value in line.values())


def test_a_kill_of_the_run_takes_its_engine_with_it(start: Callable[..., Run]) -> None:
    run = start()
    run.until_steps(3)
    engine = run.engine()
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    psutil.wait_procs([engine, *run.alive()], timeout=30)
    assert run.alive() == []
    log = run.log()
    assert (log.state, log.damaged) == ("crashed", False)
    assert log.table.num_rows > 100
    assert "crash" in run.replay("verify")
    assert "crashed" in run.replay("summary")
    assert run.checkpoints == []


def test_a_log_that_cannot_be_written(start: Callable[..., Run], tmp_path: Path) -> None:
    """Every file may have 64 KiB: enough for this small model, not for the log."""
    from fsm_trainer.engines.tiny import build_tiny_checkpoint

    model = build_tiny_checkpoint(tmp_path / "model", seed=0, hidden=16, layers=1, heads=2, head_dim=16, context=32)
    size = 65_536

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    run = start(*INLINE, "--ckpt", str(model), limit=limit)
    assert run.wait() == 1, run.errors()
    assert run.last_line.startswith("fsm-train: failed")
    assert "the event log cannot be written" in run.last_line
    assert run.alive() == []
    log = run.log()
    assert (log.state, log.damaged) == ("crashed", False)
    assert size - 20_000 < (run.path / "events.arrows").stat().st_size <= size
    assert "agree with the scheduler" in run.replay("verify")


def test_the_quickstart_learns(start: Callable[..., Run]) -> None:
    run = start()
    run.check_end(0, "completed", "max_steps reached")
    lines = run.metrics
    rewards = [line["reward_mean"] for line in lines]
    assert mean(rewards[:5]) < 0.1
    assert mean(rewards[-10:]) > 0.9
    for line in lines:
        assert math.isfinite(line["loss"])
        assert 0 < line["grad_norm"] < math.inf
        assert line["staleness_max"] <= 1
    assert run.checkpoints[-1] == f"step-{len(lines):06d}"
    assert "completed" in run.replay("summary")
