"""What a person sees of a run: lines where there is no terminal, a panel where there is one, nothing if unwanted."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from fsm_trainer.cli.display import PlainDisplay, RichDisplay, make_display, plain_line
from fsm_trainer.config import TrainConfig
from fsm_trainer.core.scheduler import Status
from fsm_trainer.trainers.progress import Progress

STATUS = Status(
    run="running",
    trainer="training",
    trainer_cause="",
    workers=("generating", "idle", "queued"),
    worker_causes=("", "staleness_bound", "queue_full"),
    engines=("open", "loading"),
    rollout_versions=(4, -1),
    train_version=5,
    consumed=6,
    queue_len=1,
    queue_size=2,
)
BEFORE = Progress(replace(STATUS, train_version=0), total_steps=20, elapsed_s=0.0)
METRICS = {"reward_mean": 0.12345, "loss": -0.5, "staleness_mean": 1.0}
MIDWAY = Progress(STATUS, 20, elapsed_s=50.0, metrics=METRICS, tokens_per_s=1234.5, dropped=3)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) - before == set()


def test_a_line_says_all_there_is_to_know() -> None:
    assert plain_line(MIDWAY).split("  ") == [
        "step 5/20",
        "reward 0.123",
        "staleness 1",
        "queue 1/2",
        "rollout-0 generating",
        "rollout-1 idle (staleness bound)",
        "rollout-2 queued (queue full)",
        "trainer training",
        "1234 generated tok/s",
        "left 2:30",
    ]


def test_a_line_before_the_first_step() -> None:
    line = plain_line(replace(BEFORE, status=replace(BEFORE.status, trainer="waiting", trainer_cause="generation")))
    assert line.startswith("step 0/20  queue 1/2")
    assert "reward" not in line
    assert "trainer waiting (generation)" in line
    assert line.endswith("left -")


def test_how_long_engines_have_been_starting() -> None:
    starting = replace(BEFORE, now_ns=13_400_000_000, starting_ns={1: 1_000_000_000, 0: 13_400_000_000})
    assert "queue 1/2  starting engine-0 (0 s)  starting engine-1 (12 s)  rollout-0" in plain_line(starting)
    shown = replace(starting, status=replace(STATUS, engines=("open", "starting")), starting_ns={1: 1_000_000_000})
    rows = [" ".join(line.split()) for line in panel(shown).splitlines()]
    assert any("engine-1 starting (12 s), version -" in row for row in rows)
    assert any("engine-0 open, version 4" in row for row in rows)


def test_a_line_of_a_run_without_a_known_end() -> None:
    line = plain_line(replace(MIDWAY, total_steps=None))
    assert line.startswith("step 5/?")
    assert line.endswith("left -")


@pytest.mark.parametrize(
    ("elapsed_s", "left"),
    [(0.4, "0:01"), (19.9, "1:00"), (1199.9, "1:00:00"), (1205.0, "1:00:15"), (50_000.0, "41:40:00")],
)
def test_time_left_is_readable(elapsed_s: float, left: str) -> None:
    assert plain_line(replace(MIDWAY, elapsed_s=elapsed_s)).endswith(f"left {left}")


class Lines:
    """What a PlainDisplay wrote; a test can wait for a line."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.came = threading.Semaphore(0)

    def __call__(self, line: str) -> None:
        self.written.append(line)
        self.came.release()


def test_plain_lines_come_while_it_runs_and_once_at_the_end() -> None:
    lines, now = Lines(), [BEFORE]
    display = PlainDisplay(interval_s=0.001, write=lines)
    display.start(lambda: now[0])
    assert lines.came.acquire(timeout=30)
    now[0] = MIDWAY
    assert lines.came.acquire(timeout=30)
    now[0] = replace(MIDWAY, status=replace(STATUS, train_version=20))
    display.stop()
    assert lines.written == [plain_line(p) for p in (BEFORE, MIDWAY, now[0])]


def test_a_line_that_says_nothing_new_is_not_written() -> None:
    lines, reads = Lines(), threading.Semaphore(0)

    def read() -> Progress:
        reads.release()
        return MIDWAY

    display = PlainDisplay(interval_s=0.001, write=lines)
    display.start(read)
    for _ in range(20):
        assert reads.acquire(timeout=30)
    display.stop()
    assert lines.written == [plain_line(MIDWAY)]


def test_plain_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(interval_s=1000.0)
    display.start(lambda: MIDWAY)
    display.stop()
    captured = capsys.readouterr()
    assert captured.err == plain_line(MIDWAY) + "\n"
    assert captured.out == ""


def panel(progress: Progress, **config: Any) -> str:
    """What the rich display leaves on a terminal."""
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=120, color_system=None)
    display = RichDisplay(TrainConfig(output_dir="runs/[bold]one", **config), console)
    display.start(lambda: progress)
    display.stop()
    return terminal.getvalue()


def test_the_panel_shows_every_number_and_machine() -> None:
    shown = panel(MIDWAY, algo="async-gspo")
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    for expected in (
        "async-gspo runs/[bold]one",
        "step 5 of 20 (running) left 2:30",
        "reward 0.123 generated tok/s 1234",
        "loss -0.5000 staleness 1",
        "queue 1 of 2 dropped 3",
        "trainer training version 5",
        "rollout-0 generating engine-0 open, version 4",
        "rollout-1 idle (staleness bound) engine-1 loading, version -",
        "rollout-2 queued (queue full) engine-0 open, version 4",
    ):
        assert any(expected in row for row in rows), f"{expected!r} is not in\n{shown}"


def test_the_panel_before_the_first_step() -> None:
    shown = panel(replace(BEFORE, total_steps=None))
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert any("step 0 of ? (running) left -" in row for row in rows)
    assert any("reward - generated tok/s 0" in row for row in rows)


@pytest.mark.parametrize(
    ("progress", "terminal", "expected"),
    [
        ("none", True, type(None)),
        ("none", False, type(None)),
        ("plain", True, PlainDisplay),
        ("rich", False, RichDisplay),
        ("auto", True, RichDisplay),
        ("auto", False, PlainDisplay),
    ],
)
def test_which_display(
    progress: str, terminal: bool, expected: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert type(make_display(TrainConfig(progress=progress))) is expected  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")
