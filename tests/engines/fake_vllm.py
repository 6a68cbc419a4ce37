"""A vLLM of a few lines: draws with the weights it has, stands still when paused, waits and fails where a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.vllm_requests import Completion

LIMIT_S = 30.0
"""After which a test gives up; nothing here takes any time."""
TOKENS = 3
"""Of each completion: one before the point where a test can hold it, two behind."""


class Hold:
    """A call that waits inside the fake until the test releases it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._go: asyncio.Event | None = None

    def wait_until_reached(self) -> None:
        assert self._reached.wait(LIMIT_S)

    def release(self) -> None:
        self.wait_until_reached()
        assert self._loop is not None
        assert self._go is not None
        self._loop.call_soon_threadsafe(self._go.set)

    async def wait(self) -> None:
        self._loop, self._go = asyncio.get_running_loop(), asyncio.Event()
        self._reached.set()
        await self._go.wait()


class FakeVLLM:
    """A `vllm_rollout.Backend`."""

    positions = 16

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tag = "default"
        self.ended: list[str] = []
        """How each completion ended, in order: "whole" or "cut"."""
        self.salts: list[str] = []
        """Of each completion that was asked for."""
        self.cleared: list[bool] = []
        """Of each pause: whether caches were to be dropped."""
        self.queues = False
        """Whether a completion draws nothing before the point where a test can hold it."""
        self.takes_tag = True
        self._holds: dict[str, list[Hold]] = {}
        self._failures: dict[str, list[Exception]] = {}
        self._going = asyncio.Event()

    def hold(self, method: str) -> Hold:
        """Let the next call of a method wait."""
        hold = Hold()
        self._holds.setdefault(method, []).append(hold)
        return hold

    def fail(self, method: str, error: Exception) -> None:
        """Let the next call of a method raise, after it was held if it is."""
        self._failures.setdefault(method, []).append(error)

    async def open(self) -> dict[str, float]:
        self._going.set()
        await self._called("open")
        return {"build_s": 1.0}

    async def complete(self, prompt: Sequence[int], arguments: dict[str, Any], salt: str) -> list[Completion]:
        first = self.tag
        self.salts.append(salt)
        try:
            await self._called("complete")
            await self._going.wait()
        except BaseException:
            self.ended.append("cut")
            raise
        self.ended.append("whole")
        whole = self.queues or first == self.tag
        spans = [(self.tag, TOKENS)] if whole else [(first, 1), (self.tag, TOKENS - 1)]
        return [
            Completion([prompt[0] + i] * TOKENS, [-0.5] * TOKENS, "length", spans) for i in range(int(arguments["n"]))
        ]

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        await self._called("prompt_logprobs")
        return (-0.25,) * (len(tokens) - 1)

    async def pause(self, clear_cache: bool) -> None:
        self._going.clear()
        self.cleared.append(clear_cache)
        await self._called("pause")

    async def transfer(self, snapshot: Snapshot, tag: str) -> int:
        await self._called("transfer")
        if self.takes_tag:
            self.tag = tag
        return snapshot.nbytes

    async def weight_version(self) -> str:
        await self._called("weight_version")
        return self.tag

    async def resume(self) -> None:
        self._going.set()
        await self._called("resume")

    async def close(self) -> None:
        await self._called("close")

    async def _called(self, method: str) -> None:
        self.calls.append(method)
        if holds := self._holds.get(method):
            await holds.pop(0).wait()
        if failures := self._failures.get(method):
            raise failures.pop(0)
