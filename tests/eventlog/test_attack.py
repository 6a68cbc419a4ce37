"""A little of `make attack`: random edits, a file that may not grow, runs killed with -9."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "attack_log.py"


def load_tool() -> ModuleType:
    sys.path.insert(0, str(TOOL.parent))  # as Python does for a script
    spec = importlib.util.spec_from_file_location("attack_log_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sys.path.pop(0)
    return module


tool = load_tool()


def test_random_edits_are_never_read_silently(tmp_path: Path) -> None:
    found = tool.attack_by_edits(tmp_path, 150, random.Random(5))
    log_edits = sys.modules["log_edits"]
    assert {name.split(":")[0] for name in found} == set(log_edits.EDITS)


def test_a_run_killed_at_any_moment_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    found = tool.attack_by_kills(tmp_path, 2, random.Random(6))
    assert sum(found.values()) == 2


def test_a_file_that_may_not_grow_fails_the_run_and_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    assert tool.fill_one(tmp_path / "run", random.Random(7), file_limit=True) in ("torn", "clean")


def test_a_lost_acknowledged_row_is_a_breach(tmp_path: Path) -> None:
    """The attack itself can fail: one more row acknowledged than there is."""
    (tmp_path / "run").mkdir()
    acknowledged: list[int] = []
    tool.write_run(tmp_path / "run", 5, 0, acknowledged.append)
    path = tmp_path / "run" / "events.arrows"
    log = tool.read_log(path)
    path.write_bytes(path.read_bytes()[:-3000])
    assert tool.read_log(path).table.num_rows > acknowledged[-2]
    with pytest.raises(AssertionError):
        tool.check_crashed(tmp_path / "run", log.table.num_rows)
