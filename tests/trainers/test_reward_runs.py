"""Runs whose reward functions live in processes and misbehave: the policy's outcome, told in every record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.config import TrainConfig
from fsm_trainer.core.events import InputKind, RecordKind
from fsm_trainer.trainers import AsyncPolicyTrainer, RunResult
from tests.trainers.helpers import ROWS, log_of, metrics_of, run_end

Make = Callable[..., TrainConfig]

WORST = {
    "sleeps": ("time.sleep(1e6)", "RewardTimeout: reward_fn: a call took longer than 0.5"),
    "exits": ("sys.exit('enough')", "SystemExit: enough (reward_fn, worst.py:"),
    "exits at once": ("os._exit(4)", "RewardCrash: reward_fn: its process exited with code 4"),
    "segfaults": ("ctypes.string_at(0)", "RewardCrash: reward_fn: its process was killed by SIGSEGV"),
    "alarms": ("signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(1e6)", "killed by SIGALRM"),
    "returns text": ("return 'good'", "ValueError: reward_fn returned 'good' (str), expected one finite number"),
    "raises what cannot be pickled": (
        "raise type('Local', (Exception,), {'lock': threading.Lock()})('no words')",
        "Local: no words (reward_fn, worst.py:",
    ),
}
HARMLESS = {
    "forks": "os.fork()",
    "prints": "print('x' * 3_000_000)",
    "leaks threads": "threading.Thread(target=time.sleep, args=(1e6,)).start()",
    "changes the folder": "os.chdir('/')",
}


def write(folder: Path, body: str) -> str:
    """A reward that does `body` for the second sample of each group, and else differs between samples."""
    path = folder / "worst.py"
    path.write_text(
        "import ctypes, os, signal, sys, threading, time\n"
        f"def reward_fn(record):\n    if record.metadata['sample'] == 1:\n        {body}\n"
        "    return sum(record.tokens[-4:]) % 11 / 10\n"
    )
    return str(path)


def fit(make_config: Make, path: str, **changes: Any) -> RunResult:
    values = {"reward_executor": "process", "reward_workers": 1, "max_steps": 2, **changes}
    return AsyncPolicyTrainer(make_config(reward_fn_path=path, **values), dataset=ROWS).fit()


@pytest.mark.parametrize("name", WORST)
def test_a_failure_fails_the_run_and_is_named(make_config: Make, tmp_path: Path, name: str) -> None:
    body, message = WORST[name]
    limit = 0.5 if name == "sleeps" else 30.0
    result = fit(make_config, write(tmp_path, body), reward_call_timeout_s=limit)
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert "reward of batch 0 failed: " in result.message
    assert message in result.message
    assert message in (run_end(result.run.path).message or "")


@pytest.mark.parametrize(("policy", "name"), [("mask", "segfaults"), ("zero", "exits at once"), ("mask", "sleeps")])
def test_a_failure_is_masked_or_counts_zero(make_config: Make, tmp_path: Path, policy: str, name: str) -> None:
    body, message = WORST[name]
    limit = 0.5 if name == "sleeps" else 30.0
    result = fit(make_config, write(tmp_path, body), reward_on_error=policy, reward_call_timeout_s=limit)
    assert (result.outcome, result.train_version) == ("completed", 2)
    prompts = make_config().batch_size
    for line in metrics_of(result.run.path):
        assert line["reward_errors"] + line["reward_timeouts"] == prompts
        assert line["reward_timeouts"] == (prompts if name == "sleeps" else 0)
    rewarded = [
        r.message or ""
        for r in log_of(result.run.path)
        if r.kind is RecordKind.INPUT and r.trigger == InputKind.REWARDED.value
    ]
    assert rewarded
    assert all(message in text and text.startswith("reward_fn failed for ") for text in rewarded)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_left_behind_harms_no_run(make_config: Make, tmp_path: Path, name: str) -> None:
    result = fit(make_config, write(tmp_path, HARMLESS[name]), reward_call_timeout_s=30.0)
    assert (result.outcome, result.train_version) == ("completed", 2)
    assert result.run.reward_output.exists() == (name == "prints")


def test_weights_columns_and_none_in_a_whole_run(make_config: Make, tmp_path: Path) -> None:
    path = tmp_path / "both.py"
    path.write_text(
        "def odd(completions, solutions, **kwargs):\n"
        "    return [len(c) if int(s[0]) % 2 else None for c, s in zip(completions, solutions)]\n"
        "async def varied(record):\n    return sum(record.tokens[-4:]) % 11 / 10\n"
    )
    result = fit(make_config, f"{path}:odd,{path}:varied", reward_weights="0,1")
    assert result.outcome == "completed"
    for line in metrics_of(result.run.path):
        assert line["reward/varied"] == pytest.approx(line["reward_mean"])
        assert "reward/odd" in line


def test_a_prompts_samples_that_nobody_scores_are_left_out(make_config: Make, tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        "def reward_fn(completions, completion_ids, solutions, **kwargs):\n"
        "    return [sum(ids) % 11 if int(s[0]) % 2 else None for ids, s in zip(completion_ids, solutions)]\n"
    )
    config = make_config()
    result = fit(make_config, str(path), max_steps=3)
    assert result.outcome == "completed"
    for line in metrics_of(result.run.path):
        assert line["reward_unscorable"] % config.n_samples == 0
    assert sum(line["reward_unscorable"] for line in metrics_of(result.run.path)) > 0
