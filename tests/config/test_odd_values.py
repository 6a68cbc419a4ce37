"""Values that people give by accident: empty, endless, unprintable, or not what YAML makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.devices import parse_devices
from fsm_trainer.config.yaml_file import read_config_file

PATHS = ("ckpt", "dataset_path", "dataset_loader_fn", "reward_fn_path", "output_dir", "save_path")


@pytest.mark.parametrize("name", [*PATHS, "train_devices", "rollout_devices"])
@pytest.mark.parametrize("value", ["", "  ", "a\0b", "\udcff"])
def test_text_that_names_nothing(name: str, value: str) -> None:
    # An empty path would mean the current folder.
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} is ") as caught:
        TrainConfig.build({name: value})
    message = str(caught.value)
    assert "expected a text that is not empty" in message or "expected UTF-8 text" in message
    message.encode()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": ""}, "--lr is '', expected a number"),
        ({"algo": ""}, "--algo is '', expected a text that is not empty; leave it out for its default"),
        ({"kl_estimator": ""}, "--kl-estimator is '', expected one of k1, k2, k3"),
        ({"seed": 2**31}, "--seed is 2147483648, expected less than 2147483648"),
        ({"batch_size": "9" * 5000}, f"--batch-size is {'9' * 77}..., expected a whole number"),
        ({"output_dir": "a\nb\0"}, r"--output-dir is 'a\nb\x00', expected UTF-8 text without null characters"),
    ],
)
def test_messages_show_the_value_on_one_short_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.build(values)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["0..999999999999", "99999", "0,9" + "9" * 5000])
def test_more_devices_than_any_machine_has(text: str) -> None:
    with pytest.raises(ConfigError, match="expected cpu, or CUDA numbers"):
        parse_devices("--train-devices", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: " + "[" * 5000, "--config run.yaml is nested too deeply"),
        ("seed: " + "9" * 5000, "--config run.yaml line 1: 99999"),
        ("lr: 1\nckpt: 2020-13-45", "--config run.yaml line 2: 2020-13-45 is no timestamp; text goes in quotes"),
        ("seed: !!int abc", "--config run.yaml line 1: abc is no int; text goes in quotes"),
        ("ckpt: !!timestamp abc", "--config run.yaml line 1: abc is no timestamp; text goes in quotes"),
        ("[a]: 4", "unknown setting 'a sequence as a key' (value 4) in run.yaml"),
    ],
)
def test_yaml_that_cannot_be_a_value(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config_file("run.yaml")
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_config_path_that_is_none(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^--config .*; give the path of a YAML file$") as caught:
        read_config_file(path)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", PATHS)
def test_paths_the_system_refuses(name: str, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    option = f"--{name.replace('_', '-')}"
    assert refused(**{name: "loop"}).startswith(f"{option} loop cannot be used: ")
    assert (
        refused(**{name: "x" * 300}) == f"{option} {'x' * 77}... cannot be used: File name too long; give another path"
    )


@pytest.mark.parametrize("name", ["output_dir", "save_path"])
def test_folders_that_cannot_be_made(name: str, refused: Callable[..., str], tmp_path: Path) -> None:
    option = f"--{name.replace('_', '-')}"
    (tmp_path / "file").write_text("")
    assert (
        refused(**{name: "file/run"})
        == f"{option} file/run cannot be made: {tmp_path}/file is a file; give another folder"
    )
    (tmp_path / "dangling").symlink_to("nowhere")
    assert refused(**{name: "dangling"}) == (
        f"{option} dangling is a link to nothing; give a folder that is new or empty"
    )


@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"', "[" * 100_000])
def test_a_model_configuration_that_is_none(
    text: str, refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text(text)
    assert refused(ckpt="broken").startswith("--ckpt broken: its config.json ")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer_config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "{"),
        ("config.json", '{"model_type": "qwen3", "text_config": "x", "max_position_embeddings": "256"}'),
    ],
)
def test_a_tokenizer_that_does_not_load(
    file: str, text: str, refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "broken")
    (tmp_path / "broken" / file).write_text(text)
    assert refused(ckpt="broken").startswith("--ckpt broken has no tokenizer that loads: ")


@pytest.mark.parametrize("name", sorted(TrainConfig.model_fields))
def test_no_number_is_without_end(name: str) -> None:
    kind = str(TrainConfig.model_fields[name].annotation)
    if "Literal" in kind or not ("int" in kind or name.endswith("_s")):
        pytest.skip("neither a count nor a time")
    for value in (10**10, 10**30):
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} is 10+, expected (at most|less than) "):
            TrainConfig.build({name: value})
