"""What the machine decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.config import TrainConfig
from fsm_trainer.config.resolve import locate, missing_files, next_free_folder, resolve


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))


def test_machine_without_cuda() -> None:
    config = resolve(TrainConfig(), 0)
    assert (config.train_devices, config.rollout_devices) == ("cpu", "cpu")
    assert (config.output_dir, config.save_path) == ("runs/async-grpo-0001", "runs/async-grpo-0001/checkpoints")
    assert (config.threads, config.async_rollout_workers, config.rollout_tp_size) == (4, 1, 1)
    assert config.rollout_groups == (("cpu",),)


def test_machine_with_cuda() -> None:
    config = resolve(TrainConfig(), 2)
    assert (config.train_devices, config.rollout_devices) == ("cuda:0", "cuda:0")


def test_rollout_devices_make_engines_and_workers() -> None:
    config = resolve(TrainConfig(train_devices="0", rollout_devices="1..3"), 4)
    # As torch names them.
    assert (config.train_devices, config.rollout_devices) == ("cuda:0", "cuda:1,cuda:2,cuda:3")
    assert (config.async_rollout_workers, config.threads) == (3, 2)
    assert config.rollout_groups == (("cuda:1",), ("cuda:2",), ("cuda:3",))


def test_given_values_stay() -> None:
    given = TrainConfig(threads=3, output_dir="here", save_path="there", train_devices="cpu")
    config = resolve(given, 8)
    assert (config.threads, config.output_dir, config.save_path) == (3, "here", "there")
    assert (config.train_devices, config.rollout_devices) == ("cpu", "cpu")


def test_home_folder_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = resolve(TrainConfig(ckpt="~/m", dataset_path="d~", reward_fn_path="~/r.py:f", output_dir="~/o"), 0)
    assert (config.ckpt, config.dataset_path, config.reward_fn_path) == ("/home/me/m", "d~", "/home/me/r.py:f")
    assert (config.output_dir, config.save_path) == ("/home/me/o", "/home/me/o/checkpoints")


def test_resolved_configuration_survives_its_json() -> None:
    for given in (TrainConfig(), TrainConfig(algo="grpo"), TrainConfig(rollout_devices="0,1")):
        config = resolve(given, 2)
        assert TrainConfig.from_json(config.to_json()) == config
        assert resolve(config, 2) == config


@pytest.mark.parametrize(
    ("given", "limit"),
    [({}, 1e-3), ({"dtype": "bfloat16"}, 0.2), ({"dtype": "bfloat16", "max_logprob_gap": 0.5}, 0.5)],
)
def test_the_limit_of_the_logprob_gap_follows_the_dtype_unless_given(given: dict[str, Any], limit: float) -> None:
    assert resolve(TrainConfig(**given), 0).max_logprob_gap == limit
    assert resolve(TrainConfig(max_logprob_gap=0), 0).max_logprob_gap == 0, "0 switches the check off"


def test_next_free_folder_follows_the_highest() -> None:
    assert next_free_folder(Path("runs"), "grpo") == "runs/grpo-0001"
    for name in ("grpo-0001", "grpo-0012", "grpo-old", "async-grpo-0099"):
        (Path("runs") / name).mkdir(parents=True)
    assert next_free_folder(Path("runs"), "grpo") == "runs/grpo-0013"
    assert next_free_folder(Path("runs"), "async-grpo") == "runs/async-grpo-0100"


@pytest.mark.parametrize(
    ("given", "located"),
    [
        ({"ckpt": "./model"}, "{here}/model"),
        ({"ckpt": "owner/model"}, "owner/model"),
        ({"ckpt": "file"}, "file"),
        ({"dataset_path": "model:train"}, "{here}/model:train"),
        ({"dataset_path": "owner/data:main:train"}, "owner/data:main:train"),
        ({"dataset_path": "reasoning-gym:model"}, "reasoning-gym:model"),
        ({"dataset_loader_fn": "file.py:load"}, "{here}/file.py:load"),
        (
            {"reward_fn_path": "file.py, builtin:exact_match,file.py:f"},
            "{here}/file.py,builtin:exact_match,{here}/file.py:f",
        ),
        ({"reward_fn_path": "builtin:exact_match"}, "builtin:exact_match"),
        ({"reward_fn_path": "/none/file.py"}, "/none/file.py"),
    ],
)
def test_only_what_is_a_file_here_gets_an_absolute_path(given: dict[str, str], located: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("file", "file.py"):
        (tmp_path / name).touch()
    ((name, _),) = given.items()
    expected = located.format(here=tmp_path)
    once = locate(TrainConfig.build({**given}))
    assert getattr(once, name) == expected
    assert locate(once) == once


def test_a_comma_in_a_folder_makes_no_second_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py,b").mkdir()
    (tmp_path / "a.py,b" / "file.py").touch()
    monkeypatch.chdir(tmp_path / "a.py,b")
    assert locate(TrainConfig(reward_fn_path="file.py:f")).reward_fn_path == "file.py:f"


def test_missing_files_are_those_that_can_only_be_files(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    config = TrainConfig(
        ckpt="owner/model", dataset_path="/gone/data:train", reward_fn_path=f"{tmp_path}/there.py,/gone/r.py:f"
    )
    found = {name: missing_files(config, name) for name in ("ckpt", "dataset_path", "reward_fn_path")}
    assert found == {"ckpt": [], "dataset_path": ["/gone/data:train"], "reward_fn_path": ["/gone/r.py"]}
    assert missing_files(config, "dataset_loader_fn") == []
