"""`fsm-replay watch` on a log that is written in steps: what it shows, and when it ends. No time passes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fsm_trainer.analysis.live import COLUMNS, LiveRun
from fsm_trainer.cli import replay_watch
from fsm_trainer.cli.replay import main
from fsm_trainer.cli.replay_watch import watch
from fsm_trainer.cli.watch_view import panel, plain
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.eventlog.follow import LogFollower
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from tests.replay.virtual_run import log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=10, workers=2, max_staleness=1)
ROWS = virtual_run(CONFIG, degenerate={2}, metrics=True)


def watched(
    run: Path, wait: Callable[[], None], clock: Callable[[], int] = lambda: 0, *, once: bool = False
) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    follower = LogFollower(run, COLUMNS)
    watch(follower, LiveRun(CONFIG.to_dict()), shown.append, wait=wait, now_ns=clock, once=once)
    return shown


def test_it_follows_a_run_to_its_end(tmp_path: Path) -> None:
    writer = EventLogWriter(tmp_path / LOG_NAME, metadata=log_metadata(CONFIG, {}))
    left = list(ROWS)

    def grow() -> None:
        for row in left[:60]:
            writer.append(row)
        del left[:60]
        writer.flush()
        if not left:
            writer.close()

    grow()
    shown = watched(tmp_path, grow)
    assert [s["events"] for s in shown] == [*range(60, len(ROWS), 60), len(ROWS)]
    assert [s["state"] for s in shown] == ["running"] * (len(shown) - 1) + ["ended"]
    assert [s["step"] for s in shown] == sorted(s["step"] for s in shown)
    assert shown[-1]["outcome"] == "completed"


def test_time_goes_on_between_rows(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path / LOG_NAME, metadata=log_metadata(CONFIG, {})) as writer:
        for row in ROWS[:200]:
            writer.append(row)
        writer.flush()
        ticks = iter([0, 0, 0, 4_000_000_000, 7_000_000_000])

        def wait() -> None:
            if len(list(tmp_path.glob("stop"))):
                raise KeyboardInterrupt
            (tmp_path / "stop").touch()

        shown: list[dict[str, Any]] = []
        with pytest.raises(KeyboardInterrupt):
            watch(
                LogFollower(tmp_path, COLUMNS),
                LiveRun(CONFIG.to_dict()),
                shown.append,
                wait=wait,
                now_ns=lambda: next(ticks),
                once=False,
            )
    first, second = shown
    assert second["elapsed_s"] - first["elapsed_s"] == pytest.approx(4.0)
    longer = {m["machine"]: m["for_s"] for m in second["machines"]}
    assert all(longer[m["machine"]] - m["for_s"] == pytest.approx(4.0) for m in first["machines"])


def test_a_crashed_run_ends_it(tmp_path: Path) -> None:
    def never() -> None:
        raise AssertionError("there is nothing to wait for")

    shown = watched(log_of(tmp_path, ROWS[:150], CONFIG), never)
    assert [s["state"] for s in shown] == ["crashed"]
    assert "crashed: the log has no run_end" in plain(shown[0], "run")


def test_once_on_a_going_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLogWriter(tmp_path / LOG_NAME, metadata=log_metadata(CONFIG, {})) as writer:
        for row in ROWS[:300]:
            writer.append(row)
        writer.flush()
        assert main(["watch", str(tmp_path), "--once"]) == 0
        text = capsys.readouterr().out
        assert main(["watch", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["outcome"], found["events"]) == ("running", None, 300)
    for line in ("step ", "queue ", "versions: trainer", "rollout-1", "staleness", "drop ", "batch 2, degenerate"):
        assert line in text
    waiting = [m for m in found["machines"] if m["waits"]]
    assert waiting
    assert all(f"waits {m['waits']}" in text for m in waiting)


def test_panel_shows_the_same(tmp_path: Path) -> None:
    (s,) = watched(log_of(tmp_path, ROWS, CONFIG), lambda: None)
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(panel(s, "run"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("completed: max_steps reached", "step 10 of 10", "rollout-0", "batch 2, degenerate", "staleness   1"):
        assert part in text
    assert "0.00 s" not in text, "for how long a machine has stood still says nothing"
    assert "0.00 s" not in plain(s, "run")


def test_a_failure_cannot_steer_the_terminal(tmp_path: Path) -> None:
    rows = virtual_run(CONFIG, fail_generation_of=4)
    rows = [r._replace(message=r.message and r.message.replace("no memory", "no\x1b[2J\nmemory")) for r in rows]
    (s,) = watched(log_of(tmp_path, rows, CONFIG), lambda: None)
    text = plain(s, "run")
    assert "\x1b" not in text
    assert "RuntimeError no\\x1b[2J\\nmemory" in text


def test_ctrl_c_is_a_clean_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replay_watch, "watch", interrupted)
    assert main(["watch", str(log_of(tmp_path, ROWS, CONFIG))]) == 0


def test_a_damaged_log_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = log_of(tmp_path, ROWS, CONFIG)
    data = bytearray((run / LOG_NAME).read_bytes())
    data[len(data) // 2] ^= 255
    (run / LOG_NAME).write_bytes(data)
    assert main(["watch", str(run)]) == 1
    assert "log: reading stopped at byte" in capsys.readouterr().out


def test_bad_usage_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for value in ("0", "-1", "x", "nan", "1e9"):
        with pytest.raises(SystemExit) as stop:
            main(["watch", str(tmp_path), "--interval", value])
        assert stop.value.code == 2
        assert "expected seconds from 0.05 to 3600" in capsys.readouterr().err
