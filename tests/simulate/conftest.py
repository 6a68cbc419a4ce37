"""The seeds of this session, and silence for the runs' own log lines: thousands of them fail on purpose."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import structlog

SEEDS_FROM = int(os.environ.get("FSM_SEEDS_FROM") or random.SystemRandom().randrange(10**6, 10**9))
"""First of the fresh seeds; FSM_SEEDS_FROM repeats those of another session."""


def pytest_report_header() -> str:
    return f"simulated seeds: fixed ones, and fresh ones with FSM_SEEDS_FROM={SEEDS_FROM}"


@pytest.fixture(scope="session")
def seeds_from() -> int:
    return SEEDS_FROM


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)
