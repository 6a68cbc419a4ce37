"""A tiny checkpoint, data and reward: everything one valid command line needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fsm_trainer.cli.train import main
from fsm_trainer.engines.tiny import build_tiny_checkpoint


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def inputs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Flags of a run that would start; the working directory is a fresh one."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i:04d}=", "solutions": [f"{i:04d}"]} for i in range(10)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.py").write_text("def reward_fn(record):\n    return 1.0\n")
    return {
        "--ckpt": str(model),
        "--dataset-path": "data.jsonl",
        "--reward-fn-path": "reward.py",
        "--train-devices": "cpu",
        "--batch-size": "4",
        "--n-samples": "2",
        "--max-prompt-tokens": "8",
        "--max-new-tokens": "5",
        "--output-dir": "out",
    }


@pytest.fixture
def refused(inputs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run main() with the valid flags changed (None leaves one out); the one line it refuses with."""

    def run(*extra: str, **changes: str | None) -> str:
        flags = {**inputs, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
        argv = [part for name, value in flags.items() if value is not None for part in (name, value)]
        assert main([*argv, *extra]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        prefix = "fsm-train: error: "
        assert captured.err.startswith(prefix)
        assert captured.err.count("\n") == 1
        assert not Path("out").exists()
        return captured.err.removeprefix(prefix).rstrip("\n")

    return run
