"""The notebook runs without an error, and to the numbers that it was committed with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "staleness_analysis.ipynb"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def texts(notebook: Any) -> Iterator[str]:
    """What each code cell prints and shows, as one text: prints may come in one piece or in several."""
    for cell in notebook.cells:
        outputs = cell.get("outputs", ())
        yield "".join(o["text"] if o["output_type"] == "stream" else o["data"]["text/plain"] for o in outputs)


def test_the_notebook_runs_to_its_committed_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    committed = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(committed)
    again = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(again, timeout=120, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    found, expected = list(texts(again)), list(texts(committed))
    assert sum(map(bool, expected)) > 10
    for one, other in zip(found, expected, strict=True):
        numbers = [float(number) for number in _NUMBER.findall(one)]
        # As printed: a last digit may round the other way.
        assert numbers == pytest.approx([float(number) for number in _NUMBER.findall(other)], rel=2e-3), other


def test_every_code_cell_was_run_in_order_and_shows_something() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(cell.outputs for cell in code)
    assert sum(cell.source.startswith("## ") for cell in notebook.cells) == 5
