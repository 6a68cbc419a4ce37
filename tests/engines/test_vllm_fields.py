"""What vLLM's engine takes is read from its source, and nothing of it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsm_trainer.engines.vllm_fields import engine_fields

SOURCE = '''
import this_is_nowhere

@dataclass
class EngineArgs:
    """Arguments."""

    max_seqs: int | None = None
    eager: bool = Config.eager
    memory: float = 0.9
    name: str | list[str] = "a"
    kind: Kind = "b"
    quoted: "int | None" = None
    long: (
        str | None
    ) = Config.long
    LIMIT = 3

    def method(self) -> None:
        local: int = 1

@dataclass
class AsyncEngineArgs(EngineArgs):
    log: bool = False
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose every module fails when it is run; returns the file of its arguments."""
    folder = tmp_path / "vllm_as_it_may_be" / "engine"
    folder.mkdir(parents=True)
    for each in (folder.parent, folder):
        (each / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder / "arg_utils.py"


def test_fields_of_both_classes_and_their_plain_types(package: Path) -> None:
    package.write_text(SOURCE)
    assert engine_fields("vllm_as_it_may_be") == {
        "max_seqs": {"int", "None"},
        "eager": {"bool"},
        "memory": {"float"},
        "name": None,
        "kind": None,
        "quoted": None,
        "long": {"str", "None"},
        "log": {"bool"},
    }


def test_nothing_is_said_where_they_are_not_found(package: Path) -> None:
    assert engine_fields("vllm_as_it_may_be") is None
    package.write_text(SOURCE.replace("class AsyncEngineArgs(EngineArgs)", "class Other"))
    assert engine_fields("vllm_as_it_may_be") is None
    assert engine_fields("no_such_package_anywhere") is None
