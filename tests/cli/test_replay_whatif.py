"""`fsm-replay whatif`: its table, its JSON, its advice, and what it refuses in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.cli import replay_whatif
from fsm_trainer.cli.replay import main
from fsm_trainer.config.train_config import TrainConfig
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import write_log
from fsm_trainer.simulate.durations import Durations
from fsm_trainer.simulate.settings import Setting
from fsm_trainer.simulate.simulator import simulate

CONFIG = SchedulerConfig(max_steps=40)
DURATIONS = Durations.of(rollout_s=1.0, train_s=0.5)
"""One batch ahead: 40 rollouts and the last step, 40.5 s. Two workers: a step takes 0.5 s."""


@pytest.fixture
def run(tmp_path: Path) -> str:
    simulate(CONFIG, durations=DURATIONS).write(tmp_path)
    return str(tmp_path)


def ask(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    code = main(["whatif", *line])
    out, err = capsys.readouterr()
    return code, out, err


def ask_json(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    code, out, _ = ask(capsys, *line, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_table_is_sorted_and_names_the_best(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ask(capsys, run, "--async-max-staleness", "0,1,3", "--async-rollout-workers", "1,2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "recorded    paced, queue 2, staleness 1, 1 worker on 1 engine, sync every 1"
    assert lines[1].strip() == "40 steps in 40.50 s"
    assert lines[2] == "self-check  40.50 s predicted for this same setting, within 0.1 %"
    assert "other settings may be off by 8 % or more" in lines[3]
    rows = [line.split() for line in lines if line.startswith("paced")]
    walls = [float(row[6]) for row in rows]
    # At staleness 0 a second worker changes nothing.
    assert len(rows) == 5 and walls == sorted(walls)
    assert "and 1 more of staleness 0, where queue, workers and sync change nothing" in lines
    # Staleness 3, 2 workers: two batches a second, the first after 1 s, and a step for the last.
    assert rows[0][:8] == ["paced", "2", "3", "2", "1", "1", "21.00", "-48.1"]
    (recorded,) = [row for row in rows if row[-2:] == ["as", "recorded"]]
    # Start-up takes no time here, and nothing follows the last step.
    assert recorded[6:14] == ["40.50", "+0.0", "%", "1.012", "50.6", "%", "1.2", "%"]
    assert [row[6] for row in rows if row[-1] == "synchronous"] == ["60.00"]
    best = "--async-admission paced --async-queue-size 2 --async-max-staleness 3 --async-rollout-workers 2"
    assert lines[-1] == f"best: 21.0 s (-48.1 %): {best} --async-sync-interval-steps 1"


def test_of_a_synchronous_run_the_best_is_a_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SchedulerConfig(max_steps=40, queue_size=1, max_staleness=0)
    metadata = log_metadata(config, {"algo": "gspo", "rollout_tp_size": 1})
    write_log(tmp_path / LOG_NAME, simulate(config, durations=DURATIONS).records, metadata)
    axes = ("--async-max-staleness", "0,3", "--async-rollout-workers", "1,2", "--rollout-engines", "1,2")
    code, out, _ = ask(capsys, str(tmp_path), *axes)
    assert code == 0
    (recorded,) = [line.split() for line in out.splitlines() if line.endswith("synchronous, as recorded")]
    assert recorded[6:9] == ["60.00", "+0.0", "%"]
    found = ask_json(capsys, str(tmp_path), *axes)["best"]
    words = found["flags"].split()
    asked = {
        option.removeprefix("--").replace("-", "_"): value
        for option, value in zip(words[::2], words[1::2], strict=True)
    }
    assert asked["algo"] == "async-gspo"
    built = TrainConfig.build({"ckpt": "x", "dataset_path": "x", **asked}).to_scheduler_config()
    assert Setting.of(built) == Setting(**found["setting"])
    assert out.splitlines()[-1] == f"best: {found['wall_s']:.1f} s (-65.0 %): {found['flags']}"
    # Two engines only.
    code, out, _ = ask(capsys, str(tmp_path), "--rollout-engines", "2", "--async-rollout-workers", "2")
    assert out.splitlines()[-1] == "it needs --rollout-devices with 2 devices"
    _, out, _ = ask(capsys, str(tmp_path), "--rollout-scale", "2")
    assert out.splitlines()[-1] == "best: 100.0 s (+66.7 %, as recorded): --algo gspo"


def test_a_limit_of_staleness_holds_for_the_best(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask_json(
        capsys, run, "--async-max-staleness", "0,1,3", "--async-rollout-workers", "2", "--staleness-limit", "1"
    )
    assert found["best"]["setting"]["max_staleness"] == 1
    assert "--async-max-staleness 1" in found["best"]["flags"]
    assert len(found["predictions"]) == 3


def test_without_a_question_the_usual_settings_are_tried(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask_json(capsys, run)
    assert len(found["predictions"]) == 16
    assert found["self_error"] == pytest.approx(0.0, abs=1e-9)


def test_a_scale_alone_is_asked_of_the_recorded_setting(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask_json(capsys, run, "--rollout-scale", "0.5", "--train-scale", "2")
    (row,) = found["predictions"]
    # Now a step takes 1 s and a rollout 0.5 s.
    assert (row["setting"], row["wall_s"]) == (found["recorded"], pytest.approx(40.5))
    code, out, _ = ask(capsys, run, "--rollout-scale", "0.5")
    assert code == 0 and "as if       rollout 0.5x as long as recorded" in out


def test_what_cannot_run_is_listed(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, run, "--async-admission", "lockstep", "--async-sync-interval-steps", "1,4")
    assert code == 0
    assert "cannot run: lockstep with sync interval 4 needs max_staleness >= 3" in out
    code, out, _ = ask(capsys, run, "--async-admission", "lockstep", "--async-sync-interval-steps", "4")
    assert code == 0
    assert out.splitlines()[-1] == "best: none of these settings can run"


def test_a_run_that_is_not_over_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(CONFIG, durations=DURATIONS)
    replace(result, records=result.records[:900]).write(tmp_path)
    code, out, _ = ask(capsys, str(tmp_path), "--async-max-staleness", "2")
    assert code == 0
    assert "to the last step; the run did not complete" in out


def test_a_damaged_log_is_told_and_is_1(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(run) / "events.arrows"
    data = bytearray(path.read_bytes())
    data[-500] ^= 1
    path.write_bytes(data)
    code, out, err = ask(capsys, run, "--async-max-staleness", "1")
    assert code == 1 and "self-check" in out
    assert err.startswith("fsm-replay: note: reading stopped at byte")


def test_most_rows_can_be_left_out(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ask(capsys, run, "--rows", "3")
    assert len([line for line in out.splitlines() if line.startswith("paced")]) == 3
    # Of the 16 settings, 4 are one thing after the other.
    assert "and 10 slower ones (--rows)" in out


def test_progress_is_told_if_it_takes_a_while(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_whatif, "_QUIET_S", -1.0)
    _, _, err = ask(capsys, run, "--async-max-staleness", "1,2,3")
    assert err == "fsm-replay: 1 of 3 settings simulated\nfsm-replay: 2 of 3 settings simulated\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--async-max-staleness", "1,x"], "--async-max-staleness is '1,x', expected whole numbers with commas"),
        (["--async-max-staleness", "-1"], "--async-max-staleness is '-1', expected whole numbers with commas"),
        (["--async-queue-size", "0"], "--async-queue-size is 0, expected a whole number from 1 to 1000"),
        (["--async-admission", "paced,eager"], "--async-admission is 'eager', expected one of paced, greedy, lockstep"),
        (["--rollout-scale", "-1"], "--rollout-scale is '-1', expected a number from 0 to 1000"),
        (["--sync-scale", "fast"], "--sync-scale is 'fast', expected a number from 0 to 1000"),
        (["--staleness-limit", "-2"], "--staleness-limit is -2, expected at least 0"),
    ],
)
def test_odd_values_are_refused(run: str, line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ask(capsys, run, *line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_run_without_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(CONFIG, durations=DURATIONS)
    first = next(n for n, r in enumerate(result.records) if r.trigger == "step")
    replace(result, records=result.records[:first]).write(tmp_path)
    code, _, err = ask(capsys, str(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert "holds no optimiser step to learn from; ask about a run that has trained" in err
    code, _, err = ask(capsys, str(tmp_path / "nothing"))
    assert code == 2 and "does not exist" in err


def test_the_mode_of_sync_can_be_asked_and_is_told(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    axes = ("--async-sync-mode", "drain,inflight", "--async-rollout-workers", "2", "--async-max-staleness", "2")
    code, out, _ = ask(capsys, run, *axes)
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.startswith("paced")]
    # One engine, two workers: draining, they wait for each other at each sync.
    assert [(row[6], row[-2:] == ["in", "flight"]) for row in rows] == [("21.00", True), ("27.50", False)]
    assert out.splitlines()[-1].endswith("--async-sync-interval-steps 1 --async-sync-mode inflight")
    simulate(replace(CONFIG, sync_mode="inflight"), durations=DURATIONS).write(Path(run, "flying"))
    code, out, _ = ask(capsys, f"{run}/flying", "--async-sync-mode", "drain")
    assert out.startswith("recorded    paced, queue 2, staleness 1, 1 worker on 1 engine, sync every 1, in flight\n")
    assert out.splitlines()[-1].endswith("--async-sync-mode drain")
    code, _, err = ask(capsys, run, "--async-sync-mode", "fast")
    assert code == 2 and "--async-sync-mode is 'fast', expected one of drain, inflight" in err
