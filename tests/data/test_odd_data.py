"""Files, rows and user code that are legal Python or JSON and still no data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fsm_trainer.data.datasets import check_rows, default_loader, load_training_rows
from fsm_trainer.data.readers import read_rows
from fsm_trainer.data.rewards import load_reward_fn
from fsm_trainer.data.user_code import UserCodeError


@pytest.mark.parametrize(
    "text", ['{"prompt": "1", "x": ' + "9" * 5000 + "}", '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"]
)
@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
def test_json_that_python_cannot_hold(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"^dataset .*{name} line 1 or later holds what cannot be read: "):
        read_rows(tmp_path / name)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ValueError, match="cannot be read: Permission denied; give a file you may read"):
        read_rows(tmp_path / "d.jsonl")


@pytest.mark.parametrize("second", ['"x"', "[1]", "9" * 30])
def test_the_column_that_does_not_fit_is_named(second: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(f'{{"prompt": "a", "level": 1}}\n{{"prompt": "b", "level": {second}}}\n')
    with pytest.raises(ValueError, match="has a column 'level', which cannot be kept, because its values are not all"):
        default_loader(str(tmp_path / "d.jsonl"))


class NoLength:
    def __len__(self) -> int:
        return "two"  # type: ignore[return-value]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": "a"}


class NoRows:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise IndexError("boo")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (NoLength(), "dataset D has no length: TypeError: "),
        (NoRows(), r"dataset D \(a NoRows\) gives no row 0: IndexError: boo; give a Dataset"),
        (pd.DataFrame({"prompt": ["a"]}), r"dataset D \(a DataFrame\) gives no row 0: KeyError: 0; give a Dataset"),
    ],
)
def test_what_looks_like_rows_and_gives_none(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rows(rows, "D")


@pytest.mark.parametrize("load", [load_reward_fn, lambda path: load_training_rows("x.jsonl", path)])
@pytest.mark.parametrize("end", ["import sys\nsys.exit(0)", "\nraise GeneratorExit"])
def test_a_file_that_ends_the_program_is_refused(load: Callable[[str], Any], end: str, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(end + "\n")
    with pytest.raises(UserCodeError, match=r"f\.py does not run: line 2: (SystemExit: 0|GeneratorExit:)"):
        load(str(tmp_path / "f.py"))


def test_a_loader_that_ends_the_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def load_training_dataset(path, **kwargs):\n    raise SystemExit(3)\n")
    with pytest.raises(UserCodeError, match=r"failed: line 2: SystemExit: 3"):
        load_training_rows("x.jsonl", str(tmp_path / "f.py"))


def test_ctrl_c_while_a_file_loads_is_no_error_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_reward_fn(str(tmp_path / "f.py"))


def test_a_file_that_changes_folders_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.py").write_text("import os, sys\nos.chdir('/')\nsys.path.clear()\nreward_fn = len\n")
    paths = sys.path.copy()
    try:
        assert load_reward_fn("f.py") is len
        assert Path.cwd() == tmp_path
    finally:
        sys.path[:] = paths
