"""The page of machines is what the tables say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsm_trainer.core.machines import TABLES
from fsm_trainer.replay.diagrams import MARKS, PAGE, README, diagram, page, section, with_overview, write

ROOT = Path(__file__).parents[2]


def test_page_is_current() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page(), "run `make docs`"


@pytest.mark.parametrize("name", TABLES)
def test_a_diagram_has_each_edge_once(name: str) -> None:
    _, initial, edges = TABLES[name]
    drawn = re.findall(r"^    (\w+) --> (\w+): (\w+)$", diagram(name), re.MULTILINE)
    assert drawn == [(e.source.value, e.dest.value, e.trigger) for e in edges]
    assert f"[*] --> {initial.value}\n" in diagram(name)


def test_edges_that_mean_the_same_share_a_row() -> None:
    rows = section("run").splitlines()
    assert "| `stop` | starting, running, draining | stopping | start nothing, await what is in flight |" in rows
    assert "| `finish` | stopping | stopped | nothing is in flight |" in rows


def test_write_makes_the_page(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / README).write_text(f"before\n{MARKS[0]}old\n{MARKS[1]} after", encoding="utf-8")
    write(tmp_path)
    assert (tmp_path / PAGE).read_text(encoding="utf-8") == page()


def test_the_drawing_in_readme_is_current() -> None:
    text = (ROOT / README).read_text(encoding="utf-8")
    assert with_overview(text) == text, "run `make docs`"
    with pytest.raises(ValueError, match="lacks the marks"):
        with_overview("# no drawing")
