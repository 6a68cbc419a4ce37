"""The list of wrong schedulers fits the code, and a few of them are refused; `make mutants` tries them all."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from fsm_trainer.core.machines import TABLES

TOOL = Path(__file__).parents[2] / "tools" / "mutants.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def test_every_mutant_fits_the_code_and_is_code() -> None:
    for mutant in tool.all_mutants():
        source = (tool.ROOT / "fsm_trainer" / mutant.file).read_text(encoding="utf-8")
        mutated = tool.mutate(mutant)
        assert mutated != source, mutant.name
        compile(mutated, mutant.name, "exec")


def test_names_are_unique_and_no_edge_is_forgotten() -> None:
    counts = Counter(m.name for m in tool.all_mutants())
    assert max(counts.values()) == 1
    assert len(tool.edge_mutants()) == sum(len(edges) for _, _, edges in TABLES.values())
    assert len(tool.rule_mutants(tool.LIST.read_text(encoding="utf-8"))) >= 200


def test_the_list_is_read_as_written() -> None:
    text = "# about\n\n[core/x.py]\n\n# swapped\n-a = 1\n-b = 2\n+c = 3\n\n# taken-out\n-    d = 4\n"
    assert tool.rule_mutants(text) == [
        tool.Mutant("swapped", "core/x.py", "a = 1\nb = 2", "c = 3"),
        tool.Mutant("taken-out", "core/x.py", "    d = 4\n", ""),
    ]


def test_a_mutant_that_no_longer_fits_is_reported() -> None:
    with pytest.raises(ValueError, match="mutant gone: expected once in core/policy.py, found 0 times"):
        tool.mutate(tool.Mutant("gone", "core/policy.py", "no such line", ""))


def test_some_mutants_are_refused_each_by_a_named_test(capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        "edge-trainer-training-sync": "core/test_admission.py",
        "feasible-unsorted": "core/test_policy.py",
        "greedy-lifo": "core/test_admission.py",
        "batch-lost-at-failure": "core/test_shutdown.py",
    }
    tests = ["core/test_policy.py", "core/test_admission.py", "core/test_shutdown.py"]
    assert tool.main([*expected, "--tests", *tests]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    killers = {name: killer.split("::")[0] for name, killer, *_ in lines[:-1]}
    assert killers == expected
    assert " ".join(lines[-1]) == "4 mutants, 4 refused, 0 survive"


def test_a_survivor_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["greedy-lifo", "--tests", "core/test_config.py"]) == 1
    assert "1 mutants, 0 refused, 1 survive greedy-lifo" in capsys.readouterr().out


def test_tests_that_fail_without_a_mutant_judge_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tool, "run_tests", lambda tree, tests: "core/test_policy.py::test_that_fails")
    with pytest.raises(RuntimeError, match="test_that_fails fails without any mutant"):
        list(tool.judge_all(tool.all_mutants()[:1], ("core/test_policy.py",), 1))
