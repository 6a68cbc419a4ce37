"""The examples of docs/testing.md work, in the order they are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_examples_work(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert "'admitted': 200" in capsys.readouterr().out
