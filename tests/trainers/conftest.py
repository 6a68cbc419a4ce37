"""A tiny checkpoint for every test of this room; none may leave a thread or a process behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsm_trainer.config import TrainConfig
from fsm_trainer.engines.tiny import build_tiny_checkpoint
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare threads and child processes before and after."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = set(threading.enumerate())
    children = set(psutil.Process().children(recursive=True))
    yield
    # No join: a run's threads have ended when `fit` returns, not some time later. transformers does not wait for the
    # pool that it loads a model with (`shutdown(wait=False)`); we have no pools.
    left = [t.name for t in threading.enumerate() if t not in threads]
    assert [name for name in left if not name.startswith("ThreadPoolExecutor-")] == []
    assert set(psutil.Process().children(recursive=True)) - children == set()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten thousand parameters in two layers."""
    folder = tmp_path_factory.mktemp("model")
    return build_tiny_checkpoint(folder, seed=0, hidden=16, layers=2, heads=2, head_dim=16, context=32)


@pytest.fixture
def make_config(model: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A small valid configuration with some settings changed."""

    def make(**changes: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "algo": "async-grpo",
            "ckpt": str(model),
            "output_dir": str(tmp_path / "run"),
            "train_devices": "cpu",
            "rollout_host": "inline",
            "batch_size": 3,
            "n_samples": 4,
            "max_prompt_tokens": 8,
            "max_new_tokens": 4,
            "mini_bs": 6,
            "lr": 1e-3,
            "lr_decay_style": "constant",
            "max_steps": 4,
            "threads": 1,
        }
        return TrainConfig.build({**values, **changes})

    return make


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[SharedMemoryTransport]:
    """Every weight transport made during the test, so that one can see that they were emptied."""
    made: list[SharedMemoryTransport] = []
    original = SharedMemoryTransport.__init__

    def init(self: SharedMemoryTransport, **kwargs: Any) -> None:
        original(self, **kwargs)
        made.append(self)

    monkeypatch.setattr(SharedMemoryTransport, "__init__", init)
    return made
