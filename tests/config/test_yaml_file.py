"""The configuration file: same keys, clear refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsm_trainer.config.errors import ConfigError
from fsm_trainer.config.yaml_file import read_config_file


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> str:
    Path("run.yaml").write_text(text)
    return "run.yaml"


def test_kebab_and_snake_case_and_types() -> None:
    text = "batch-size: 4\nn_samples: 2\nlr: 1e-3\nasync-drop-stale-batches: no\nmax-steps: null\ntrain-tp-size: 1\n"
    assert read_config_file(write(text)) == {
        "batch_size": 4,
        "n_samples": 2,
        "lr": "1e-3",  # YAML 1.1 takes this for a text; the setting's type makes it a number
        "async_drop_stale_batches": False,
        "max_steps": None,
        "tp_size": 1,
    }


def test_empty_file() -> None:
    assert read_config_file(write("# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bath-size: 4", "unknown setting 'bath-size' (value 4) in run.yaml; did you mean batch-size?"),
        ("bath_size: 4", "unknown setting 'bath_size' (value 4) in run.yaml; did you mean batch-size?"),
        ("zzz: x", "unknown setting 'zzz' (value 'x') in run.yaml; see fsm-train --help"),
        ("batch-size: 4\nbatch_size: 5", "'batch_size' is set twice in run.yaml; keep one of the two"),
        ("lr: 1\nlr: 2", "'lr' is set twice in run.yaml; keep one of the two"),
        ("ckpt: [a, b]", "'ckpt' is ['a', 'b'] in run.yaml, expected one value, not a list"),
        ("seed: yes", "'seed' is true in run.yaml, expected no true or false here; see --help"),
        ("- a", "--config run.yaml holds no mapping, expected lines such as `batch-size: 16`"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config_file(write(text))
    assert str(caught.value) == message


def test_broken_yaml_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^--config run\.yaml line 3 is not valid YAML: ") as caught:
        read_config_file(write("a: 1\nb: [\n"))
    assert "\n" not in str(caught.value)


def test_file_that_is_not_there_or_no_text() -> None:
    with pytest.raises(ConfigError, match=r"^--config no\.yaml cannot be read: No such file or directory; give"):
        read_config_file("no.yaml")
    Path("run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_config_file("run.yaml")


def test_nothing_in_a_file_is_run() -> None:
    with pytest.raises(ConfigError, match=r"^--config run\.yaml line 1 is not valid YAML: could not determine a con"):
        read_config_file(write("ckpt: !!python/object/apply:os.getcwd []"))
