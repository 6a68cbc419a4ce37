"""When vLLM's own process dies: told of every request, those too of which AsyncLLM never says it. Without vLLM."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

import pytest

from fsm_trainer.engines.base import EngineLost, SamplingParams
from fsm_trainer.engines.vllm_local import LocalBackend
from fsm_trainer.engines.vllm_setup import Setup


class EngineDeadError(Exception):
    """As vLLM's own."""


class FakeLLM:
    """An AsyncLLM that never answers, as one whose process has died amid a request."""

    def __init__(self) -> None:
        self.errored = False
        self.asked = asyncio.Event()
        self.cancelled = False

    async def _never(self, **_: Any) -> None:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    pause_generation = resume_generation = get_weight_version = _never


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> LocalBackend:
    exceptions = ModuleType("vllm.v1.engine.exceptions")
    exceptions.EngineDeadError = EngineDeadError  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, exceptions.__name__, exceptions)
    monkeypatch.setattr("fsm_trainer.engines.vllm_local._LOOK_S", 0.001)
    return LocalBackend(Setup("ckpt", SamplingParams(), ("cpu",), "float32", 8, None, 1, 0, "shared-memory"), {})


@pytest.mark.parametrize(("method", "arguments"), [("pause", (True,)), ("weight_version", ()), ("resume", ())])
def test_a_death_ends_a_request_that_is_never_answered(
    backend: LocalBackend, method: str, arguments: tuple[Any, ...]
) -> None:
    async def die() -> bool:
        backend._llm = llm = FakeLLM()  # type: ignore[assignment]
        ask: Callable[..., Coroutine[Any, Any, Any]] = getattr(backend, method)
        asking = asyncio.ensure_future(ask(*arguments))
        await llm.asked.wait()
        llm.errored = True
        with pytest.raises(EngineLost, match="vLLM's engine process has died"):
            await asking
        await asyncio.sleep(0)
        return llm.cancelled

    assert asyncio.run(asyncio.wait_for(die(), 30))


def test_what_vllm_says_of_its_death_is_passed_on(backend: LocalBackend) -> None:
    async def dead(**_: Any) -> None:
        raise EngineDeadError

    async def die() -> None:
        backend._llm = llm = FakeLLM()  # type: ignore[assignment]
        llm.resume_generation = dead  # type: ignore[method-assign]
        await backend.resume()

    with pytest.raises(EngineLost, match="vLLM's engine process has died"):
        asyncio.run(die())


def test_a_request_that_is_given_up_is_given_up_in_vllm_too(backend: LocalBackend) -> None:
    async def give_up() -> bool:
        backend._llm = llm = FakeLLM()  # type: ignore[assignment]
        asking = asyncio.ensure_future(backend.resume())
        await llm.asked.wait()
        asking.cancel()
        await asyncio.wait({asking})
        await asyncio.sleep(0)
        return asking.cancelled() and llm.cancelled

    assert asyncio.run(asyncio.wait_for(give_up(), 30))
