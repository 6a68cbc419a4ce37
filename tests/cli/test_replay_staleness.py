"""`fsm-replay staleness` as a user sees it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fsm_trainer.analysis import staleness_frame
from fsm_trainer.cli.replay import main
from tests.analysis.worlds import records_of
from tests.replay.virtual_run import log_of

EFFECTS = ["reward", "ratio", "max", "KL", "gap"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config, records = records_of("greedy, drops")
    return log_of(tmp_path / "run", list(records), config)


def test_text_says_it_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["staleness", str(run), "--rows", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "149 batches consumed: 89 dropped, 60 trained"
    assert lines[1].startswith("mean staleness of the consumed 1.88 (")
    trained = [row for row in staleness_frame(run).to_dict("records") if row["state"] == "trained"]
    mean = sum(int(row["staleness"]) for row in trained) / 60
    assert lines[1].endswith(f"in queue), of the trained {mean:.2f}")
    assert lines[3].split() == ["staleness", "trained", "dropped", "in", "flight", "in", "queue", *EFFECTS]
    assert lines[4].split()[:5] == ["0", "5", "0", "0.00", "0.00"]
    bars = [line for line in lines if line.startswith(("█", "░")) or "1-10" in line]
    assert len(bars) == 6
    assert max(line.split()[0].count("█") + line.split()[0].count("░") for line in bars) == 24
    assert any(line.startswith("dropped (stale): ") and "slower to generate" in line for line in lines)
    assert len({len(line) for line in lines[3:14] if not line.startswith(("reward:", "KL:", "note:"))} - {0}) == 1


def test_every_batch_has_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["staleness", str(run), "--by", "batch"]) == 0
    out = capsys.readouterr().out
    # The list, and a line of the table of groups.
    assert out.count("dropped (stale)") == 88 + 2
    assert out.count("dropped (no_step)") == 1 + 2


def test_json_has_the_tables(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["staleness", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"by_staleness", "by_step", "by_batch", "bias", "samples_kept", "findings"}
    assert sum(row["dropped"] for row in found["by_staleness"]) == 89
    assert sum(row["dropped"] for row in found["by_step"]) == 89


def test_plot_goes_into_the_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plot.svg"
    assert main(["staleness", str(run), "--plot", str(path)]) == 0
    assert "in queue" in path.read_text(encoding="utf-8") or path.stat().st_size > 5000
    assert f"drawn into {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "plot.jpg"], "--plot is 'plot.jpg', expected a file that ends in .png, .svg, .pdf"),
        (["--plot", "/nowhere/plot.png"], "cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    arguments: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["staleness", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_matplotlib_is_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["staleness", str(run), "--plot", str(tmp_path / "plot.png")]) == 2
    assert "--plot needs the package matplotlib, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "plot.png").exists()


def test_a_run_without_a_consumed_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, records = records_of("paced")
    run = log_of(tmp_path / "run", list(records[:20]), config)
    assert main(["staleness", str(run)]) == 0
    assert capsys.readouterr().out == "no batch was consumed\n"
    assert main(["staleness", str(run), "--json", "--plot", str(tmp_path / "plot.png")]) == 0
    assert json.loads(capsys.readouterr().out)["by_batch"] == []
