"""`fsm-replay recover` and `compact`, what every command says of a log that it cannot read, and compacted runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsm_trainer.cli.replay import main
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.eventlog.frame import END_OF_STREAM
from fsm_trainer.eventlog.schema import LOG_NAME, SCHEMA, VERSION_KEY, schema_crc
from fsm_trainer.eventlog.writer import EventLogWriter
from tests.replay.virtual_run import log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=4)
ROWS = virtual_run(CONFIG, metrics=True)
COMMANDS = ("summary", "verify", "events", "recover", "compact")
NOBODY = 65534


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run's directory."""
    return log_of(tmp_path / "run", ROWS, CONFIG)


def refused(capsys: pytest.CaptureFixture[str], command: str, path: Path) -> str:
    """The one line with which a command exits 2."""
    assert main([command, str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("fsm-replay: error: ")
    return line


@contextmanager
def as_nobody(run: Path) -> Iterator[None]:
    """Without the rights of root, who may do anything; the folders above the run are open."""
    user = os.geteuid()
    if user == 0:
        for folder in run.parents[:3]:
            folder.chmod(0o755)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def test_recover_cuts_and_says_what_was_lost(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / LOG_NAME
    path.write_bytes(path.read_bytes()[:-500])
    assert main(["recover", str(run)]) == 0
    cut, left = capsys.readouterr().out.splitlines()
    kept = run / "events.arrows.torn-1"
    assert cut.startswith(f"cut off {kept.stat().st_size} bytes, kept in {kept.name}: it ends inside")
    assert "the run crashed after them; lost is what was being written" in left
    assert main(["recover", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["removed_bytes"], found["copies"], found["problem"], found["complete"]) == (0, [], None, False)
    assert f"{found['events']} events are left" in left
    assert main(["verify", str(run)]) == 0


def test_recover_of_a_damaged_log_needs_force(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / LOG_NAME
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    assert "give --force to lose what follows" in refused(capsys, "recover", run)
    assert main(["verify", str(run)]) == 1
    capsys.readouterr()
    assert main(["recover", str(run), "--force"]) == 0
    assert "lost is all events after these" in capsys.readouterr().out
    assert main(["verify", str(run)]) == 0


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_commands_print_the_same_of_a_compacted_run(run: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    def printed() -> list[str]:
        texts = []
        for arguments in (["summary"], ["verify"], ["events"], ["events", "--json", "--kind", "metric"]):
            assert main([arguments[0], str(run), *arguments[1:]]) == 0
            output = capsys.readouterr()
            texts += [line for line in output.out.splitlines() if not line.startswith("run  ")]
            assert output.err == ""
        return texts

    before = printed()
    assert main(["compact", str(run), "--to", form]) == 0
    assert f"{len(ROWS)} events: " in capsys.readouterr().out
    assert printed() == before
    assert main(["compact", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_before"] == 0
    assert main(["compact", str(run)]) == 0
    assert capsys.readouterr().out.startswith("nothing to compact: ")
    assert main(["recover", str(run)]) == 0
    assert capsys.readouterr().out == f"nothing to recover: {len(ROWS)} events, all good; the run ended\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in refused(capsys, command, tmp_path / "none")
    assert "is not a run directory" in refused(capsys, command, tmp_path)
    (tmp_path / LOG_NAME).write_text("This is a text file, and no log of anything at all.")
    assert "is not a readable event log" in refused(capsys, command, tmp_path)
    (tmp_path / LOG_NAME).write_bytes(b"")
    assert "was cut off before its first row" in refused(capsys, command, tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("version", "age"), [("2.0", "newer"), ("0.9", "older")])
def test_a_log_of_another_major_schema(
    command: str, version: str, age: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {VERSION_KEY: version}
    schema = SCHEMA.with_metadata({**values, "fsm.schema_crc32": schema_crc(SCHEMA, values)})
    (tmp_path / LOG_NAME).write_bytes(bytes(schema.serialize()) + END_OF_STREAM)
    assert f"has event log schema {version}, {age} than 1." in refused(capsys, command, tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_may_not_be_read(command: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(run)]) == 0  # imports what it needs, which nobody may not read either
    capsys.readouterr()
    run.chmod(0)
    with as_nobody(run):
        assert "Permission denied" in refused(capsys, command, run)
    run.chmod(0o755)
    for path in run.iterdir():
        path.chmod(0)
    with as_nobody(run):
        assert "Permission denied" in refused(capsys, command, run)


def test_a_run_still_going_is_looked_at_and_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLogWriter(tmp_path / LOG_NAME, metadata={"fsm.config_json": json.dumps(CONFIG.to_dict())}) as writer:
        for row in ROWS[:40]:
            writer.append(row)
        writer.flush()
        for command in ("recover", "compact"):
            assert "still being written" in refused(capsys, command, tmp_path)
        for command in ("summary", "verify", "events"):
            assert main([command, str(tmp_path)]) == 0
            output = capsys.readouterr()
            assert "still going" in output.out + output.err or "running" in output.out + output.err


def test_a_folder_that_may_not_be_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / LOG_NAME
    before = path.read_bytes()[:-500]
    assert main(["recover", str(run)]) == 0
    assert main(["compact", str(log_of(run.parent / "other", ROWS, CONFIG))]) == 0
    capsys.readouterr()
    run.chmod(0o555)
    with as_nobody(run):
        assert "cannot compact" in refused(capsys, "compact", run)
    path.write_bytes(before)
    with as_nobody(run):
        assert "cannot recover" in refused(capsys, "recover", run)
    assert [(p.name, p.read_bytes()) for p in run.iterdir()] == [(LOG_NAME, before)]
    run.chmod(0o755)
