"""Log lines for people: level, form, and that they go to standard error."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from fsm_trainer.cli.logging import configure_logging
from fsm_trainer.config import TrainConfig


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(TrainConfig(log_format="json", log_level="warning"))
    log = structlog.get_logger()
    log.info("not shown")
    log.warning("slow rollout", batch_id=3)
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    entry = json.loads(line)
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {"event": "slow rollout", "level": "warning", "batch_id": 3}


def test_json_line_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(TrainConfig(log_format="json"))
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        structlog.get_logger().exception("failed")
    entry = json.loads(capsys.readouterr().err)
    assert "RuntimeError: boom" in entry["exception"]


def test_console_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(TrainConfig(log_level="debug"))
    structlog.get_logger().debug("loaded", rows=5)
    err = capsys.readouterr().err
    assert "loaded" in err
    assert "rows=5" in err
    assert "\x1b" not in err
