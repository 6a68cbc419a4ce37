"""The run's folder: names, what is made, what is written at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.resolve import resolve
from fsm_trainer.trainers.run_directory import RunDirectory


def test_folders_and_names(make_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = resolve(make_config(output_dir=str(tmp_path / "a" / "b")), 0)
    run = RunDirectory.create(config)
    root = tmp_path / "a" / "b"
    assert (run.path, run.events, run.metrics, run.samples) == (
        root,
        root / "events.arrows",
        root / "metrics.jsonl",
        root / "samples",
    )
    assert run.checkpoint(12) == root / "checkpoints" / "step-000012"
    assert sorted(path.name for path in root.iterdir()) == ["checkpoints", "config.json", "samples"]
    assert TrainConfig.from_json((root / "config.json").read_text()) == config


def test_save_path_moves_the_checkpoints(make_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    run = RunDirectory.create(resolve(make_config(save_path=str(tmp_path / "kept")), 0))
    assert run.checkpoint(3) == tmp_path / "kept" / "step-000003"
    assert (tmp_path / "kept").is_dir()
    assert not (run.path / "checkpoints").exists()


def test_no_samples_no_folder(make_config: Callable[..., TrainConfig]) -> None:
    run = RunDirectory.create(resolve(make_config(log_samples="none"), 0))
    assert not run.samples.exists()


def test_checkpoints_sort_by_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, tmp_path)
    names = [run.checkpoint(step).name for step in (9, 10, 200)]
    assert names == sorted(names)


def test_another_run_is_never_overwritten(make_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    RunDirectory.create(resolve(make_config(seed=1), 0))
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="run holds another run by now; give a new folder"):
        RunDirectory.create(resolve(make_config(seed=2), 0))
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_file_in_the_way_is_an_os_error(make_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = resolve(make_config(), 0)
    (tmp_path / "run").write_text("")
    with pytest.raises(OSError, match="run"):
        RunDirectory.create(config)


def test_a_change_of_the_working_folder_moves_nothing(
    make_config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create(resolve(make_config(output_dir="here", save_path="there"), 0))
    monkeypatch.chdir("/")
    assert (run.path, run.checkpoints) == (tmp_path / "here", tmp_path / "there")
    assert run.samples.is_dir()
