"""`fsm-train --resume` as a command: after a `kill -9`, for a preset, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from fsm_trainer.cli.replay import main as replay
from fsm_trainer.cli.train import main
from fsm_trainer.config.checkpoint import list_checkpoints
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.replay.verify import verify

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LIMIT_S = 240.0
HELD_REWARD = """
import os, pathlib, time

seen = os.open({seen!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

def reward_fn(record):
    while record.metadata["batch_id"] >= 18 and pathlib.Path({held!r}).exists():
        time.sleep(0.01)
    os.write(seen, "{{batch_id}} {{group}} {{epoch}} {{}}\\n".format(record.prompt, **record.metadata).encode())
    return sum(record.tokens) % 7
"""
"""Keeps a run of 24 steps from its end, so that it is there to be killed however late that comes. Notes the prompts of
each batch: when it is killed, the run's own samples may lack some."""
FAST = ("--progress", "none", "--rollout-host", "inline", "--max-new-tokens", "2", "--n-samples", "2")


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "fsm_trainer.cli.train", *flags]


def trained_prompts(run: Path, versions: range, seen: Path) -> Counter[tuple[int, str]]:
    """(epoch, text) of every prompt trained on in steps that lead to these versions, by what the reward has noted."""
    ends = [r for r in records(read_log(run).table) if r.machine == "batch" and r.dest == "trained"]
    batches = {r.batch_id for r in ends if r.train_version in versions}
    noted = {tuple(line.split()) for line in seen.read_text().splitlines()}
    return Counter((int(epoch), prompt) for batch, _, epoch, prompt in noted if int(batch) in batches)


def kill_after(run: Path, saved: int, *flags: str) -> None:
    """Start a run and kill it with all its processes once so many checkpoints are there."""
    with (run.parent / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            command(*flags, "--output-dir", str(run)), env=ENV, stderr=errors, start_new_session=True
        )
    end = time.monotonic() + LIMIT_S
    try:
        while len(list(run.glob("checkpoints/*/manifest.json"))) < saved:
            assert time.monotonic() < end, (run.parent / "stderr").read_text()
            try:
                code = process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(f"ended with {code}: {(run.parent / 'stderr').read_text()}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("admission", ["paced", "greedy"])
def test_a_killed_run_goes_on(admission: str, tmp_path: Path) -> None:
    """Every prompt of an epoch is trained on once, over the kill and the resume; the preset's files are found."""
    run, rest, held, reward = tmp_path / "killed", tmp_path / "rest", tmp_path / "held", tmp_path / "reward.py"
    seen, before = tmp_path / "seen", tmp_path / "seen-before"
    held.touch()
    reward.write_text(HELD_REWARD.format(held=str(held), seen=str(seen)))
    shape = ("--async-admission", admission, "--async-rollout-workers", "3", "--async-max-staleness", "3")
    shape += ("--max-prompt-attempts", "99", "--save-interval", "2", "--batch-size", "64", "--epochs", "3")
    shape += ("--reward-fn-path", str(reward))
    kill_after(run, 3, "--preset", "quickstart", *FAST, *shape)
    held.unlink()
    seen.rename(before)
    saved = list_checkpoints(run / "checkpoints")[-1].train_version
    flags = ("--resume", str(run), "--output-dir", str(rest), "--save-interval", "0")
    done = subprocess.run(command(*flags), env=ENV, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "run_resumed" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"fsm-train: completed 24 steps ({saved} before it was resumed)")
    assert verify(rest).ok
    both = trained_prompts(run, range(1, saved + 1), before) + trained_prompts(rest, range(saved + 1, 25), seen)
    prompts = [json.loads(line)["prompt"] for line in (run / "preset" / "data.jsonl").read_text().splitlines()]
    assert len(prompts) == 512
    assert both == Counter((epoch, prompt) for epoch in range(3) for prompt in prompts)
    assert json.loads((rest / "config.json").read_text())["preset"] == "quickstart"


def test_a_finished_run_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["--preset", "quickstart", *FAST, "--max-steps", "1", "--output-dir", str(run)]) == 0
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    refused = [
        (("--resume", str(run)), "its 1 optimiser steps are all that --max-steps 1 asks for; give more"),
        (("--resume", str(run), "--max-steps", "2", "--seed", "5"), "--seed is 5, but 0 in the run of"),
        (("--resume", str(run), "--max-steps", "x"), "--max-steps is x, expected a whole number"),
        (("--resume", str(tmp_path)), "it holds no run"),
        (("--resume", str(tmp_path / "none")), "there is no such folder"),
    ]
    for flags, message in refused:
        assert main([*flags, "--output-dir", str(tmp_path / "new")]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert len(said.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert not (tmp_path / "new").exists()


def test_the_plan_of_a_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["--preset", "quickstart", *FAST, "--max-steps", "1", "--output-dir", str(run)]) == 0
    capsys.readouterr()
    assert main(["--resume", str(run), "--dry-run", "--max-steps", "9", "--lr", "1e-8", "--min-lr", "0"]) == 0
    plan = capsys.readouterr().out
    assert f"{run}/checkpoints/step-000001" in plan
    assert '"first_version": 1, "first_batch": 1' in plan


def test_the_summary_says_where_a_run_came_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, rest = tmp_path / "run", tmp_path / "rest"
    assert main(["--preset", "quickstart", *FAST, "--max-steps", "1", "--output-dir", str(run)]) == 0
    assert main(["--resume", str(run), "--max-steps", "2", "--output-dir", str(rest)]) == 0
    capsys.readouterr()
    assert replay(["summary", str(rest)]) == 0
    assert f"resumed           from {run}/checkpoints/step-000001 at step 1" in capsys.readouterr().out.splitlines()
    assert replay(["summary", str(rest), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["first_version"], found["steps"], found["train_version"]) == (1, 1, 2)
    assert replay(["summary", str(run)]) == 0
    assert "resumed" not in capsys.readouterr().out
    assert replay(["verify", str(rest)]) == 0
