"""`fsm-replay export`: what it writes, read back by the reader of each format."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from fsm_trainer.cli import replay_export
from fsm_trainer.cli.replay import main
from fsm_trainer.config import groups
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.tracking import trackers
from fsm_trainer.tracking.export import FORMATS, FRAMES, points_of
from tests.analysis.worlds import records_of
from tests.replay.virtual_run import log_of
from tests.tracking.readers import Values, read_tensorboard, read_trackio, read_wandb

WORLD = "paced, own engines, saves"
READERS: dict[str, Callable[[Path], Values]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "trackio": read_trackio,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config, records = records_of(WORLD)
    return log_of(tmp_path / "run", list(records), config)


def values_of(run: Path) -> Values:
    return {(point.step, name): value for point in points_of(read_log(run)) for name, value in point.values.items()}


def assert_same(found: Values, expected: Values, tolerance: float) -> None:
    assert set(found) == set(expected)
    keys = list(expected)
    np.testing.assert_allclose([found[k] for k in keys], [expected[k] for k in keys], rtol=tolerance)


def test_settings_and_commands_name_what_there_is() -> None:
    assert tuple(trackers.TRACKERS) == groups.TRACKERS
    assert replay_export._FORMATS == FORMATS


@pytest.mark.parametrize("tracker", READERS)
def test_trackers_get_every_value(tracker: str, run: Path, tmp_path: Path) -> None:
    """In a process of its own, as a user would: trackio reads its folder once a process, W&B leaves a service."""
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "fsm_trainer.cli.replay", "export", str(run), "--to", tracker, "-o", str(folder)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    expected = values_of(run)
    assert len(expected) > 1000
    assert json.loads(done.stdout) == {"to": tracker, "folder": str(folder), "points": 60}
    assert_same(READERS[tracker](folder), expected, 1e-6 if tracker == "tensorboard" else 1e-12)


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_files_hold_the_frames(form: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert main(["export", str(run), "--to", form, "-o", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    for name, frame_of in FRAMES.items():
        frame = frame_of(run)
        path = folder / f"{name}.{form}"
        assert rows[path.name] == len(frame)
        back = pq.read_table(path).to_pandas() if form == "parquet" else pd.read_csv(path)
        assert list(back.columns) == list(frame.columns)
        for column in frame:
            plain = frame[column]
            if plain.dtype.kind in "iuf":
                np.testing.assert_array_equal(back[column].astype("float64"), plain.astype("float64"))
            else:
                assert [None if pd.isna(v) else v for v in back[column]] == [None if pd.isna(v) else v for v in plain]


def test_the_folder_is_the_run_s_own_unless_given(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run / "events.arrows"), "--to", "csv"]) == 0
    assert sorted(path.stem for path in (run / "export" / "csv").iterdir()) == sorted(FRAMES)
    assert "steps.csv (60 rows)" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["csv", "tensorboard"])
def test_nothing_is_written_over(form: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--to", form]) == 0
    assert main(["export", str(run), "--to", form]) == 2
    assert "exists already; choose another folder with -o" in capsys.readouterr().err


def test_times_in_tensorboard_are_the_run_s(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["export", str(run), "--to", "tensorboard"]) == 0
    events = EventAccumulator(str(run / "export" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    points = list(points_of(read_log(run)))
    last_ns = read_log(run).table["t_ns"][-1].as_py()
    end_s = (run / "events.arrows").stat().st_mtime
    for event, point in zip(events.Scalars("reward_mean"), points, strict=True):
        assert event.wall_time == pytest.approx(end_s - (last_ns - point.t_ns) / 1e9, abs=1e-3)


@pytest.mark.parametrize("tracker", READERS)
def test_a_missing_package_is_one_line(
    tracker: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert main(["export", str(run), "--to", tracker]) == 2
    assert capsys.readouterr().err == (
        f"fsm-replay: error: {tracker} needs the package {tracker}, which is not installed; "
        f"pip install 'fsm-trainer[{tracker}]'\n"
    )


def test_no_run_and_no_place_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none"), "--to", "csv"]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["export", str(run), "--to", "csv", "-o", str(tmp_path / "file" / "below")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fsm-replay: error: ")
    assert error.count("\n") == 1


def test_a_value_that_is_no_number_reaches_the_files(run: Path) -> None:
    values = values_of(run)
    assert math.isnan(values[3, "approx_kl"])
