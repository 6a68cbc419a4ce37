"""An event loop on a thread of its own: what it gives back, what it ends, and that it keeps no process alive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from fsm_trainer.engines.event_loop import EventLoopThread

LIMIT_S = 60.0
"""So that what is broken fails a test instead of hanging it; nothing is measured."""
LEFT_OPEN = """
import sys
from fsm_trainer.engines.base import SamplingParams
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from tests.engines.fake_vllm import FakeVLLM
engine = VLLMRolloutEngine(FakeVLLM(), SamplingParams(), (2,))
engine.start()
sys.exit(3)
"""


def test_it_gives_back_what_comes_of_it() -> None:
    loop = EventLoopThread("loop")

    async def where() -> str:
        return threading.current_thread().name

    async def failing() -> None:
        raise ValueError("no")

    assert loop.submit(where()).result(LIMIT_S) == "loop"
    with pytest.raises(ValueError, match="no"):
        loop.submit(failing()).result(LIMIT_S)
    loop.close()


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_what_hangs_can_be_ended(how: str) -> None:
    before, loop = set(threading.enumerate()), EventLoopThread("loop")
    begun, ended = threading.Event(), threading.Event()

    async def hanging() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = loop.submit(hanging())
    assert begun.wait(LIMIT_S)
    if how == "cancel":
        assert future.cancel()
        assert ended.wait(LIMIT_S)
    loop.close()
    assert ended.is_set()
    with pytest.raises(CancelledError):
        future.result(LIMIT_S)
    assert set(threading.enumerate()) == before


def test_a_process_ends_though_an_engine_was_left_open() -> None:
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", LEFT_OPEN], cwd=root, timeout=LIMIT_S).returncode == 3
