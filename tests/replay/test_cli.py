"""`fsm-replay`: exit codes, one clear line on errors, filters, and no heavy import for --help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsm_trainer.cli.replay import main
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record
from fsm_trainer.eventlog.schema import LOG_NAME
from tests.replay.virtual_run import log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=4)
ROWS = virtual_run(CONFIG, metrics=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run's directory."""
    return log_of(tmp_path / "run", ROWS, CONFIG)


def events(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[int]:
    """The seq numbers that `events` lists, the same as text and as JSON."""
    assert main(["events", str(run), *options]) == 0
    text = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert main(["events", str(run), "--json", *options]) == 0
    assert [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()] == text
    return text


def wanted(**equal: object) -> list[int]:
    return [row.seq for row in ROWS if all(getattr(row, name) == value for name, value in equal.items())]


def test_summary(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(run)]) == 0
    assert "completed: max_steps reached" in capsys.readouterr().out
    assert main(["summary", str(run / LOG_NAME), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    decisions = sum(row.kind not in ("input", "metric") for row in ROWS)
    assert f"{decisions} decisions on {len(wanted(kind='input'))} inputs agree" in capsys.readouterr().out
    assert main(["verify", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"] == decisions


def test_verify_of_an_edited_log_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = wanted(kind="transition", dest="training")[0]
    rows = [*ROWS[:at], ROWS[at]._replace(dest="dropped"), *ROWS[at + 1 :]]
    assert main(["verify", str(log_of(tmp_path, rows, CONFIG))]) == 1
    assert f"first divergence at seq {at}" in capsys.readouterr().out


def test_a_damaged_log_is_1_and_a_cut_one_is_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (run / LOG_NAME).read_bytes()
    flipped = bytearray(whole)
    flipped[-500] ^= 255
    for data, code, word in ((bytes(flipped), 1, "checksum"), (whole[:-500], 0, "ends inside")):
        (run / LOG_NAME).write_bytes(data)
        for command in ("summary", "verify", "events"):
            assert main([command, str(run)]) == code
            output = capsys.readouterr()
            assert word in output.out + output.err
            assert "crashed" in output.out + output.err


def test_event_filters(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert events(run, capsys) == list(range(len(ROWS)))
    assert events(run, capsys, "--kind", "drop") == []
    assert events(run, capsys, "--kind", "version") == wanted(kind="version")
    both = sorted([*wanted(kind="version"), *wanted(kind="metric")])
    assert events(run, capsys, "--kind", "version", "--kind", "metric") == both
    assert events(run, capsys, "--machine", "trainer") == wanted(machine="trainer")
    assert events(run, capsys, "--machine", "batch-2") == wanted(entity="batch-2")
    assert events(run, capsys, "--batch", "2") == wanted(batch_id=2)
    assert events(run, capsys, "--from", "10", "--to", "14") == [10, 11, 12, 13, 14]
    found = events(run, capsys, "--kind", "transition", "--machine", "rollout-0", "--batch", "1", "--to", "90")
    assert found == [s for s in wanted(kind="transition", entity="rollout-0", batch_id=1) if s <= 90]
    assert events(run, capsys, "--kind", "metric", "--machine", "rollout-0") == []
    assert main(["events", str(run), "--kind", "drop"]) == 0
    assert capsys.readouterr().err == "fsm-replay: note: no event is like that\n"


def test_events_show_seconds_since_the_begin_and_the_move(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = wanted(kind="transition", entity="trainer", dest="training")[0]
    assert main(["events", str(run), "--from", str(at), "--to", str(at)]) == 0
    line = capsys.readouterr().out
    assert line.split()[:6] == [str(at), "0.188000", "transition", "trainer", "checking", "->"]
    assert "batch_id=0" in line


def test_json_event_is_the_row_and_valid_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    assert main(["events", str(run), "--json"]) == 0
    found = [json.loads(line, parse_constant=refuse) for line in capsys.readouterr().out.splitlines()]
    for row, values in zip(ROWS, found, strict=True):
        expected = {name: value for name, value in row._asdict().items() if value is not None and name != "value"}
        values.pop("value", None)
        assert values == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["summary", "{tmp}"], "is not a run directory: it holds no events.arrows"),
        (["verify", "{tmp}/none"], "does not exist"),
        (["events", "{run}", "--kind", "explosion"], "--kind is 'explosion', expected one of input, transition"),
        (["events", "{run}", "--machine", "warp"], "--machine is 'warp', expected one of batch, engine"),
    ],
)
def test_bad_usage_is_2_and_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([a.format(tmp=run.parent, run=run) for a in arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("fsm-replay: error: ")
    assert output.err.count("\n") == 1
    assert message in output.err


@pytest.mark.parametrize("arguments", [[], ["explode"], ["events", "x", "--batch", "two"], ["verify"]])
def test_usage_that_argparse_refuses_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("fsm-replay: error: ")
    assert error.endswith(" --help\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "begins"),
    [("timeline", "Write a Chrome/Perfetto trace"), ("diagram", "The state machines as mermaid; with RUN")],
)
def test_help_writes_names_as_they_are(command: str, begins: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert begins in capsys.readouterr().out


def test_a_damaged_log_is_told_by_what_draws_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((run / LOG_NAME).read_bytes())
    data[-500] ^= 255
    (run / LOG_NAME).write_bytes(data)
    for command in ("timeline", "diagram"):
        assert main([command, str(run)]) == 1
        assert "checksum" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom fsm_trainer.cli.replay import main\ntry:\n    main(['--help'])\nexcept SystemExit as stop:\n"
        "    assert stop.code == 0\nheavy = {'pyarrow', 'pandas', 'numpy', 'torch', 'transitions', 'transformers'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "loaded []" in done.stdout
    for command in ("summary", "verify", "events"):
        assert command in done.stdout


def test_a_reader_that_goes_away_is_quiet(tmp_path: Path) -> None:
    rows: list[Record] = virtual_run(SchedulerConfig(max_steps=400))
    log_of(tmp_path, rows, SchedulerConfig(max_steps=400))
    process = subprocess.Popen(
        [sys.executable, "-m", "fsm_trainer.cli.replay", "events", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().split()[0] == b"0"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("option", ["--batch", "--from", "--to"])
@pytest.mark.parametrize("value", ["9" * 30, "9" * 5000, "1e3", "x", ""])
def test_numbers_that_no_column_holds(option: str, value: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["events", str(run), option, value])
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "expected a whole number" in last
    assert len(last) < 200


@pytest.mark.parametrize("command", ["summary", "verify", "events"])
def test_a_path_the_system_refuses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "x" * 5000]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("cannot be read: File name too long")
    assert len(line) < 200


def test_closed_standard_output(run: Path) -> None:
    command = f"'{sys.executable}' -m fsm_trainer.cli.replay verify '{run}' >&-"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
