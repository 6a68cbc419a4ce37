"""When a server that owes answers is given up, and when it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest

from fsm_trainer.engines import vllm_health
from fsm_trainer.engines.base import EngineLost
from fsm_trainer.engines.vllm_health import HEALTH, ServerHealth

Look = int | Exception | Callable[[], None]
"""A status, or what is raised; or what is done before it times out."""
MISSED = httpx.ReadTimeout("too late")


class Client:
    """Answers one look after the other; after the last one it never answers again."""

    def __init__(self, looks: Iterable[Look]) -> None:
        self._looks = iter(looks)
        self.asked = 0

    async def get(self, path: str, *, timeout: float) -> httpx.Response:
        assert (path, timeout) == (HEALTH, vllm_health._ANSWER_S)
        self.asked += 1
        look = next(self._looks, MISSED)
        if isinstance(look, int):
            return httpx.Response(look)
        if not isinstance(look, Exception):
            look()
            for _ in range(10):  # what waits for it goes on
                await asyncio.sleep(0)
        raise look if isinstance(look, Exception) else MISSED


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes between two looks."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: sleep(0))


def watch(looks: Iterable[Look], tokens: int = 0, requests: int = 1) -> tuple[list[Any], int]:
    """What comes of requests that end as looks say, by `end[n]` in them; and how often the server was asked."""
    client = Client(looks)

    async def run() -> list[Any]:
        futures.extend(asyncio.get_running_loop().create_future() for _ in range(requests))
        health = ServerHealth("the server")

        async def answer(number: int) -> int:
            return int(await futures[number])

        each: Any = client
        waits = (health.watched(each, "/work", answer(number), tokens) for number in range(requests))
        return await asyncio.gather(*waits, return_exceptions=True)

    return asyncio.run(run()), client.asked


futures: list[asyncio.Future[int]] = []


@pytest.fixture(autouse=True)
def none_left() -> None:
    futures.clear()


def end(number: int) -> Callable[[], None]:
    return lambda: futures[number].set_result(number)


@pytest.mark.parametrize("missed", [MISSED, httpx.ConnectError("refused"), httpx.RemoteProtocolError("hung up")])
def test_it_is_lost_after_six_questions_in_vain(missed: Exception) -> None:
    (lost,), asked = watch([missed] * 9)
    assert asked == 6
    assert isinstance(lost, EngineLost)
    assert str(lost) == "the server has not answered /health 6 times in a row, each within 10 s, during /work"


@pytest.mark.parametrize(
    ("tokens", "looks"),
    [
        (14_000, 6),
        # 2 x 50,000 tokens at 0.5 ms are 50 s more, in which it is asked 3 times: every 5 s, and 10 s for an answer.
        (50_000, 9),
        (120_000, 14),
        # Never more than two minutes, and so three and a half in all.
        (1_000_000, 14),
    ],
)
def test_it_may_take_longer_for_the_tokens_that_it_owes_but_not_for_ever(tokens: int, looks: int) -> None:
    found, asked = watch([], tokens=tokens, requests=2)
    assert asked == looks
    assert all(isinstance(each, EngineLost) for each in found)


def test_an_answer_now_and_then_will_do() -> None:
    assert watch([*([MISSED] * 5), 200, *([MISSED] * 5), 200, *([MISSED] * 4), end(0)]) == ([0], 17)


def test_so_will_an_answer_to_anything_else() -> None:
    assert watch([*([MISSED] * 4), end(0), *([MISSED] * 4), end(1)], requests=2) == ([0, 1], 10)


def test_a_server_whose_vllm_is_dead_is_lost_at_once() -> None:
    (lost,), asked = watch([200, 503])
    assert (str(lost), asked) == ("the server answers /health with 503 during /work", 2)


def test_what_a_request_raises_is_raised() -> None:
    (raised,), _ = watch([200, lambda: futures[0].set_exception(httpx.ReadError("gone"))])
    assert isinstance(raised, httpx.ReadError)


def test_nothing_is_asked_once_everything_is_answered() -> None:
    client: Any = Client([200, 200, end(0)])

    async def run() -> None:
        futures.append(asyncio.get_running_loop().create_future())

        async def answer() -> int:
            return await futures[0]

        assert await ServerHealth("the server").watched(client, "/work", answer(), 0) == 0
        asked = client.asked
        for _ in range(10):
            await asyncio.sleep(0)
        assert client.asked == asked == 3

    asyncio.run(run())
